"""A server of a model that sees images: marks are made around placeholders, and found around the tokens of images."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from image_processor import PLACEHOLDER, add_image_processor
from server.conftest import FLAGS, STRICT
from server_fixture import Server
from tiny_models import make_model

pytestmark = pytest.mark.server

SEP = "<|chunk|>"
CLOSE = 1e-4
CAT = f"The first page shows the cat of the house. {PLACEHOLDER} It sleeps on the roof in the sun all day"
DOG = f"{PLACEHOLDER} Behind it stands the dog of the neighbour, who comes by now and then"
TEXT = "A passage without any picture, about what the two of them had for breakfast"


def image(seed: int, side: int = 32) -> str:
    values = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


IMAGES = {CAT: [image(1)], DOG: [image(2, 16)], TEXT: []}


def prompt(*passages: str, lead: str = "Look at this.", separator: str = SEP) -> dict[str, object]:
    text = separator.join([lead, *passages, "Who sleeps?"])
    return {"text": text, "image_data": [one for passage in passages for one in IMAGES[passage]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_image_processor(make_model("qwen3_vl", tmp_path_factory.mktemp("images") / "qwen3_vl"))


@pytest.fixture
def server(folder, servers):
    return servers.use("ours", lambda: Server(folder, *FLAGS, "--chunk-cache", env=STRICT))


def ask(server, body, **chunk_cache):
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    if chunk_cache:
        params["custom_params"] = {"chunk_cache": chunk_cache}
    reply = server.post("/generate", {**body, "sampling_params": params, "return_logprob": True}).json()
    return reply, [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]]


def test_texts_of_a_chat_with_images_are_reused(server):
    part = {"type": "image_url", "image_url": {"url": image(3)}}

    def chat(*parts):
        body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}
        reply = server.post("/v1/chat/completions", {**body, "chunk_cache": {"ratio": 0.15}}).json()
        return reply["sglext"]["chunk_cache"]

    marked = {"type": "text", "text": f"Read.{SEP}{TEXT}{SEP}"}
    question = {"type": "text", "text": "Who had breakfast?"}
    chat(marked, question)
    for parts, status in (((marked, part, question), "prefix"), ((part, marked, question), "hit")):
        info = chat(*parts)
        assert [chunk["status"] for chunk in info["chunks"]] == [status], info


def test_a_chat_without_images_is_served_as_often_as_it_comes(server):
    server.flush()
    chat = {"messages": [{"role": "user", "content": f"Read this.{SEP}{TEXT}{SEP}Who?"}], "max_tokens": 2}
    for status in ("miss", "prefix", "prefix"):
        reply = server.post("/v1/chat/completions", {"model": "m", **chat, "chunk_cache": {"ratio": 0.15}}).json()
        assert [chunk["status"] for chunk in reply["sglext"]["chunk_cache"]["chunks"]] == [status], reply


def test_null_beside_an_image_is_as_not_given(server):
    body = prompt(CAT, separator="")
    ids = server.post("/v1/tokenize", {"model": "m", "prompt": body["text"]}).json()["tokens"]
    reply, _ = ask(server, {"input_ids": ids, "image_data": body["image_data"]})
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "custom_params": {"chunk_cache": None}}
    same = {"input_ids": ids, "image_data": body["image_data"], "sampling_params": params}
    assert server.post("/generate", same).json()["text"] == reply["text"]


PROMPTS = {"Once more.": (DOG, TEXT, CAT), "This too.": (TEXT, CAT), "And these.": (CAT, DOG)}


@pytest.mark.all
def test_images_in_marked_texts_equal_stock(folder, server, servers):
    server.flush()
    found = []
    for passage in (CAT, DOG, TEXT):
        ask(server, prompt(passage))
    for lead, order in PROMPTS.items():
        reply, logprobs = ask(server, prompt(*order, lead=lead), ratio=1.0)
        info = reply["meta_info"]["chunk_cache"]
        assert [chunk["status"] for chunk in info["chunks"]] == ["hit"] * len(order), info
        found.append((reply["text"], logprobs))
    reply, _ = ask(server, prompt(DOG, CAT, TEXT, lead="Now."), ratio=0.15)
    info = reply["meta_info"]["chunk_cache"]
    assert info["reused_image_tokens"] == 4 + 16, info
    stock = servers.use("stock", lambda: Server(folder, *FLAGS))
    for (lead, order), (text, logprobs) in zip(PROMPTS.items(), found, strict=True):
        reply, expected = ask(stock, prompt(*order, lead=lead, separator=""))
        assert (reply["text"], logprobs) == (text, pytest.approx(expected, abs=CLOSE)), order
