"""The benchmark of the time to first token has a prompt for every measurement that it makes by default."""

from __future__ import annotations

import pytest
from benchmark.ttft.bench_ttft import NUM_SPARE, default_repeats, most_repeats
from benchmark.ttft.workload import FULL, QUICK, Workload

SIZES = [(False, FULL), (True, QUICK)]


@pytest.mark.parametrize(("quick", "size"), SIZES)
def test_the_default_repeats_are_possible(quick, size):
    assert default_repeats(quick) <= most_repeats(Workload(size, num_spare=NUM_SPARE))


@pytest.mark.parametrize("num_spare", [0, NUM_SPARE])
def test_no_two_prompts_begin_with_the_same_two_chunks(num_spare):
    work = Workload(QUICK, num_spare=num_spare)
    prompts = [work.fresh() for _ in range(work.num_fresh)]
    ends = {prompt.spans[1][1] for prompt in prompts}
    assert ends == {QUICK.system_len + 2 * QUICK.chunk_len}
    assert len({tuple(prompt.ids[: min(ends)]) for prompt in prompts}) == len(prompts)
    assert {len(prompt.ids) for prompt in prompts} == {QUICK.prompt_len}
    with pytest.raises(StopIteration):
        work.fresh()
