"""Training: held-out seeds are refused, a stopped run ends at the same bits, and exports compute what training did."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from benchmark.quality.synthetic.notes import FAMILIES, Asked, Notes, Shape
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions
from benchmark.quality.synthetic.vocabulary import BOS, EOS, ID_OF, SYSTEM, WORDS, decode, encode
from benchmark.quality.train.batches import (
    IGNORED,
    SYSTEM_LEN,
    SeedError,
    batch_of,
    chunk_by_chunk,
    copy_batch,
    is_exact,
    notes_batch,
)
from benchmark.quality.train.curriculum import COPY, MIN_STEPS, STAGES, Progress
from benchmark.quality.train.evaluate import exact_match, right_ones
from benchmark.quality.train.export import make_tokenizer, model_card, read_checkpoint, read_model, write_model
from benchmark.quality.train.model import Layout, Llama, ModelConfig, rotary_table, rotate
from benchmark.quality.train.muon import orthogonalize
from benchmark.quality.train.train import SIZES, Size, Trainer, main
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = ModelConfig(len(WORDS), hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=48)
SMALL = Shape(num_chunks=(2, 3), chunk_len=(48, 60), num_carry=2, num_chains=1)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(config: ModelConfig = TINY) -> Llama:
    """Like a fresh model, but with no matrix at zero, so that every weight matters."""
    model = Llama(config, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2, generator=generator)
    return model


@pytest.mark.parametrize("seed", HELD_OUT_SEEDS)
def test_held_out_seed_is_refused(seed):
    with pytest.raises(SeedError, match="held out"):
        Trainer(Size(TINY, num_steps=1, prompt_factor=1), seed)
    with pytest.raises(SeedError):
        notes_batch(seed, 0, SMALL, 1)
    with pytest.raises(SeedError):
        copy_batch(seed, 0, 1, (12, 32))


def test_questions_of_a_prompt_do_not_see_each_other():
    """All questions at once give each the logits it has as the only question."""
    batch = notes_batch(0, 0, SMALL, 2)
    model = random_model()
    together = model.logits(model(batch.ids, batch.layout)[:, batch.first_target :])
    for row in range(2):
        for group in set(batch.groups[row].tolist()) - {-1}:
            rows = batch.groups[row] == group
            question_ids = batch.ids[row, batch.first_target :][rows]
            context_len = int(batch.layout.positions[row, batch.first_target :][rows][0])
            ids = torch.cat([batch.ids[row, :context_len], question_ids])
            alone = next_token_logits(model, ids)[context_len:]
            torch.testing.assert_close(together[row, rows], alone, atol=1e-4, rtol=1e-4)


def next_token_logits(model: Llama, ids: torch.Tensor) -> torch.Tensor:
    layout = Layout(len(ids), torch.arange(len(ids))[None], None)
    with torch.no_grad():
        return model.logits(model(ids[None], layout))[0]


def test_loss_is_on_answers_only():
    notes = Notes(("owner ada cup .", "phone bob 1 2 3 4 ."), (Asked("number", "ask phone bob", "1 2 3 4"),))
    batch = batch_of([notes])
    targets = batch.targets[0][batch.targets[0] != IGNORED].tolist()
    assert decode(targets) == f"1 2 3 4 {EOS}"
    context = batch.ids[0, : 1 + len(encode(SYSTEM)) + 11].tolist()
    assert decode(context) == f"<bos> {SYSTEM} owner ada cup . phone bob 1 2 3 4 ."


def test_hints_say_what_words_stand_for():
    chunks = (
        "owner ada cup . cook eva .",
        "wearer cook red . pilot bob .",
        "alias cal ada . alias dan cal .",
        "wearer pilot blue .",
    )
    hints = batch_of([Notes(chunks, (Asked("needle", "ask owner ada", "cup"),))]).hints[0]
    words = " ".join((BOS, SYSTEM, *chunks)).split()
    hinted = [f"{words[i]}-{WORDS[hint]}" for i, hint in enumerate(hints.tolist()) if hint != IGNORED]
    assert hinted == ["cook-eva", "red-eva", "ada-cup", "cal-cup", "pilot-bob", "blue-bob"]


def test_questions_about_clothes_are_told_where_to_look():
    """The row of the answer in the context, at the last word of the question and nowhere else; it is a row it sees."""
    batch = notes_batch(0, 0, SMALL, 3)
    looking = batch.looks != IGNORED
    families = [batch.families[group] for group in batch.groups[looking].tolist()]
    assert families == ["carry"] * (3 * SMALL.num_carry)
    for row, place in zip(*looking.nonzero(as_tuple=True), strict=True):
        assert batch.ids[row, batch.looks[row, place]] == batch.targets[row, place]
    model = random_model()
    attention = model.model.layers[1].self_attn
    attention.keep_seen = True
    model(batch.ids, batch.layout)
    scores = attention.first_head_logits(batch.layout)
    assert scores.shape == batch.layout.question_mask[:, 0].shape
    assert scores[looking].gather(1, batch.looks[looking][:, None]).isfinite().all()
    assert torch.equal(scores == float("-inf"), batch.layout.question_mask[:, 0] == float("-inf"))


def test_questions_about_travellers_are_told_the_order_of_places():
    chunks = ("visitor bob rome . visitor cal oslo .", "visitor bob kyiv .", "visitor bob oslo .")
    asked = (
        Asked("needle", "ask owner ada", "cup"),
        Asked("multi", "ask visitor bob", "rome kyiv oslo"),
    )
    batch = batch_of([Notes(chunks, asked)])
    context = " ".join((BOS, SYSTEM, *chunks)).split()
    rows = batch.orders[0].sum(-1).nonzero()[:, 0].tolist()
    words = decode(batch.ids[0, batch.first_target :].tolist()).split()
    assert [words[row] for row in rows] == ["bob", "rome", "kyiv"]  # what comes next is a place
    for row in rows:
        shares = {i: share for i, share in enumerate(batch.orders[0, row].tolist()) if share}
        assert [context[place] for place in shares] == ["rome", "kyiv", "oslo"]
        assert context[list(shares)[-1] - 1] == "bob"
        assert list(shares.values()) == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_alone_only_questions_within_chunks_count():
    batch, alone = notes_batch(0, 0, SMALL, 3), notes_batch(0, 0, SMALL, 3, is_alone=True)
    assert torch.equal(batch.ids, alone.ids)
    assert torch.equal(batch.layout.positions, alone.layout.positions)
    assert (alone.hints, alone.looks) == (None, None)
    asked = {alone.families[group] for group in alone.groups[alone.targets != IGNORED].tolist()}
    assert asked == {"needle", "multi", "number"}
    counted = alone.targets != IGNORED
    assert torch.equal(alone.targets[counted], batch.targets[counted])
    assert (alone.layout.context_mask == float("-inf")).any(-1).any()


def test_exact_match_needs_every_token():
    batch = notes_batch(0, 0, SMALL, 2)
    right = is_exact(batch, batch.targets)
    assert all(num_right == num for num_right, num in right.values())
    wrong = batch.targets.clone()
    last = (batch.groups[0] == batch.groups[0].max()).nonzero()[-1]
    wrong[0, last] += 1
    family = batch.families[int(batch.groups[0].max())]
    changed = is_exact(batch, wrong)
    assert changed.pop(family)[0] == right.pop(family)[0] - 1
    assert changed == right


def test_copies_repeat_different_words():
    batch = copy_batch(0, 0, 5, (12, 32))
    for ids, targets in zip(batch.ids, batch.targets, strict=True):
        num_words = len(set(ids.tolist()))
        assert 12 <= num_words <= 32
        assert torch.equal(ids[num_words:], ids[:-num_words])
        # Nothing is asked in the first round, nor its first word.
        assert (targets[:num_words] == IGNORED).all()
        assert torch.equal(targets[num_words:-1], ids[num_words + 1 :])
    assert len({len(set(ids.tolist())) for ids in batch.ids}) > 1


def test_fresh_model_looks_back():
    """Scores of layer 0's first two heads peak one and two tokens back."""
    config = SIZES["1m"].model
    decoder = Llama(config, torch.Generator().manual_seed(0)).model
    batch = copy_batch(0, 0, 4, (12, 32))
    attention = decoder.layers[0].self_attn
    x = decoder.layers[0].input_layernorm(decoder.embed_tokens(batch.ids))
    cos, sin = rotary_table(batch.layout.positions, config)
    key = rotate(attention.k_proj(x)[..., None, : config.head_dim].transpose(1, 2), cos, sin)
    query = attention.q_proj(x).unflatten(-1, (config.num_heads, config.head_dim)).transpose(1, 2)
    scores = rotate(query, cos, sin)[:, :2] @ key.mT  # [batch, 2, length, length]
    mean = [[scores[:, head].diagonal(-distance, 1, 2).mean() for distance in range(8)] for head in range(2)]
    assert [row.index(max(row)) for row in mean] == [1, 2]


