"""ServerClient: what a person reads when a server, or what is asked of it, is not as expected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from chunk_cache_tools.doctor import doctor_command
from chunk_cache_tools.doctor.server_checks import DoctorClient
from chunk_cache_tools.server_client import KEY_ENV, ServerClient, ServerGone, ServerRefused, without_user
from chunk_cache_tools.verify import verify_command
from chunk_cache_tools.warm import warm_command
from chunk_cache_tools.warm.corpus import open_corpus
from chunk_cache_tools.warm.warm_server import WarmServer

PAGE = "<!doctype html><p>caf\xe9</p>".encode("latin-1")


class _WebPage(BaseHTTPRequestHandler):
    """Answers whatever it is asked with a page that is no JSON, and no UTF-8."""

    body = PAGE

    def do_GET(self) -> None:
        self.send_response({"/flush_cache": 401, "/circle": 302}.get(self.path, 200))
        self.send_header("Content-Length", str(len(self.body)))
        if self.path == "/circle":
            self.send_header("Location", "/circle")
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


class _OtherService(_WebPage):
    """Answers with a JSON object that is not SGLang's."""

    body = b'{"status": "ok"}'


@pytest.fixture
def web_page() -> Iterator[str]:
    yield from _serve(_WebPage)


@pytest.fixture
def other_service() -> Iterator[str]:
    yield from _serve(_OtherService)


def _serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
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


def test_an_empty_key_is_no_key(monkeypatch: pytest.MonkeyPatch, web_page: str) -> None:
    monkeypatch.setenv(KEY_ENV, "")
    args = doctor_command._parser().parse_args(["--url", web_page])
    with ServerClient(args.url, args.api_key) as client:
        assert "Authorization" not in client.http.headers
        assert client.look("/").is_success


@pytest.mark.parametrize("path", ["/circle", "/packed"])
def test_an_answer_that_cannot_be_read_is_one_sentence(path: str, web_page: str) -> None:
    with DoctorClient(web_page) as client, pytest.raises(ServerRefused, match="the answer cannot be read"):
        client._look(path)


def _warm(url: str, folder: Path) -> int:
    (folder / "corpus.jsonl").write_text('{"text": "a"}\n')
    return warm_command.main([str(folder / "corpus.jsonl"), "--url", url])


@pytest.mark.parametrize(
    ("run", "missing"),
    [
        (_warm, "/chunk_cache/stats was answered without instance, ranks"),
        (lambda url, _: doctor_command.main(["--url", url]), "/chunk_cache/stats was answered without config, ranks"),
        (lambda url, _: verify_command.main(["--url", url]), "/model_info was answered without model_path"),
        (
            lambda url, _: verify_command.main(["--url", url, "--tokenizer", "m"]),
            "/server_info was answered without page_size",
        ),
    ],
)
def test_a_server_of_another_kind_is_one_sentence(
    run: Callable[[str, Path], int],
    missing: str,
    other_service: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(other_service, tmp_path) in (1, 2)
    told = "".join(capsys.readouterr())
    assert missing in told
    assert "name the address of an SGLang server with --chunk-cache" in told


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://user:SECRET@[::1]:1/a", "http://[::1]:1/a"),
        ("http://user:SEC@RET/S@host", "http://host"),
        ("user:SECRET@host:1", "host:1"),
        ("nothing", "nothing"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_user(url) == shown


@pytest.mark.parametrize("url", ["http://user:SECRET@127.0.0.1:1", "http://user:SEC#RET@host", "user:SECRET@host"])
def test_messages_do_not_have_the_password_of_the_address(url: str) -> None:
    with pytest.raises((ServerRefused, ServerGone)) as told:  # noqa: PT012
        with ServerClient(url) as client:
            client.flush()
        raise client.refused("an object that is not ours", "change it")
    assert "SEC" not in str(told.value)


def test_a_refused_key_is_told_without_the_password_of_the_address(web_page: str) -> None:
    with (
        ServerClient(web_page.replace("//", "//user:SECRET@")) as client,
        pytest.raises(ServerRefused, match="--api-key") as refused,
    ):
        client.flush()
    assert "SECRET" not in str(refused.value)


def test_the_state_of_warming_holds_no_password(tmp_path: Path) -> None:
    def task(url: str) -> dict[str, object]:
        (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
        args = warm_command._parser().parse_args([str(tmp_path / "corpus.jsonl"), "--url", url])
        with WarmServer(url) as server:
            return warm_command.Task(args, open_corpus(args.corpus, "text"), server, tmp_path / "state", None)._task

    first, other = task("http://user:SECRET@host"), task("http://other")
    assert "SECRET" not in str(first)
    assert first == task("http://user:SECRET@host") != other
