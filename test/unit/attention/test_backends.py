"""SGLang's own attention backends serve fused batches by runs: see captured_backends.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.kernels.interpreter import passes_in_the_interpreter

CASES = Path(__file__).parent / "captured_backends.py"


@pytest.mark.slow
def test_on_the_cpu():
    """In a process of its own: Triton is interpreted there, and modules of kernels are replaced."""
    passes_in_the_interpreter(CASES)
