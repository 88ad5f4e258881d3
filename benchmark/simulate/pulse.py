"""RAGPulse as a trace of the simulator: passages are marked, everything else of a prompt is text in front or behind.

    system | passages | history | web          and a question that comes once: what the user wrote, and the template's

`num_behind` says how many of the system prompt's blocks, the last ones, stand behind the passages instead: nearly every
request has a last one of its own, and a prefix cache finds nothing behind it.
"""

from __future__ import annotations

from benchmark.common.ragpulse import PulseRequest, RagPulse
from benchmark.simulate.trace import Request, Trace


def trace_of_pulse(pulse: RagPulse, num_behind: int = 0, marks_all: bool = False) -> Trace:
    """The requests with their lengths as given; equal ids are equal numbers.

    Args:
        marks_all: history and web results are marked like passages.
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
