"""torch.compile, off: SGLang decorates small helpers with it, and on a CPU that would need a C++ compiler.

- `switch_compiler_off()` makes `torch.compile` the identity in this process and in those it starts.
- `switch_compiler_on()` takes that back; for a user who asks for compilation by flag.

A variable the user has set is left alone by both.
"""

from __future__ import annotations

import os
import sys

# Read by torch when it is imported (TORCH_COMPILE_DISABLE) and when a function is decorated (TORCHDYNAMO_DISABLE).
VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
_set_here: set[str] = set()


def switch_compiler_off() -> None:
    """Sets the variables that are unset, and torch's own switch where torch has read them already."""
    for name in VARIABLES:
        if name not in os.environ:
            os.environ[name] = "1"
            _set_here.add(name)
    if os.environ[VARIABLES[0]] == "1":
        _tell_torch(disabled=True)


def switch_compiler_on() -> None:
    """Removes what `switch_compiler_off` has set. Processes started from here on compile again."""
    if not _set_here:
        return
    for name in _set_here:
        os.environ.pop(name, None)
    _set_here.clear()
    _tell_torch(disabled=False)


def _tell_torch(*, disabled: bool) -> None:
    config = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.disable = disabled  # type: ignore[attr-defined]
