"""Plain prompts, with what was asked."""

from __future__ import annotations

from exactness.cases import Session
from local_scheduler import Reply

__all__ = ["CASES", "Session"]


def case_prompts(s: Session) -> list[tuple[list[int], Reply]]:
    prompts = [s.prompt(s.chunks(40, 33)) for _ in range(3)]
    return list(zip([list(prompt.ids) for prompt in prompts], s.send(*prompts), strict=True))


CASES = {"prompts": case_prompts}
