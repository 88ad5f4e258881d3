"""The SGLang side of the chunk cache: plugin, request handling, assembly and prefill.

Importing this package loads neither SGLang nor torch, so that the entry points stay cheap in processes that
do not use them. `plugin` is what SGLang calls at start-up.
"""

from __future__ import annotations

__version__ = "0.1.0"