def test_orthogonalized_singular_values_are_near_one():
    for shape in ((3, 16, 40), (2, 40, 16)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_stage_ends_when_the_judged_families_reach_its_threshold():
    progress = Progress()
    for _ in range(MIN_STEPS + 30):
        progress.record({COPY: (90, 100), "needle": (1, 1)})
    assert progress.stage == 0
    for _ in range(30):
        progress.record({COPY: (100, 100)})
    assert progress.stage == 1
    for stage in STAGES[1:-2]:
        assert stage is STAGES[progress.stage]
        for _ in range(MIN_STEPS + 60):
            if stage is STAGES[progress.stage]:
                progress.record({family: (1, 1) for family in stage.judged})
    assert STAGES[progress.stage] is STAGES[-2]


def test_stage_ends_after_its_steps():
    progress = Progress(stage=len(STAGES) - 2)
    for _ in range(STAGES[-2].lasts - 1):
        progress.record({"needle": (1, 1)})
    assert STAGES[progress.stage] is STAGES[-2]
    progress.record({"needle": (0, 1)})
    assert (STAGES[progress.stage], progress.steps_in_stage) == (STAGES[-1], 0)
    assert STAGES[-1].threshold is STAGES[-1].lasts is None


def test_chunks_are_alone_in_the_last_stage_only_and_never_in_copies():
    for stage in range(len(STAGES)):
        steps = [Progress(step=step, stage=stage) for step in range(40)]
        alone = [p.step for p in steps if p.is_alone]
        assert alone == (list(range(1, 40, 2)) if STAGES[stage] is STAGES[-1] else [])
        assert not any(p.trains_copy for p in steps if p.is_alone)


def test_sizes_are_what_they_are_called():
    for name, num in (("1m", 1e6), ("15m", 15e6)):
        model = Llama(SIZES[name].model, torch.Generator())
        assert 0.9 * num < sum(weight.numel() for weight in model.parameters()) < 1.1 * num


@pytest.fixture
def mixed_steps(monkeypatch):
    """Trains on notes from the start, in small batches, with a copy step among them."""
    stages = (STAGES[0], replace(STAGES[2], num_prompts=2, shape=SMALL))
    monkeypatch.setattr("benchmark.quality.train.train.STAGES", stages)
    return Size(TINY, num_steps=6, prompt_factor=1)


def run_steps(trainer: Trainer, num: int) -> list[float]:
    return [trainer.step()["loss"] for _ in range(num)]


def test_resumed_run_ends_at_the_same_bits(mixed_steps, tmp_path):
    whole, again = (Trainer(mixed_steps, seed=5) for _ in range(2))
    whole.progress.stage = again.progress.stage = 1
    losses = run_steps(whole, 6)
    assert run_steps(again, 6) == losses

    first = Trainer(mixed_steps, seed=5)
    first.progress.stage = 1
    run_steps(first, 3)
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(mixed_steps, seed=5)
    second.load(tmp_path / "checkpoint.pt")
    assert run_steps(second, 3) == losses[3:]
    assert second.progress == whole.progress
    for (name, resumed), uninterrupted in zip(second.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(resumed, uninterrupted), name
    assert losses[0] != losses[-1]


def test_checkpoint_of_another_seed_is_refused(mixed_steps, tmp_path):
    Trainer(mixed_steps, seed=5).save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="another seed"):
        Trainer(mixed_steps, seed=6).load(tmp_path / "checkpoint.pt")


@pytest.fixture
def restored_signals():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_stop_leaves_a_checkpoint_to_go_on_from(tmp_path, restored_signals, capsys):
    """SIGTERM in the middle of a run of the real size, which `--resume` goes on from."""
    argv = ["--seed", "3", "--out", str(tmp_path), "--steps", "1000"]

    def stop_when_running() -> None:
        while not (tmp_path / "log.jsonl").exists():  # it exists once the run listens for signals
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_running, daemon=True).start()
    assert main(argv) == 128 + signal.SIGTERM
    step = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"]
    assert step < 1000
    with pytest.raises(SystemExit) as refused:
        main(argv)
    assert refused.value.code == 2
    assert "give --resume to go on" in capsys.readouterr().err
    trainer = Trainer(replace(SIZES["1m"], num_steps=1000), seed=3)
    trainer.load(tmp_path / "checkpoint.pt")
    trainer.step()
    assert trainer.progress.step == step + 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", str(HELD_OUT_SEEDS[0])], "held out"),
        (["--resume"], "leave --resume out"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["--out", str(tmp_path), *argv])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder exported from a checkpoint of a random model."""
    folder = tmp_path_factory.mktemp("model")
    trainer = Trainer(Size(TINY, num_steps=1, prompt_factor=1), seed=5)
    trainer.model.load_state_dict(random_model().state_dict())
    trainer.save(folder / "checkpoint.pt")
    run = read_checkpoint(folder / "checkpoint.pt")
    write_model(run, folder / "model")
    return folder / "model"


def test_transformers_gives_the_logits_of_training(exported):
    model = read_model(exported, TINY)
    reference = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert type(reference).__name__ == "LlamaForCausalLM"
    batch = notes_batch(0, 1, SMALL, 1)
    ids = batch.ids[0, : int(batch.layout.positions[0, batch.first_target])]
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(next_token_logits(model, ids), expected, atol=1e-4, rtol=1e-4)


def test_generation_agrees_with_exact_match(exported):
    """Greedy decoding by transformers is right exactly where `right_ones` says so; answers made right and wrong."""
    model = read_model(exported, TINY)
    reference = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    questions = []
    for index, question in enumerate(make_questions("number", num=4, seed=3)):
        prompt = tokenizer(" ".join((question.system, *question.chunks, question.question)), return_tensors="pt")
        reply = reference.generate(**prompt, max_new_tokens=3, do_sample=False, eos_token_id=None)
        answer = tokenizer.decode(reply[0, prompt.input_ids.shape[1] :])
        # An untrained model says anything; only where it would go on with the end token is it right.
        questions.append((replace(question, answers=(answer,)), index))
    right = right_ones(model, [question for question, _ in questions], "full")
    for (question, _), is_right in zip(questions, right, strict=True):
        prompt = tokenizer(" ".join((question.system, *question.chunks, question.question)), return_tensors="pt")
        reply = reference.generate(**prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert is_right == (reply[0, -1].item() == ID_OF[EOS])


def test_chunk_by_chunk_modes_compute_chunks_alone():
    """With one layer's view of a later chunk, `shifted` is that chunk behind the system prompt; `full` is not."""
    model = random_model()
    prompts = [Notes(("owner ada cup .", "visitor bob rome . thus"), (Asked("multi", "ask visitor bob", "rome"),))]
    batch = batch_of(prompts)
    first, second = SYSTEM_LEN + 4, SYSTEM_LEN + 9
    alone_ids = torch.cat([batch.ids[:, :SYSTEM_LEN], batch.ids[:, first:second]], dim=1)
    alone = model(alone_ids, Layout(alone_ids.shape[1], torch.arange(alone_ids.shape[1])[None], None))
    hidden = {}
    for name, shifted in (("shifted", True), ("unshifted", False)):
        apart = chunk_by_chunk(batch, prompts, shifted=shifted)
        hidden[name] = model(apart.ids, apart.layout)[:, first:second]
        has_true_positions = torch.equal(apart.layout.positions, batch.layout.positions)
        assert has_true_positions == shifted
    torch.testing.assert_close(hidden["unshifted"], alone[:, SYSTEM_LEN:], atol=1e-4, rtol=1e-4)
    full = model(batch.ids, batch.layout)[:, first:second]
    assert (full - hidden["shifted"]).abs().max() > 0.01
    # The system prompt stays behind while the chunk moves on, so even its own hidden states change a little.
    assert (hidden["shifted"] - hidden["unshifted"]).abs().max() > 1e-4


