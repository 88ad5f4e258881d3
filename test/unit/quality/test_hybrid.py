"""The small hybrid is transformers' Qwen3.5, and a prompt put together from stored pieces is the prompt."""

from __future__ import annotations

import random

import pytest
import torch
from benchmark.quality.hybrid.pieces import KINDS, Carried, Prompt, Reused, Run, Seen, Stored, answered, mean_of
from benchmark.quality.hybrid.study import (
    ALONE,
    BUDGET,
    FULL,
    RULE_FAMILIES,
    RULE_SEAM,
    SHUFFLED,
    Answers,
    Condition,
    ask,
    conditions,
    rule_lines,
)
from benchmark.quality.synthetic.notes import Shape, make_notes
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions
from benchmark.quality.synthetic.vocabulary import WORDS, encode
from benchmark.quality.train.batches import SYSTEM_LEN, batch_of, chunk_by_chunk, notes_batch
from benchmark.quality.train.export import hybrid_config
from benchmark.quality.train.hybrid import Hybrid, HybridConfig
from benchmark.quality.train.model import Layout, Llama, ModelConfig
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

SIZES = dict(hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=48)
TINY = HybridConfig(len(WORDS), **SIZES, full_every=2, num_states=2, state_size=8)
CLOSE = dict(atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def random_weights(model):
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.2, generator=generator)
    return model


@pytest.fixture(scope="module", params=["hybrid", "llama"])
def model(request):
    kind, config = (Hybrid, TINY) if request.param == "hybrid" else (Llama, ModelConfig(len(WORDS), **SIZES))
    return random_weights(kind(config, torch.Generator().manual_seed(0)))


def logits_of(model, ids):
    layout = Layout(len(ids), torch.arange(len(ids))[None], None)
    return model.logits(model(ids[None], layout))[0]


def ids_of(seed, size):
    return torch.randint(0, len(WORDS), (size,), generator=torch.Generator().manual_seed(seed))


def test_logits_are_those_of_transformers():
    model = random_weights(Hybrid(TINY, torch.Generator().manual_seed(0)))
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hybrid_config(TINY))).eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    ids = ids_of(2, 150)
    torch.testing.assert_close(logits_of(model, ids), theirs(ids[None]).logits[0], **CLOSE)


def test_questions_of_a_prompt_do_not_see_each_other():
    model = random_weights(Hybrid(TINY, torch.Generator().manual_seed(0)))
    batch = notes_batch(0, 0, Shape((2, 3), (48, 60), num_carry=2, num_chains=1), 2)
    together = model.logits(model(batch.ids, batch.layout)[:, batch.first_target :])
    for row in range(2):
        for group in set(batch.groups[row].tolist()) - {-1}:
            rows = batch.groups[row] == group
            start = int(batch.layout.positions[row, batch.first_target :][rows][0])
            ids = torch.cat([batch.ids[row, :start], batch.ids[row, batch.first_target :][rows]])
            torch.testing.assert_close(together[row, rows], logits_of(model, ids)[start:], **CLOSE)


def test_chunks_that_do_not_see_each_other_are_pieces():
    """Training's batch of chunks that stand alone gives the logits of the same pieces put together.

    Training has such chunks at their places in the prompt, pieces are computed right behind the system prompt; so keys
    have no rotated part here.
    """
    model = random_weights(Hybrid(TINY, torch.Generator().manual_seed(0)))
    for layer in model.model.layers:
        if layer.is_full:
            layer.self_attn.k_norm.weight[: TINY.rotary_dim] = -1.0
    notes = [make_notes(random.Random(seed), Shape((2, 3))) for seed in range(2)]
    batch = chunk_by_chunk(batch_of(notes), notes, shifted=True)
    together = model.logits(model(batch.ids, batch.layout)[:, batch.first_target :])
    for row, each in enumerate(notes):
        system = batch.ids[row, :SYSTEM_LEN].tolist()
        parts = [Run(system)]
        for chunk in each.chunks:
            ids = encode(chunk)
            stored = Prompt(model, [Run(system + ids)]).stored(SYSTEM_LEN, len(ids))
            parts.append(Reused(stored.piece(0), len(ids)))
        rows = batch.groups[row] == batch.groups[row, 0]
        question = batch.ids[row, batch.first_target :][rows].tolist()
        prompt = Prompt(model, [*parts, Run(question)])
        torch.testing.assert_close(together[row, rows], model.logits(prompt.hidden[0, -len(question) :]), **CLOSE)


