"""ChunkCacheArgs: the options that a server was started with, the same in every process.

Verbs: `add_flags` (command line), `from_flags` (parsed values -> `ChunkCacheArgs` or None), `attach` / `attached`
(on a `ServerArgs` record, which SGLang pickles to its children), `instance_of` (its name), `exported` (to the
environment while children are started), `inherit` (in such a child), `set_args` / `get_args` (this process).

Promises: off means None everywhere; a bad option is one sentence and a non-zero exit code, before anything starts;
what a child inherits is exactly what the launching process checked. The environment variable is there only while
children are being started, and a process that was not started as such a child ignores it.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from chunk_cache.errors import one_line
from chunk_cache.options.defaults import DEFAULT_METHOD, DEFAULT_RATIO, DEFAULT_SEPARATOR

if TYPE_CHECKING:
    import argparse

    from chunk_cache.gate.target import Target
    from chunk_cache.options.config import Config

ENV_NAME = "SGLANG_CHUNK_CACHE"
REFUSAL_ENV_NAME = "SGLANG_CHUNK_CACHE_REFUSAL"
"""Holds the id of the launching process, and the file in which its child says why it refuses to start."""
RADIX_CACHE_BACKEND = "chunk_cache"

_ATTACHED = "_chunk_cache"
_INSTANCE = "_chunk_cache_instance"
_FLAGS = ("method", "ratio", "separator", "marks", "parts", "discover", "selector", "config", "target")


class StartRefused(SystemExit):
    """The server cannot start with these options; one sentence, exit code 1, no traceback.

    A `SystemExit` because SGLang logs and ignores an ordinary exception of a plugin.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(f"chunk cache: {sentence}")


def refuse(sentence: str) -> NoReturn:
    """Stops the start with `sentence`; in a child, the process that launched it is told."""
    launcher, _, file = os.environ.get(REFUSAL_ENV_NAME, "").partition(" ")
    if file:
        Path(file).write_text(sentence, encoding="utf-8")
        parent = multiprocessing.parent_process()
        parent_pid = parent.pid if parent is not None and parent.is_alive() else None
        if parent_pid is not None and int(launcher) not in (parent_pid, os.getpid()):
            os.kill(parent_pid, signal.SIGTERM)  # the controller of --dp-size, which would wait for this child
        if int(launcher) != os.getpid():
            sys.exit(1)  # the process that launched it prints the sentence
    raise StartRefused(sentence)


@dataclass(frozen=True)
class ChunkCacheArgs:
    """Options of one server.

    Attributes:
        method: the default method of a request, one of `chunk_cache.methods.METHODS`.
        ratio: the default recompute ratio, in [0, 1].
        separator: the string that marks chunks in text prompts; never empty.
        config: the object of `--chunk-cache-config`, checked by `chunk_cache.options.config.parse_config`.
        selector: Hugging Face folder or name of the auxiliary model that selects; None = there is none.
        target: the object of `--chunk-cache-target`, checked by `chunk_cache.gate.target.parse_target`; None = none.
        marks: whether texts that clients mark for the prefix cache of another service are chunks.
        parts: whether the text parts of a message with several parts are chunks.
        discover: whether passages of earlier prompts are chunks in prompts without marks.
    """

    method: str = DEFAULT_METHOD
    ratio: float = DEFAULT_RATIO
    separator: str = DEFAULT_SEPARATOR
    config: Mapping[str, Any] = field(default_factory=dict)
    selector: str | None = None
    target: Mapping[str, Any] | None = None
    marks: bool = False
    parts: bool = False
    discover: bool = False

    def __post_init__(self) -> None:
        from chunk_cache.server_options import server_problem

        problem = server_problem(
            method=self.method,
            ratio=self.ratio,
            separator=self.separator,
            config=self.config,
            selector=self.selector,
            target=self.target,
        )
        if problem is not None:
            refuse(problem)

    @functools.cached_property
    def parsed_config(self) -> Config:
        """`config` with its defaults."""
        from chunk_cache.options.config import parse_config

        return parse_config(dict(self.config))

    @functools.cached_property
    def parsed_target(self) -> Target | None:
        """`target` with its defaults."""
        from chunk_cache.gate.target import parse_target

        return None if self.target is None else parse_target(self.target, method=self.method, ratio=self.ratio)

    def dumps(self) -> str:
        """These options as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=True)

    @classmethod
    def loads(cls, text: str) -> ChunkCacheArgs:
        """The inverse of `dumps`."""
        return cls(**json.loads(text))


# The command line.


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, in a group of their own.

    No flag has a default here: a value that was not given is None, so that a flag given without `--chunk-cache` is
    noticed. Values are checked in `from_flags`, which answers with one sentence instead of argparse's page of usage.
    """
    from chunk_cache.methods import METHODS

    group = parser.add_argument_group(
        "chunk cache", "Reuse the KV cache of text chunks wherever they stand in a prompt."
    )
    group.add_argument("--chunk-cache", action="store_true", default=False, help="Turn the chunk cache on.")
    values = {
        "method": ("METHOD", f"Default method of a request: {', '.join(METHODS)} (default: {DEFAULT_METHOD})."),
        "ratio": ("RATIO", f"Default share of the reused tokens to recompute, 0 to 1 (default: {DEFAULT_RATIO})."),
        "separator": (
            "TEXT",
            f"Marks chunks in text prompts; N+1 of them mark N chunks (default: {DEFAULT_SEPARATOR}).",
        ),
        "selector": (
            "MODEL",
            "Hugging Face folder or name of a small model that selects for the method cacheclip, on the CPU.",
        ),
        "config": ("JSON", "All other options, as a JSON object or as @FILE with one."),
        "target": (
            "JSON",
            'How far answers may be from exact ones, such as {"kl": 0.1}, as a JSON object or as @FILE with one.',
        ),
    }
    for name, (metavar, text) in values.items():
        group.add_argument(f"--chunk-cache-{name}", metavar=metavar, help=text)
    switches = {
        "marks": "Texts that clients mark by prompt_cache_breakpoint or cache_control are chunks (default: off).",
        "parts": "Every text part of a message with several parts is a chunk (default: off).",
        "discover": "Passages that were there before are chunks in prompts without marks too (default: off).",
    }
    for name, text in switches.items():
        group.add_argument(f"--chunk-cache-{name}", action="store_true", default=None, help=text)


