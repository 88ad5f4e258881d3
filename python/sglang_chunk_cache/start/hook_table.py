"""The hooks that the chunk cache has in SGLang, and what our classes override there, as `hooks.toml` lists them.

Its rows `touch` are read by tests and by the program that makes docs/touched.md.
"""

from __future__ import annotations

import pkgutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_chunk_cache.flags.server_args import refuse


@dataclass(frozen=True)
class Hook:
    """A replaced class or a wrapped function.

    Attributes:
        target: dotted path in SGLang.
        kind: REPLACE for a class; otherwise how the function is wrapped, see `sglang.srt.plugins.hook_registry`.
        handler: `"package.module:name"` of our class or function, imported when the hook is applied.
        why: one line.
        breaks: what would break in silence if the target kept its name and signature and changed its meaning.
    """

    target: str
    kind: HookType
    handler: str
    why: str
    breaks: str

    @property
    def replaces_class(self) -> bool:
        return self.kind is HookType.REPLACE

    def resolve(self) -> Any:
        """Imports the handler.

        Raises:
            StartRefused: the handler, or something that it imports, is missing.
        """
        try:
            return pkgutil.resolve_name(self.handler)
        except (ImportError, AttributeError) as error:
            refuse(f"the handler {self.handler} for {self.target} cannot be imported: {error}.")


_TABLE = tomllib.loads(Path(__file__).with_name("hooks.toml").read_text(encoding="utf-8"))


def _hooks(where: str) -> tuple[Hook, ...]:
    rows = (row for row in _TABLE["hook"] if row["where"] == where)
    return tuple(Hook(row["target"], HookType(row["kind"]), row["handler"], row["why"], row["breaks"]) for row in rows)


FLAG_HOOKS = _hooks("flags")
API_HOOKS = _hooks("api")
SCHEDULER_HOOKS = _hooks("scheduler")
HOOKS = API_HOOKS + SCHEDULER_HOOKS
OVERRIDES: dict[str, tuple[str, ...]] = {
    row["handler"]: tuple(row["overrides"]) for row in _TABLE["hook"] + _TABLE["subclass"] if "overrides" in row
}
"""The names that each of our classes overrides in SGLang's, by `"package.module:class"`."""
