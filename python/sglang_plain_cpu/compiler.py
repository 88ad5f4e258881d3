"""Compiler: switches `torch.compile` off. SGLang decorates small helpers with it; on a CPU that needs a C++ compiler.

- `switch_compiler_off()` makes `torch.compile` the identity in this process and in those that it starts.
- `switch_compiler_on()` undoes that, for a user who asks for compilation by flag.

Both leave a variable alone that the user has set.
"""

from __future__ import annotations

import os
import sys

# torch reads the first when it is imported, and the second when a function is decorated.
VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
_set_here: set[str] = set()


def switch_compiler_off() -> None:
    """Sets the variables that are unset, and torch's own switch if torch has read them already."""
    for name in VARIABLES:
        if name not in os.environ:
            os.environ[name] = "1"
            _set_here.add(name)
    if os.environ[VARIABLES[0]] == "1":
        _tell_torch(disabled=True)


def switch_compiler_on() -> None:
    """Removes what `switch_compiler_off` has set; this process and those that it starts later compile again."""
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
