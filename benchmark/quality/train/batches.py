"""Batches: what one training step sees, a pure function of (training seed, step, stage).

`notes_batch` puts all questions of a prompt behind its context as separate blocks: each block sees the context and
itself, and starts at the position right after the context, exactly as if it were the only question. `copy_batch` is
random words repeated, the task in which induction heads form.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from benchmark.quality.synthetic.notes import FAMILIES, Notes, Shape, make_notes
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS
from benchmark.quality.synthetic.vocabulary import BOS, EOS, ID_OF, PAD, ROLES, SYSTEM, WORDS, encode
from benchmark.quality.train.model import Layout
from torch import Tensor

IGNORED = -100  # no loss here
LEN_STEP = 16  # lengths are padded to multiples of this, so that a compiled forward meets few shapes
ROLE_IDS = frozenset(ID_OF[role] for role in ROLES)
FIRST_WORD = ID_OF["ask"] + 1  # copied words: everything after the grammar


class SeedError(ValueError):
    """The seed is held out for evaluation."""


@dataclass(frozen=True)
class Batch:
    """`targets` are next tokens of the rows from `first_target` on, IGNORED where no loss is taken.

    Attributes:
        ids: # [batch, length]
        layout: positions and mask.
        first_target: row of the first target.
        targets: # [batch, length - first_target]
        groups: # [batch, length - first_target], number of the question a row belongs to, -1 for none.
        families: family of each question number; empty for copies.
        hints: # [batch, context_len], the subject's name where a sentence calls it by a role (see `hints_of`), else
            IGNORED; None for copies.
        looks: # [batch, length - first_target], for the rows that ask who wears what: the row of the answer in the
            context, else IGNORED; None for copies.
    """

    ids: Tensor
    layout: Layout
    first_target: int
    targets: Tensor
    groups: Tensor
    families: tuple[str, ...]
    hints: Tensor | None = None
    looks: Tensor | None = None


def check_seed(seed: int) -> None:
    """Raises SeedError for a seed that is held out for evaluation."""
    if seed in HELD_OUT_SEEDS:
        raise SeedError(f"seed {seed} is held out for evaluation; train with another one, such as 0.")


def notes_batch(seed: int, step: int, shape: Shape, num_prompts: int) -> Batch:
    """The questions of `num_prompts` fresh prompts. Raises SeedError for a held-out seed."""
    check_seed(seed)
    rng = random.Random(f"train {seed} {step}")
    # One count of chunks for the whole batch: little padding.
    count = rng.randint(*shape.num_chunks)
    shape = replace(shape, num_chunks=(count, count))
    return batch_of([make_notes(rng, shape) for _ in range(num_prompts)])


def batch_of(prompts: Sequence[Notes]) -> Batch:
    """All questions of all prompts."""
    contexts = [[ID_OF[BOS], *encode(" ".join((SYSTEM, *notes.chunks)))] for notes in prompts]
    context_len = _round_up(max(map(len, contexts)))
    rows: list[list[tuple[int, int, int, int]]] = []  # per prompt: (id, position, target, question)
    families: list[str] = []
    for context, notes in zip(contexts, prompts, strict=True):
        row = []
        for asked in notes.asked:
            question, answer = encode(asked.question), encode(asked.answer)
            ids = question + answer
            targets = [IGNORED] * (len(question) - 1) + answer + [ID_OF[EOS]]
            positions = range(len(context), len(context) + len(ids))
            row += [(i, p, t, len(families)) for i, p, t in zip(ids, positions, targets, strict=True)]
            families.append(asked.family)
        rows.append(row)
    num_rows = _round_up(max(map(len, rows)))
    padded = torch.tensor([row + [(ID_OF[PAD], 0, IGNORED, -1)] * (num_rows - len(row)) for row in rows])
    ids, positions, targets, groups = padded.unbind(-1)
    context_ids = torch.tensor([context + [ID_OF[PAD]] * (context_len - len(context)) for context in contexts])
    context_positions = torch.arange(context_len).expand(len(prompts), context_len)

    lens = torch.tensor([len(context) for context in contexts])
    sees_context = (torch.arange(context_len) < lens[:, None])[:, None].expand(-1, num_rows, -1)
    sees_own = (groups[:, :, None] == groups[:, None, :]).tril()
    sees = torch.cat([sees_context, sees_own], dim=-1)[:, None]
    mask = torch.zeros(sees.shape).masked_fill_(~sees, float("-inf"))
    layout = Layout(context_len, torch.cat([context_positions, positions], dim=1), mask)
    hints = torch.tensor([hints_of(context) + [IGNORED] * (context_len - len(context)) for context in contexts])
    # A colour stands once in a context.
    asks_garb = torch.cat([torch.zeros(len(prompts), 1, dtype=torch.bool), ids[:, :-1] == ID_OF["garb"]], dim=1)
    answer_rows = (targets[:, :, None] == context_ids[:, None, :]).int().argmax(dim=-1)
    looks = torch.where(asks_garb, answer_rows, IGNORED)
    return Batch(
        torch.cat([context_ids, ids], dim=1), layout, context_len, targets, groups, tuple(families), hints, looks
    )


def hints_of(context: Sequence[int]) -> list[int]:
    """Targets for what a context word must be understood as, IGNORED elsewhere.

    A role in a sentence about clothes, and the colour after it: the name that was introduced in this role. The last
    name of an alias sentence: the thing it owns. Answers alone did not teach such references within a run.
    """
    hints = [IGNORED] * len(context)
    names: dict[int, int] = {}
    things: dict[int, int] = {}
    for i, word in enumerate(context):
        if context[i - 1] == ID_OF["wearer"]:
            hints[i : i + 2] = [names[word]] * 2
        elif word in ROLE_IDS:
            names[word] = context[i + 1]
        elif word == ID_OF["owner"]:
            things[context[i + 1]] = context[i + 2]
        elif word == ID_OF["alias"]:
            things[context[i + 1]] = hints[i + 2] = things[context[i + 2]]
    return hints


def copy_batch(seed: int, step: int, num_samples: int, lens: tuple[int, int]) -> Batch:
    """Different random words again and again; the loss is on the repeats. Raises SeedError for a held-out seed.

    `lens` bounds, inclusively, how many words a sample repeats. Each sample draws its own: with two or three lengths
    for all, the model learnt these distances instead of looking for the word before.
    """
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    order = torch.rand(num_samples, len(WORDS) - FIRST_WORD, generator=generator).argsort(dim=1)
    num_words = torch.randint(lens[0], lens[1] + 1, (num_samples, 1), generator=generator)
    places = torch.arange(2 * lens[1] + 1).expand(num_samples, -1)
    words = FIRST_WORD + order.gather(1, places % num_words)
    # The first word of the first repeat cannot be known before it is seen.
    targets = words[:, 1:].masked_fill(places[:, 1:] <= num_words, IGNORED)
    layout = Layout(2 * lens[1], places[:, :-1], None)
    return Batch(words[:, :-1], layout, 0, targets, torch.full_like(targets, -1), ())


def to_device(batch: Batch, device: str) -> Batch:
    """The same batch with its model inputs and targets on `device`."""
    layout = batch.layout
    mask = None if layout.question_mask is None else layout.question_mask.to(device)
    layout = replace(layout, positions=layout.positions.to(device), question_mask=mask)
    batch = replace(batch, ids=batch.ids.to(device), layout=layout, targets=batch.targets.to(device))
    if batch.hints is None or batch.looks is None:
        return batch
    return replace(batch, hints=batch.hints.to(device), looks=batch.looks.to(device))


def is_exact(batch: Batch, predicted: Tensor) -> dict[str, tuple[int, int]]:
    """(right, asked) per family: a question is right when all tokens of its answer and the end token are.

    `predicted` has the shape of `batch.targets`. With the right tokens fed in, this is exact match of greedy decoding.
    """
    wrong_rows = ((predicted != batch.targets) & (batch.targets != IGNORED)).cpu()
    wrong = set(batch.groups[wrong_rows].tolist())
    counts = {family: [0, 0] for family in FAMILIES}
    for index, family in enumerate(batch.families):
        counts[family][0] += index not in wrong
        counts[family][1] += 1
    return {family: (right, num) for family, (right, num) in counts.items() if num}


def _round_up(length: int) -> int:
    return -(-length // LEN_STEP) * LEN_STEP
