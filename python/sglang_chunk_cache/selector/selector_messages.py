"""Messages between the process that tokenizes and the selector, as msgpack.

Token ids and scores travel as bytes of numpy arrays (`IDS`, `SCORES`), in the byte order of their machine.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

IDS = np.dtype(np.int32)
SCORES = np.dtype(np.float32)


class Text(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of the main model. Keys are equal if the tokens, the tokens in front of them and the tenant are."""

    key: bytes
    ids: bytes


class Question(msgspec.Struct, tag="question", array_like=True, frozen=True):
    """Asks to score the chunks of a prompt, with `prefix` in front and `question` (ids) behind; `number` names it."""

    number: int
    timeout_s: float
    prefix: Text
    chunks: list[Text]
    question: bytes


class Scores(msgspec.Struct, tag="scores", array_like=True, frozen=True):
    """Answers a question: per chunk one score for each of its tokens, or the reason why there are none."""

    number: int
    rankings: list[bytes] | None
    reason: str | None = None


class Alive(msgspec.Struct, tag="alive", array_like=True, frozen=True):
    """Says that the process runs; `is_ready`: its model is loaded."""

    is_ready: bool


class Settings(msgspec.Struct, frozen=True):
    """How the process is started; its one argument, as JSON.

    Attributes:
        model: Hugging Face folder or name of the auxiliary model.
        tokenizer: of the main model, with what SGLang was told about it.
        questions, replies: where the sockets are.
        server_pid: of the process that starts it, and with which it ends.
    """

    model: str
    tokenizer: str
    trust_remote_code: bool
    revision: str | None
    max_bytes: int
    num_threads: int
    questions: str
    replies: str
    server_pid: int


dumps = msgspec.msgpack.encode
loads_question = msgspec.msgpack.Decoder(Question).decode
"""Decodes what the selector receives."""
loads_reply: Callable[[bytes], Scores | Alive] = msgspec.msgpack.Decoder(Scores | Alive).decode
"""Decodes what the selector sends."""
