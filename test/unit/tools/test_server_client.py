"""ServerClient: what a person reads when a server, or what is asked of it, is not as expected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from chunk_cache_tools.doctor.server_checks import DoctorClient
from chunk_cache_tools.server_client import ServerClient, ServerGone, ServerRefused

PAGE = "<!doctype html><p>caf\xe9</p>".encode("latin-1")


class _WebPage(BaseHTTPRequestHandler):
    """Answers whatever it is asked with a page that is no JSON, and no UTF-8."""

    def do_GET(self) -> None:
        self.send_response(401 if self.path == "/flush_cache" else 200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web_page() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _WebPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_page_that_is_no_server_of_sglang(web_page: str) -> None:
    with DoctorClient(web_page) as client:
        client.chunk_counts()
        with pytest.raises(ServerRefused, match="was not answered with a JSON object"):
            client.ask("GET", "/server_info")


def test_a_flush_that_is_not_allowed_ends_at_once(web_page: str) -> None:
    with ServerClient(web_page) as client, pytest.raises(ServerRefused, match="--api-key"):
        client.flush()


def test_a_flush_of_a_server_that_is_gone() -> None:
    with ServerClient("http://127.0.0.1:1") as client, pytest.raises(ServerGone, match="no server answers"):
        client.flush()


@pytest.mark.parametrize("key", ["sk-SECRET\nmore", "sk-SECR\xc9T"])
def test_a_key_that_no_header_may_have_is_not_printed(key: str) -> None:
    with pytest.raises(ServerRefused, match="--api-key: ") as refused:
        ServerClient("http://127.0.0.1:1", key)
    assert "SECR" not in str(refused.value)


def test_white_space_around_a_key_does_not_count() -> None:
    with ServerClient("http://127.0.0.1:1", " sk-1\n") as client:
        assert client.http.headers["Authorization"] == "Bearer sk-1"
