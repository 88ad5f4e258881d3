"""States in the place of SGLang's kernels: the recurrence token by token, over pools and across borders of prompts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sglang_plain_cpu.delta_rule import (
    BLOCK,
    convolve,
    convolve_step,
    decode,
    delta_rule,
    extend,
    keep_states,
    unit,
    use_states,
)

HEADS, KEY_HEADS, SIZE = 4, 2, 8
SEQUENCES = (70, 1, 0, 130)
BORDERS = torch.tensor([0, 70, 71, 71, 201])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_delta_rule_is_the_recurrence() -> None:
    """More than one block, from a state, against the rule token by token in fp64."""
    q, k, v = (draw(2, 3, 150, SIZE, seed=seed).double() for seed in range(3))
    q, k = unit(q), unit(k)
    g, beta = -draw(2, 3, 150).double().abs(), draw(2, 3, 150, seed=9).double().sigmoid()
    state = draw(2, 3, SIZE, SIZE).double()
    out, last, begins = delta_rule(q, k, v, g, beta, state)
    for i in range(150):
        if i % BLOCK == 0:
            torch.testing.assert_close(begins[i // BLOCK], state)
        state = state * g[:, :, i, None, None].exp()
        wrong = v[:, :, i] - (state.mT @ k[:, :, i, :, None])[..., 0]
        state = state + beta[:, :, i, None, None] * k[:, :, i, :, None] * wrong[:, :, None]
        torch.testing.assert_close(out[:, :, i], (state.mT @ q[:, :, i, :, None])[..., 0] * SIZE**-0.5)
    torch.testing.assert_close(last, state)
    assert len(begins) == 3


def tokens(length: int) -> dict[str, torch.Tensor]:
    """`length` tokens as a layer gives them to its states."""
    return {
        "q": draw(1, length, KEY_HEADS, SIZE, seed=1),
        "k": draw(1, length, KEY_HEADS, SIZE, seed=2),
        "v": draw(1, length, HEADS, SIZE, seed=3),
        "g": -draw(1, length, HEADS, seed=4).abs(),
        "beta": draw(1, length, HEADS, seed=5).sigmoid(),
    }


def of(rows: slice, every: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part[:, rows] for name, part in every.items()}


def test_sequences_side_by_side_are_each_alone() -> None:
    """Each continues the state in its slot; one without a slot leaves the pool alone; blocks are those of all."""
    every, pool = tokens(201), draw(6, HEADS, SIZE, SIZE)
    before, slots = pool.clone(), torch.tensor([2, 5, 1, -1])
    out, nothing, begins = extend(
        **every, initial_state=pool, initial_state_indices=slots, cu_seqlens=BORDERS, use_qk_l2norm_in_kernel=True
    )
    assert nothing is None
    assert begins.shape == (1, 2 + 1 + 3, HEADS, SIZE, SIZE)
    torch.testing.assert_close(begins[0, 0], before[2])
    for slot, start, length in zip(slots.tolist(), BORDERS.tolist(), SEQUENCES, strict=False):
        part = of(slice(start, start + length), every)
        alone = before[[slot]].clone() if slot >= 0 else torch.zeros(1, HEADS, SIZE, SIZE)
        if length:
            expected, _, _ = extend(
                **part,
                initial_state=alone,
                initial_state_indices=torch.tensor([0]),
                cu_seqlens=torch.tensor([0, length]),
            )
            torch.testing.assert_close(out[:, start : start + length], expected)
        if slot >= 0:
            torch.testing.assert_close(pool[slot], alone[0])
    untouched = [0, 1, 3, 4]
    assert torch.equal(pool[untouched], before[untouched])


def test_in_two_steps_a_sequence_ends_as_in_one() -> None:
    every = tokens(150)
    pools = [torch.zeros(1, HEADS, SIZE, SIZE) for _ in range(2)]
    slot = torch.tensor([0])
    whole, _, _ = extend(**every, initial_state=pools[0], initial_state_indices=slot, cu_seqlens=torch.tensor([0, 150]))
    parts = []
    for rows in (slice(0, 101), slice(101, 150)):
        borders = torch.tensor([0, rows.stop - rows.start])
        parts.append(
            extend(**of(rows, every), initial_state=pools[1], initial_state_indices=slot, cu_seqlens=borders)[0]
        )
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(pools[1], pools[0])


def test_a_generated_token_is_one_more_of_the_prompt() -> None:
    """One token of two sequences at once, and a third row that is padding."""
    a, b, raw = draw(3, HEADS), draw(3, HEADS, seed=1), draw(3, 2 * KEY_HEADS * SIZE + HEADS * SIZE)
    A_log, dt_bias = draw(HEADS), draw(HEADS, seed=1)
    pool, slots = draw(4, HEADS, SIZE, SIZE), torch.tensor([3, 1, -1])
    before, out = pool.clone(), torch.full((3, 1, HEADS, SIZE), 7.0)
    gates = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    decode(mixed_qkv=raw, **gates, scale=SIZE**-0.5, initial_state=pool, out=out, ssm_state_indices=slots, use_x=True)
    q, k, v = raw.split([KEY_HEADS * SIZE, KEY_HEADS * SIZE, HEADS * SIZE], dim=1)
    g, beta = -A_log.exp() * F.softplus(a + dt_bias), b.sigmoid()
    for row, slot in enumerate((3, 1)):
        expected, _, _ = extend(
            q=q[row].view(1, 1, KEY_HEADS, SIZE), k=k[row].view(1, 1, KEY_HEADS, SIZE),
            v=v[row].view(1, 1, HEADS, SIZE), g=g[row].view(1, 1, HEADS), beta=beta[row].view(1, 1, HEADS),
            initial_state=before, initial_state_indices=torch.tensor([slot]), cu_seqlens=torch.tensor([0, 1]),
        )  # fmt: skip
        torch.testing.assert_close(out[row], expected[0])
    torch.testing.assert_close(pool, before)
    assert not out[2].any()


def test_convolutions_continue_what_the_pool_holds() -> None:
    channels, weight, bias = 6, draw(6, 4), draw(6)
    x, pool = draw(channels, 201), draw(5, channels, 3)
    before, slots = pool.clone(), torch.tensor([2, 4, 1, -1])
    continues = torch.tensor([True, False, True, False])
    out = convolve(
        x, weight, bias, conv_states=pool, seq_lens_cpu=SEQUENCES, cache_indices=slots, has_initial_state=continues,
        activation="silu", query_start_loc=BORDERS,
    )  # fmt: skip
    window = torch.cat([before[2], x[:, :70]], dim=1)
    expected = F.silu(F.conv1d(window[None], weight[:, None], bias, groups=channels)[0])
    torch.testing.assert_close(out[:, :70], expected)
    torch.testing.assert_close(pool[2], x[:, 67:70])
    torch.testing.assert_close(out[:, 70], F.silu(x[:, 70] * weight[:, 3] + bias))
    torch.testing.assert_close(pool[4], F.pad(x[:, 70:71], (2, 0)))
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])
    assert not out[:, 71:].any()
    step = draw(2, channels, seed=3)
    found = convolve_step(step, pool, weight, bias, "silu", conv_state_indices=torch.tensor([2, -1]))
    window = torch.cat([x[:, 67:70], step[0][:, None]], dim=1)
    torch.testing.assert_close(found[0], F.silu((window * weight).sum(1) + bias))
    torch.testing.assert_close(pool[2], window[:, 1:])


@pytest.mark.parametrize("layers", [(), (3,)])
def test_states_are_kept_in_other_slots(layers: tuple[int, ...]) -> None:
    """In the pool of one layer and of all; only what the mask names, and no slot that is gone."""
    conv, states = draw(*layers, 6, 5, 3), draw(*layers, 6, HEADS, SIZE, SIZE)
    pools = [conv.clone(), states.clone()]
    mask = torch.tensor([True, False, True, True])
    keep_states(*pools, torch.tensor([1, 2, 3, 5]), mask, torch.tensor([4, 0, -1, 0]), 3, check_freed_slots=True)
    slots = [0, 1, 2, 3, 1, 5]
    for kept, before in zip(pools, (conv, states), strict=True):
        assert torch.equal(kept, before.index_select(len(layers), torch.tensor(slots)))


def test_speculation_is_refused_where_a_model_has_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.hybrid_gdn_config", lambda config: config)
    runner = SimpleNamespace(model_config="hybrid", spec_algorithm=SimpleNamespace(is_none=lambda: False))
    with pytest.raises(ValueError, match="leave its flags out on a CPU"):
        use_states(lambda *_: pytest.fail("made a backend"), runner, None)
    runner.model_config = None
    assert use_states(lambda *made: made, runner, "attention") == (runner, "attention")
