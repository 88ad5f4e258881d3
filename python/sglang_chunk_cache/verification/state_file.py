"""StateFile: what the gate has learned, as JSON, so that it survives a restart.

Verbs: `read` (once, on every rank), `write` (rank 0 alone: whole or not at all).
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from chunk_cache.gate.controller import TargetController
from chunk_cache.gate.target import describe
from chunk_cache.gate.verification_ledger import QualityLedger

logger = logging.getLogger(__name__)

_VERSION = 1


class StateFile:
    """See the head of this file.

    Args:
        model: that the measures belong to; a file of another model is not read.
        is_writer: whether this rank writes the file; one does.
    """

    def __init__(self, path: str, model: str, *, is_writer: bool) -> None:
        self._path = Path(path)
        self._model = model
        self._is_writer = is_writer

    def read(self, ledger: QualityLedger, controller: TargetController | None) -> None:
        """Fills both with what was learned of the same model; the controller only where its target is the same.

        Raises:
            ValueError: the file cannot be read, or is not of the gate.
        """
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValueError(f"{self._path} cannot be read ({error.strerror})") from error
        try:
            value = json.loads(text)
            self._load(value, ledger, controller)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self._path} is no file of the gate, version {_VERSION} ({error})") from error

    def _load(self, value: Any, ledger: QualityLedger, controller: TargetController | None) -> None:
        if value["version"] != _VERSION:
            raise ValueError(f"its version is {value['version']!r}")
        if value["model"] != self._model:
            logger.warning("Chunk cache: %s tells of another model, all is learned anew", self._path)
            return
        ledger.load(value["quality"])
        if controller is None:
            return
        if value["target"] == describe(controller.target):
            controller.load(value["places"])
        elif value["target"] is not None:
            logger.warning("Chunk cache: %s tells of another target, its steps are found anew", self._path)

    def write(self, ledger: QualityLedger, controller: TargetController | None) -> None:
        """Replaces the file; if that fails, the log says so and the old one stays."""
        if not self._is_writer:
            return
        value: dict[str, Any] = {
            "version": _VERSION,
            "model": self._model,
            "quality": ledger.dump(),
            "target": None if controller is None else describe(controller.target),
            "places": {} if controller is None else controller.dump(),
        }
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
            os.replace(new, self._path)
        except OSError as error:
            logger.warning("Chunk cache: %s cannot be written (%s)", self._path, error.strerror)
