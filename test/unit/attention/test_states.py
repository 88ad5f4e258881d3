"""SGLang's own kernels of layers with states serve fused batches: see captured_states.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.kernels.interpreter import passes_in_the_interpreter

CASES = Path(__file__).parent / "captured_states.py"


@pytest.mark.slow
def test_on_the_cpu():
    """In a process of its own: Triton is interpreted there."""
    passes_in_the_interpreter(CASES)
