"""Saved replies: one JSON object per line, so that a picture can be drawn again without a server.

Verbs: `save` writes `{"label", "tokens", "reply"}` lines; `load` reads them back. It also reads bare replies of
`/generate`, which another program may have kept; these need their prompt and a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chunk_cache.errors import request_error, show
from chunk_cache_tools.explain.shown_prompt import PromptTokens
from chunk_cache_tools.explain.states import Explanation, explain
from chunk_cache_tools.jsonl import read_jsonl

_KEY = "chunk_cache"


def explain_reply(label: str, reply: Mapping[str, Any], tokens: PromptTokens, path: str) -> Explanation:
    """The explanation in a reply of `/generate`, checked against the prompt's tokens.

    Args:
        label: name of the method in pictures; empty = the method and ratio that the reply gives.
        path: where the reply came from, for messages.

    Raises:
        ChunkCacheRequestError: the reply has no explanation, or is about another prompt.
    """
    one = explain(label, str(reply.get("text", "")), _about(reply), path)
    if not label:
        one = Explanation(_own_label(one.reply), one.reply, one.answer, one.states)
    if len(one.states) != len(tokens.texts) or one.spans != tokens.spans:
        problem = f"the reply speaks of {len(one.states)} tokens, the prompt has {len(tokens.texts)}"
        if len(one.states) == len(tokens.texts):
            problem = f"the reply has its chunks at {list(one.spans)}, the prompt at {list(tokens.spans)}"
        remedy = "give the prompt of the reply, and the tokenizer of its server by --tokenizer"
        raise request_error(path, problem, remedy)
    return one


def save(path: str | Path, labelled: Sequence[tuple[str, Mapping[str, Any]]], tokens: PromptTokens) -> None:
    """Writes one line per (label, reply of `/generate`)."""
    lines = [
        json.dumps({"label": label, "tokens": tokens.texts, "reply": reply}, ensure_ascii=False)
        for label, reply in labelled
    ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(path: str, read_tokens: Callable[[], PromptTokens] | None) -> tuple[PromptTokens, list[Explanation]]:
    """The explanations in a file, all of one prompt.

    Args:
        read_tokens: gives the prompt's tokens where the lines have none.

    Raises:
        ChunkCacheRequestError: the file cannot be read, a line is no reply, or lines are about different prompts.
    """
    tokens: PromptTokens | None = None
    explanations = []
    for where, value in read_jsonl(path):
        reply = value.get("reply", value)
        if not isinstance(reply, Mapping):
            raise request_error(where, "not a reply", "save replies of /generate, one per line")
        if "tokens" in value:
            if not isinstance(value["tokens"], list):
                raise request_error(where, f"tokens: {show(value['tokens'])} is not a list", "save replies with --save")
            texts = tuple(map(str, value["tokens"]))
            if tokens is not None and texts != tokens.texts:
                remedy = "give the replies of each prompt in a file of its own"
                raise request_error(where, "another prompt than the line before", remedy)
            tokens = tokens or PromptTokens(texts, _spans(reply, where))
        elif tokens is None:
            if read_tokens is None:
                remedy = "give --prompt and --tokenizer too"
                raise request_error(where, "the reply does not hold the prompt's tokens", remedy)
            tokens = read_tokens()
        explanations.append(explain_reply(str(value.get("label", "")), reply, tokens, where))
    if tokens is None:
        raise request_error(f"--replies {path}", "no replies", "save some with --save FILE")
    return tokens, explanations


def _spans(reply: Mapping[str, Any], path: str) -> tuple[tuple[int, int], ...]:
    return explain("", "", _about(reply), path).spans


def _about(reply: Mapping[str, Any]) -> object:
    """The object `meta_info["chunk_cache"]`, or None."""
    meta_info = reply.get("meta_info")
    return meta_info.get(_KEY) if isinstance(meta_info, Mapping) else None


def _own_label(reply: Mapping[str, Any]) -> str:
    return f"{reply['method']} {reply['ratio']:g}"
