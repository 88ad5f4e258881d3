"""Config file: the JSON object that a server takes with `--chunk-cache-config @FILE`.

- `read_config` gives its keys, none where there is no file yet.
- `write_config` sets one key and keeps all others; the file is the old or the new one, never half of it.

Both refuse what the server would refuse, so that a file that was written can be served with.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmark.quality.question import DataError

from chunk_cache.config import parse_config
from chunk_cache.errors import ChunkCacheConfigError


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys in their order; empty where there is no file yet.

    Raises:
        DataError: the file cannot be read, or is no configuration that the server takes.
    """
    path = Path(path)
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); name another file.") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg}); mend it, or name another file.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no JSON object; mend it, or name another file.")
    _check(path, value)
    return value


def write_config(path: str | Path, key: str, value: float) -> None:
    """Sets `key`; file and folder are made where there is none, and permissions are kept where there is one.

    Raises:
        DataError: as `read_config`, or the server does not take the value.
    """
    path = Path(path)
    config = {**read_config(path), key: value}
    _check(path, config)
    target = path.resolve()  # a link stays one
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, draft)
        os.replace(draft, target)
    except OSError as error:
        with suppress(OSError):  # it may never have been made
            draft.unlink()
        raise DataError(f"{path}: cannot be written ({error}); name another file.") from error


def _check(path: Path, config: dict[str, Any]) -> None:
    try:
        parse_config(config)
    except ChunkCacheConfigError as error:
        raise DataError(f"{path}: {error}.") from error