def test_unknown_mode_names_the_right_ones():
    with pytest.raises(ValueError, match="unshifted"):
        exact_match(random_model(), make_questions("needle", num=1, seed=3), "sideways")


def test_tokenizer_is_the_vocabulary(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = " ".join((SYSTEM, *make_questions("multi", num=1)[0].chunks))
    assert tokenizer(text).input_ids == [ID_OF["<bos>"], *encode(text)]
    assert tokenizer(text, add_special_tokens=False).input_ids == encode(text)
    assert tokenizer.decode(encode(text)) == text
    assert tokenizer.decode([*encode("red"), ID_OF[EOS]], skip_special_tokens=True) == "red"
    assert tokenizer.eos_token_id == ID_OF[EOS]
    assert len(tokenizer) == len(make_tokenizer()) == len(WORDS)


def test_exported_settings(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 2048
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == ID_OF[EOS]


def test_model_card_names_what_is_not_mastered(exported):
    run = read_checkpoint(exported.parent / "checkpoint.pt")
    columns = ("full, seed 7001", "full, seed 7002", "shifted, seed 7001", "unshifted, seed 7001")
    accuracy = {family: dict.fromkeys(columns, 0.99) for family in FAMILIES}
    accuracy["multi"]["shifted, seed 7001"] = 0.1
    assert "in full on a seed): none." in model_card(run, accuracy, 200)
    accuracy["carry"]["full, seed 7002"] = 0.9
    card = model_card(run, accuracy, 200)
    assert "in full on a seed): carry." in card
    assert "| carry | 99.0 | 90.0 | 99.0 | 99.0 |" in card