def from_flags(namespace: argparse.Namespace) -> ChunkCacheArgs | None:
    """The options that the parsed command line asks for, or None where `--chunk-cache` is not given.

    Raises:
        StartRefused: a bad value, or a flag of the group without `--chunk-cache`.
    """
    given: dict[str, Any] = {name: getattr(namespace, f"chunk_cache_{name}", None) for name in _FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    if not getattr(namespace, "chunk_cache", False):
        if given:
            refuse(f"--chunk-cache-{next(iter(given))} is given without --chunk-cache; add --chunk-cache or drop it.")
        return None
    if "ratio" in given:
        given["ratio"] = _parse_ratio(given["ratio"])
    for name in ("config", "target"):
        if name in given:
            given[name] = _parse_object(name, given[name])
    return ChunkCacheArgs(**given)


def _parse_ratio(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        refuse(f"--chunk-cache-ratio must be a number from 0 to 1, not {value!r}.")


def _parse_object(name: str, value: object) -> object:
    if not isinstance(value, str):  # a YAML file of --config may hold the object itself
        return value
    try:
        text = Path(value[1:]).read_text(encoding="utf-8") if value.startswith("@") else value
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"--chunk-cache-{name}: cannot read {value[1:]!r}: {getattr(error, 'strerror', None) or 'no UTF-8'}.")
    try:
        found = json.loads(text, object_pairs_hook=functools.partial(_once_each, name))
    except ValueError as error:
        hint = "; remove the trailing comma" if _ends_in_comma(text, error) else ""
        refuse(f"--chunk-cache-{name} is not valid JSON: {one_line(error)}{hint}.")
    except RecursionError:
        refuse(f"--chunk-cache-{name} is not valid: objects or lists are nested too deep; nest fewer.")
    if found is None:
        refuse(f"--chunk-cache-{name} is null; give an object, or leave the flag out.")
    return found


def _once_each(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        refuse(f"--chunk-cache-{name}: {twice} is given twice; leave one of them out.")
    return found


def _ends_in_comma(text: str, error: ValueError) -> bool:
    """Whether the error is a comma in front of the end of an object or a list."""
    before = text[: getattr(error, "pos", 0)].rstrip()  # in Python 3.13 of the comma, in others of what follows it
    return re.match(r"\s*,\s*[\]}]", text[len(before.removesuffix(",")) :]) is not None


# From process to process.


def attach(server_args: Any, args: ChunkCacheArgs) -> None:
    """Notes on a `ServerArgs` record that the chunk cache is on, with `args`; it survives pickling."""
    setattr(server_args, _ATTACHED, args.dumps())
    setattr(server_args, _INSTANCE, uuid.uuid4().hex)


def change(server_args: Any, args: ChunkCacheArgs) -> None:
    """Replaces the options on a record that `attach` was given, where the model needs others."""
    setattr(server_args, _ATTACHED, args.dumps())
    if get_args() is not None:
        set_args(args)


_loads_once = functools.cache(ChunkCacheArgs.loads)


def attached(server_args: Any) -> ChunkCacheArgs | None:
    """What `attach` noted, or None: this server runs without the chunk cache."""
    text = getattr(server_args, _ATTACHED, None)
    return None if text is None else _loads_once(text)


def instance_of(server_args: Any) -> str:
    """Name of the server, noted by `attach`: the same in all its processes, another at every start."""
    return str(getattr(server_args, _INSTANCE))


@contextmanager
def exported(args: ChunkCacheArgs | None) -> Iterator[None]:
    """Children that are started inside inherit `args`; with None they inherit nothing.

    Raises:
        StartRefused: one of them refused to start; it takes the place of the error that SGLang raises then.
    """
    before = os.environ.pop(ENV_NAME, None)
    try:
        if args is None:
            yield
        else:
            with _refusals_told():
                os.environ[ENV_NAME] = args.dumps()
                yield
    finally:
        os.environ.pop(ENV_NAME, None)
        if before is not None:
            os.environ[ENV_NAME] = before


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Inside the scope, a child's reason to refuse the start replaces SGLang's error that the child died."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        os.environ[REFUSAL_ENV_NAME] = f"{os.getpid()} {file.name}"
        try:
            yield
        except RuntimeError:
            sentence = file.read()
            if not sentence:
                raise
            raise StartRefused(sentence) from None
        finally:
            del os.environ[REFUSAL_ENV_NAME]


def inherit() -> ChunkCacheArgs | None:
    """In a child that was started inside `exported`: the options, which also become those of this process.

    A process that somebody starts by hand is no such child; it drops the variable.
    """
    text = os.environ.get(ENV_NAME)
    if text is None:
        return None
    if multiprocessing.parent_process() is None:
        del os.environ[ENV_NAME]
        return None
    args = ChunkCacheArgs.loads(text)
    set_args(args)
    return args


_current: ChunkCacheArgs | None = None


def set_args(args: ChunkCacheArgs | None) -> None:
    """Sets the options of this process."""
    global _current
    _current = args


def get_args() -> ChunkCacheArgs | None:
    """The options of this process; None where the chunk cache is off."""
    return _current
