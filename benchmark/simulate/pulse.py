"""RAGPulse as a trace of the simulator: passages are marked chunks, everything else is text in front or behind.

    system | passages | history | web | question          the question: what the user wrote, and the template's tokens

`num_behind`: how many of the last blocks of the system prompt are moved behind the passages. In nearly every request
the last block is unique, and a prefix cache finds nothing behind a unique block.
"""

from __future__ import annotations

from benchmark.common.ragpulse import PulseRequest, RagPulse
from benchmark.simulate.trace import Request, Trace


def trace_of_pulse(pulse: RagPulse, num_behind: int = 0, marks_all: bool = False) -> Trace:
    """The requests of RAGPulse, with its lengths; equal ids become equal numbers.

    Args:
        marks_all: mark history and web results like passages.
    """
    numbers: dict[int, int] = {}

    def request_of(one: PulseRequest) -> Request:
        cut = max(0, len(one.system) - num_behind)
        front, behind = (one.system[:cut], False), (one.system[cut:], False)
        parts = (front, (one.passages, True), behind, (one.history, marks_all), (one.web, marks_all))
        blocks = [(numbers.setdefault(block, len(numbers)), is_chunk) for ids, is_chunk in parts for block in ids]
        question_len = sum(pulse.lengths[block] for block in one.user) + one.template_len
        return Request.of_blocks(blocks, question_len, one.session)

    requests = tuple(request_of(one) for one in pulse.requests)
    name = "RAGPulse" + (f", {num_behind} behind" if num_behind else "") + (", all marked" if marks_all else "")
    return Trace(name, requests, tuple(pulse.lengths[block] for block in numbers), 0, source=tuple(pulse.markdown()))