@pytest.mark.parametrize("skip", [0, 1, 3, 20])
def test_pieces_of_the_same_prompt_are_the_prompt(model, skip):
    """Whatever is computed and whatever is stored, in one piece or two; the same after a mean over equal contexts."""
    ids = ids_of(3, 110).tolist()
    whole = Prompt(model, [Run(ids)])
    torch.testing.assert_close(model.logits(whole.hidden[0]), logits_of(model, torch.tensor(ids)), **CLOSE)
    pieces = [whole.stored(10, 40), whole.stored(50, 41)]
    kept = [mean_of([stored.piece(skip)] * 2) for stored in pieces]
    parts = [Run(ids[:10])]
    for start, layers, stored in zip((10, 50), kept, pieces, strict=True):
        parts += [Run(ids[start : start + skip])] if skip else []
        parts.append(Reused(layers, stored.size - skip))
    prompt = Prompt(model, [*parts, Run(ids[91:])])
    torch.testing.assert_close(prompt.hidden[0, -19:], whole.hidden[0, -19:], **CLOSE)
    assert answered(prompt, ids[-4:])[1] == pytest.approx(answered(whole, ids[-4:])[1], abs=1e-4)


def test_kinds_of_maps():
    """fp32 is the map; without A the state of before is gone; bf16 is near; the decay is what no token overwrites."""
    model = random_weights(Hybrid(TINY, torch.Generator().manual_seed(0)))
    stored = Prompt(model, [Run(ids_of(4, 60).tolist())]).stored(20, 40)
    assert isinstance(stored, Stored)
    carried, seen = stored.piece(3)[:2]
    assert isinstance(carried, Carried)
    assert isinstance(seen, Seen)
    assert (carried.tail.shape[0], seen.k.shape[1]) == (37, 37)
    assert KINDS["operator"](carried) is carried
    assert KINDS["none"](carried).turn.abs().max() == 0
    torch.testing.assert_close(KINDS["bf16"](carried).adds, carried.adds, atol=0, rtol=2**-8)
    decay = KINDS["decay"](carried).turn
    total = stored.mixed[0].g[0, :, 3:].sum(-1).exp()
    torch.testing.assert_close(decay.diagonal(dim1=1, dim2=2), total[:, None].expand(-1, 8))
    assert carried.turn.norm(2, dim=(1, 2)).lt(total * 8**0.5 + 1e-6).all()


def test_fresh_model_looks_back():
    """Half of layer 0's heads give the value one and two tokens back, whatever the token."""
    decoder = Hybrid(HybridConfig(len(WORDS)), torch.Generator().manual_seed(0)).model
    layer = decoder.layers[0].linear_attn
    x = decoder.layers[0].input_layernorm(decoder.embed_tokens(ids_of(0, 30)[None]))
    inputs = torch.cat([torch.zeros(1, layer.tail, 384), layer.in_proj_qkv(x)], dim=1)
    out, _ = layer.mixed(x, layer.convolved(inputs)).run(layer.empty_state(1))
    values = torch.nn.functional.silu(inputs[:, layer.tail :, 256:]).unflatten(-1, (4, 32)).transpose(1, 2)
    for head in range(2):
        before = values[:, head, 4 - head : -1 - head]
        assert torch.nn.functional.cosine_similarity(out[:, head, 5:], before, dim=-1).mean() > 0.95
    gates = layer.in_proj_z(x)[0, :, :64]
    assert gates.min() > 0


def lines_of(losses, condition):
    """One model's lines: every question is right in full, and loses what is asked for."""
    return [
        {"shape": "short", "family": family, "id": f"{family}{number}", "condition": name, "right": right, "nats": nats}
        for family in RULE_FAMILIES
        for number, lost in enumerate(losses)
        for name, right, nats in ((FULL, True, 0.1), (condition, lost == 0, 0.1 + lost))
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [([0, 0, 1, 0] * 9, [0, 0, 0.5, 0] * 9, "go"), ([1, 0, 1, 1] * 9, [0, 0, 0.2, 0] * 9, "no-go")],
)
def test_rule_compares_with_twice_the_transformer(ours, theirs, outcome):
    condition = Condition(ALONE, RULE_SEAM).text()
    hybrid, llama = (Answers([lines_of(losses, condition)] * 3) for losses in (ours, theirs))
    assert hybrid.losses("short", RULE_FAMILIES, condition, "nats").size == 3 * 36
    assert rule_lines(hybrid, llama)[-1] == f"- **{outcome}**"


def test_every_condition_of_a_question_is_asked(model):
    """Seams that cover a passage leave nothing to reuse, so the answer is that of full prefill."""
    question = make_questions("carry", num=1, seed=HELD_OUT_SEEDS[0], num_chunks=(3, 3), chunk_len=(40, 60))[0]
    lines = {line["condition"]: line for line in ask(model, question, "long", random.Random(0))}
    is_hybrid = isinstance(model, Hybrid)
    assert lines.keys() - {"maps"} == {FULL, *(each.text() for each in conditions("long", is_hybrid))}
    assert ("maps" in lines) == is_hybrid
    covered = lines[Condition(ALONE, 64).text()]
    assert covered["computed"] == lines[FULL]["computed"]
    assert covered["nats"] == pytest.approx(lines[FULL]["nats"], abs=1e-4)
    assert lines[Condition(ALONE, 3).text()]["computed"] == 9
    total = lines[FULL]["computed"]
    assert total * 0.2 < lines[Condition(SHUFFLED, RULE_SEAM, budget=BUDGET).text()]["computed"] <= total * BUDGET
