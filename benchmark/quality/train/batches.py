"""Batches: what one training step sees, a pure function of (training seed, step, stage).

`notes_batch` puts all questions of a prompt behind its context as separate blocks: each block sees the context and
itself, and starts at the position right after the context, exactly as if it were the only question. `copy_batch` is
random words repeated, the task in which induction heads form. `chunk_by_chunk` hides the chunks of a context from
each other, as reuse does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
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
SYSTEM_LEN = len(SYSTEM.split()) + 1  # with the beginning-of-sequence token
WITHIN_CHUNKS = ("needle", "multi", "number")  # families whose facts are understood without other chunks
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
        orders: # [batch, length - first_target, context_len], for the rows that ask where a traveller goes next: shares
            of the places in the context, each place twice that of the next one; 0 elsewhere. None for copies.
    """

    ids: Tensor
    layout: Layout
    first_target: int
    targets: Tensor
    groups: Tensor
    families: tuple[str, ...]
    hints: Tensor | None = None
    looks: Tensor | None = None
    orders: Tensor | None = None


def check_seed(seed: int) -> None:
    """Raises SeedError for a seed that is held out for evaluation."""
    if seed in HELD_OUT_SEEDS:
        raise SeedError(f"seed {seed} is held out for evaluation; train with another one, such as 0.")


def notes_batch(seed: int, step: int, shape: Shape, num_prompts: int, *, is_alone: bool = False) -> Batch:
    """The questions of `num_prompts` fresh prompts. Raises SeedError for a held-out seed.

    Args:
        is_alone: chunks do not see each other; no loss is taken on questions that need it.
    """
    check_seed(seed)
    rng = random.Random(f"train {seed} {step}")
    # One count of chunks for the whole batch: little padding.
    count = rng.randint(*shape.num_chunks)
    shape = replace(shape, num_chunks=(count, count))
    prompts = [make_notes(rng, shape) for _ in range(num_prompts)]
    batch = batch_of(prompts)
    if not is_alone:
        return batch
    batch = chunk_by_chunk(batch, prompts, shifted=True)
    needs_others = torch.tensor([family not in WITHIN_CHUNKS for family in batch.families])
    hidden = (batch.groups >= 0) & needs_others[batch.groups]
    return replace(batch, targets=batch.targets.masked_fill(hidden, IGNORED), hints=None, looks=None)


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
    blocks = _rows_of(groups.tolist(), context_len)
    layout = Layout(context_len, torch.cat([context_positions, positions], dim=1), mask, blocks=blocks)
    hints = torch.tensor([hints_of(context) + [IGNORED] * (context_len - len(context)) for context in contexts])
    # A colour stands once in a context.
    asks_garb = torch.cat([torch.zeros(len(prompts), 1, dtype=torch.bool), ids[:, :-1] == ID_OF["garb"]], dim=1)
    answer_rows = (targets[:, :, None] == context_ids[:, None, :]).int().argmax(dim=-1)
    looks = torch.where(asks_garb, answer_rows, IGNORED)
    orders = torch.zeros(len(prompts), num_rows, context_len)
    for index, (context, notes) in enumerate(zip(contexts, prompts, strict=True)):
        for row, share_of in _orders_of(context, notes):
            for place, share in share_of.items():
                orders[index, row, place] = share
    ids = torch.cat([context_ids, ids], dim=1)
    return Batch(ids, layout, context_len, targets, groups, tuple(families), hints, looks, orders)


def _orders_of(context: Sequence[int], notes: Notes) -> Iterator[tuple[int, dict[int, float]]]:
    """(question row, share of each context row) for the rows in front of a place; see `Batch.orders`."""
    places: dict[int, list[int]] = {}
    for i, word in enumerate(context):
        if word == ID_OF["visitor"]:
            places.setdefault(context[i + 1], []).append(i + 2)
    row = 0
    for asked in notes.asked:
        question, answer = encode(asked.question), encode(asked.answer)
        if asked.family == "multi":
            found = places[question[-1]]
            total = 2.0 ** len(found) - 1
            share_of = {place: 2.0 ** (len(found) - 1 - i) / total for i, place in enumerate(found)}
            for i in range(len(answer)):
                yield row + len(question) - 1 + i, share_of
        row += len(question) + len(answer)


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


def chunk_by_chunk(batch: Batch, prompts: Sequence[Notes], *, shifted: bool) -> Batch:
    """The same batch, with every context row seeing the system prompt and its own chunk only."""
    n = batch.layout.context_len
    owners = torch.full((len(prompts), n), -1)  # number of the chunk a context row belongs to, -1 for the system
    positions = batch.layout.positions.clone()
    for row, notes in enumerate(prompts):
        start = SYSTEM_LEN
        for index, chunk in enumerate(notes.chunks):
            chunk_len = len(chunk.split())
            owners[row, start : start + chunk_len] = index
            if not shifted:
                positions[row, start : start + chunk_len] = torch.arange(SYSTEM_LEN, SYSTEM_LEN + chunk_len)
            start += chunk_len
    is_system = torch.arange(n) < SYSTEM_LEN
    sees = ((owners[:, :, None] == owners[:, None, :]) | is_system).tril()
    mask = torch.zeros(sees.shape).masked_fill_(~sees, float("-inf"))[:, None]
    chunks = _rows_of(owners.tolist(), 0)
    return replace(batch, layout=replace(batch.layout, positions=positions, context_mask=mask, chunks=chunks))


def _rows_of(owners: Sequence[Sequence[int]], first: int) -> Tensor:
    """[samples, owners, rows]: the places of each owner in each sample, counted from `first`, -1 behind the last.

    Rows of owner -1 are left out, and an owner that a sample lacks has none.
    """
    samples = []
    for row in owners:
        places: dict[int, list[int]] = {}
        for place, owner in enumerate(row, start=first):
            if owner >= 0:
                places.setdefault(owner, []).append(place)
        samples.append(list(places.values()))
    count = max(map(len, samples))
    longest = max(len(rows) for sample in samples for rows in sample)
    filled = [[rows + [-1] * (longest - len(rows)) for rows in sample] for sample in samples]
    return torch.tensor([sample + [[-1] * longest] * (count - len(sample)) for sample in filled])


def to_device(batch: Batch, device: str) -> Batch:
    """The same batch with its model inputs and targets on `device`."""
    layout = batch.layout
    mask = None if layout.question_mask is None else layout.question_mask.to(device)
    context_mask = None if layout.context_mask is None else layout.context_mask.to(device)
    positions = layout.positions.to(device)
    blocks, chunks = (None if x is None else x.to(device) for x in (layout.blocks, layout.chunks))
    layout = Layout(layout.context_len, positions, mask, context_mask, blocks, chunks)
    hints, looks, orders = (None if x is None else x.to(device) for x in (batch.hints, batch.looks, batch.orders))
    ids, targets = batch.ids.to(device), batch.targets.to(device)
    return replace(batch, ids=ids, layout=layout, targets=targets, hints=hints, looks=looks, orders=orders)


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
