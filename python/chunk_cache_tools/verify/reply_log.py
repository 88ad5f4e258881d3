"""ReplyLog: a server's replies in a file, one JSON line each, so that an interrupted run can continue.

- `ReplyLog(path, settings)` opens the file of one model; `append` adds replies and writes them out at once, `find`
  gives one back, `drop` forgets those of some methods.
- A log is resumed only with the settings it was begun with: the model, and how it was asked.
- A log has one writer; a second one is refused before it touches the file.
- `fingerprint` identifies a model in the settings, `files_in` the files that flags of a server name.

A reply belongs to (prompt, method, ratio), and a prompt is named by a hash of its content, so a question that was
changed is asked again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from chunk_cache_tools.conditions import Condition
from chunk_cache_tools.jsonl import DataError, read_jsonl, replace_file

HASHED_BYTES, HASHED_EVERY = 1 << 16, 1 << 23  # of each file of weights: 64 KiB of each 8 MiB, so of every large tensor


@dataclass(frozen=True)
class Forced:
    """Likelihood of a given answer (teacher forcing): number of tokens, and their mean log-probability in nats."""

    num_tokens: int
    logprob: float


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt under one condition.

    Attributes:
        prompt: `Prompt.key`.
        method: label of the condition.
        ratio: effective ratio; None for the reference, and if alpha replaces it.
        text: the generated text.
        first_id: id of the first generated token.
        prompt_len, prefix_len, reused_len, recomputed_len: tokens, as the server counts them.
        kl: KL of the first token's distribution from the reference's, nats; None for the reference.
        top: (token id, log-probability) of the likeliest first tokens; for the reference only.
        ids: the generated token ids; for the reference only.
        gold, own: likelihood of the right answer, and of the reference's own; None if not asked for, or empty.
    """

    prompt: str
    method: str
    ratio: float | None
    text: str
    first_id: int
    prompt_len: int
    reused_len: int
    recomputed_len: int
    kl: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ids: tuple[int, ...] = ()
    prefix_len: int = 0
    gold: Forced | None = None
    own: Forced | None = None

    @property
    def key(self) -> tuple[str, str, float | None]:
        return self.prompt, self.method, self.ratio


FORCED = ("gold", "own")
"""Fields of a reply that are `Forced`."""


class ReplyLog:
    """The replies of one model; a context manager that closes its file."""

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        anew: str = "run without --resume",
    ) -> None:
        """Opens the file; without `resume` discards its replies.

        Args:
            settings: what must be equal for old and new replies to be comparable; plain JSON values.
            anew: how a user starts a new log, for messages.

        Raises:
            DataError: the file was begun with other settings, is broken, or another run writes to it.
        """
        self.path = Path(path)
        self._anew = anew
        self._settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        self._replies: dict[tuple[str, str, float | None], Reply] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._acquire()
        if resume and self.path.exists():
            self._load()
        self._file: TextIO = self._rewrite()

    def __enter__(self) -> ReplyLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.close()

    def __len__(self) -> int:
        return len(self._replies)

    def __iter__(self) -> Iterator[Reply]:
        return iter(self._replies.values())

    def find(self, prompt: str, condition: Condition) -> Reply | None:
        """The reply to this prompt under this condition, if it has been asked."""
        return self._replies.get((prompt, condition.label, condition.ratio))

    def append(self, replies: Iterable[Reply]) -> None:
        """Keeps replies and writes them out."""
        for reply in replies:
            self._replies[reply.key] = reply
            self._file.write(json.dumps(asdict(reply)) + "\n")
        self._file.flush()

    def drop(self, labels: Collection[str]) -> None:
        """Forgets all replies of these methods."""
        self._replies = {key: reply for key, reply in self._replies.items() if reply.method not in labels}
        self._file.close()
        self._file = self._rewrite()

    def _acquire(self) -> TextIO:
        """An open file that holds the lock until it is closed, or the process ends."""
        file = self.path.with_suffix(".lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(f"{self.path}: another run writes to it; wait for it or name another folder.") from None
        return file

    def _load(self) -> None:
        os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)  # the writer may be killed within a line
        lines = iter(read_jsonl(self.path))
        _, settings = next(lines, ("", None))
        if settings is not None and settings != self._settings:
            changed = [name for name in self._settings if settings.get(name) != self._settings[name]]
            raise DataError(f"{self.path}: begun with other settings ({', '.join(changed)}); {self._anew}.")
        for where, value in lines:
            try:
                value["top"] = tuple(map(tuple, value["top"]))
                value["ids"] = tuple(value.get("ids", ()))
                for name in FORCED:
                    value[name] = value.get(name) and Forced(**value[name])
                reply = Reply(**value)
            except (KeyError, TypeError) as error:
                raise DataError(f"{where}: not a reply ({error}); {self._anew}.") from error
            self._replies[reply.key] = reply

    def _rewrite(self) -> TextIO:
        """Writes the settings and all replies to the file anew; returns it, open for appending."""
        lines = [self._settings, *map(asdict, self)]
        replace_file(self.path, (json.dumps(line) + "\n" for line in lines))
        return self.path.open("a", encoding="utf-8")


def files_in(flags: Iterable[str]) -> list[str]:
    """Hashes of the files that flags of a server name by `@FILE`."""
    names = (flag.partition("@")[2] for flag in flags if flag.startswith(("@", "--")))
    return [hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16] for name in names if name and Path(name).is_file()]


def fingerprint(model: str | Path) -> str:
    """A hash of the weights and the configuration of a local model; for any other model its name."""
    folder = Path(model)
    if not folder.is_dir():
        return str(model)
    digest = hashlib.blake2b(digest_size=8)
    patterns = ("config.json", "tokenizer.json", "*.safetensors", "*.bin")
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, HASHED_EVERY):
                file.seek(start)
                digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()
