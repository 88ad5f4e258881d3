"""Clients that are slow, idle, or gone: others are served meanwhile, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drawn_requests import SEP
from server.conftest import FLAGS, STRICT
from server.fuzz import left_behind, memory
from server_fixture import Server

pytestmark = [pytest.mark.all, pytest.mark.server]

NUM_IDLE = 10_000
PATIENCE_S = 60
TEXT = SEP.join(("Read these. ", "The rose is red and the stone is grey. ", "Winter comes after autumn. ", "What?"))
GENERATE = {"text": TEXT, "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}}
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
}
STREAMS = {
    "/generate": GENERATE | {"stream": True},
    "/v1/chat/completions": CHAT | {"stream": True},
    "/chunk_cache/warm": {"texts": [f"Passage {i} of a list that is warmed. " * 4 for i in range(60)], "batch": 1},
}


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with Server(model_dir, *FLAGS, "--chunk-cache", env=STRICT) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    """Descriptors, requests, slots and memory are afterwards what they were."""
    server.generate(TEXT)
    settle(server)
    files, megabytes = num_files(server), memory(server.pid)
    yield
    assert server.generate(TEXT)["text"], "it answers"
    settle(server, files)
    assert memory(server.pid) < megabytes + 100


def num_files(server: Server) -> int:
    """Open descriptors of all processes of the server."""
    leader = psutil.Process(server.pid)
    return sum(one.num_fds() for one in (leader, *leader.children(recursive=True)))


def settle(server: Server, files: int | None = None) -> None:
    """Waits until nothing runs and nothing is held, nor more descriptors than `files` and the few of our own client."""

    def left() -> Any:
        (load,) = server.get("/v1/loads").json()["loads"]
        if running := load["num_running_reqs"] + load["num_waiting_reqs"]:
            return f"{running} requests"
        if held := left_behind(server):
            return held
        more = 0 if files is None else num_files(server) - files
        return f"{more} descriptors more" if more > 4 else None

    deadline = time.monotonic() + PATIENCE_S
    while problem := left():
        assert time.monotonic() < deadline, problem
        time.sleep(0.2)


def connect(server: Server, receive_bytes: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    one = socket.socket()
    if receive_bytes is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    one.settimeout(PATIENCE_S)
    one.connect((host, int(port)))
    return one


def request(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + data


def receive(one: socket.socket, most: int | None = None) -> bytes:
    """Until the server closes, or `most` bytes have come."""
    found = b""
    while (most is None or len(found) < most) and (some := one.recv(65536 if most is None else 1)):
        found += some
    return found


def vanish(one: socket.socket) -> None:
    """As a client whose machine is gone: a reset in the place of a farewell."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


def test_ten_thousand_idle_connections(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(NUM_IDLE):
            one = stack.enter_context(contextlib.closing(connect(server)))
            if number % 2:
                one.sendall(b"POST /generate HTTP/1.1\r\nHost: here\r\nContent-Le")
            if number % 1000 == 999:
                reply = server.generate(TEXT)
                assert reply["meta_info"]["chunk_cache"]["chunks"]
        assert num_files(server) > NUM_IDLE
        assert server.chat("Hello")["choices"][0]["message"]["content"] is not None


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_body_that_comes_byte_by_byte_delays_nobody(server: Server, path: str) -> None:
    whole = request(path, {"/generate": GENERATE, "/v1/chat/completions": CHAT}[path])
    with contextlib.closing(connect(server)) as one:
        for place in range(len(whole)):
            if place % 100 == 50:
                assert server.generate(TEXT)["text"], "others are answered while this body has not come"
            one.sendall(whole[place : place + 1])
        reply = receive(one)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_stream_that_is_read_byte_by_byte_comes_whole(server: Server, path: str) -> None:
    with contextlib.closing(connect(server)) as quick:
        quick.sendall(request(path, STREAMS[path]))
        expected = text_of(receive(quick))
    with contextlib.closing(connect(server, receive_bytes=4096)) as slow:
        slow.sendall(request(path, STREAMS[path]))
        start = receive(slow, most=100)
        for _ in range(3):
            assert server.generate(TEXT)["text"], "others are answered while this stream is not read"
            start += receive(slow, most=10)
        assert text_of(start + receive(slow)) == expected
    assert len(expected) > 100


def text_of(stream: bytes) -> str:
    """What the events of a stream that has ended say; those of /generate repeat what was said before."""
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    events = [json.loads(line) for line in lines]
    if "text" in events[-1]:
        return str(events[-1]["text"])
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_has_nothing_more_to_send_does_no_harm(server: Server, path: str) -> None:
    """Whether it still gets its reply is the web server's choice, as in stock SGLang."""
    for _ in range(5):
        with contextlib.closing(connect(server)) as one:
            one.sendall(request(path, STREAMS[path]))
            one.shutdown(socket.SHUT_WR)
            receive(one)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("part", ["head", "body", "reply"])
def test_a_client_that_vanishes_leaves_nothing(server: Server, path: str, part: str) -> None:
    whole = request(path, STREAMS[path])
    head_len = whole.index(b"\r\n\r\n")
    sent = {"head": whole[: head_len // 2], "body": whole[: head_len + 20], "reply": whole}[part]
    for number in range(10):
        one = connect(server)
        one.sendall(sent)
        if part == "reply":
            receive(one, most=1 + 40 * number)
        vanish(one)
