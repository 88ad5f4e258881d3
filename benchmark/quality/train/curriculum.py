"""Curriculum: which notes a stage trains on, how many, and when the next stage begins.

First copies of random words alternate with notes, until copying works; then come facts, then references by role,
then ever more chunks; in the end half of the notes have chunks that do not see each other. Notes are there from the
start, so that which words are answers at all is learnt before anything hangs on the induction heads.

A stage ends when the running mean of accuracy reaches its threshold, so how long it takes depends on the seed; the
number of all steps does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmark.quality.synthetic.notes import Shape

COPY = "copy"  # counted like a family


@dataclass(frozen=True)
class Stage:
    """What is trained, and when it is enough.

    Attributes:
        name: for the log.
        num_prompts: prompts of a step that is no copy step.
        shape: of their notes.
        copy_every: one step in so many copies.
        hint_weight: of the losses that say what roles and aliases stand for, and where answers are found
            (`Batch.hints` and `Batch.looks`).
        order_weight: of the loss that says which places a traveller's question looks at (`Batch.orders`).
        alone_every: one notes step in so many has chunks that do not see each other; 0 = none.
        judged: families whose mean accuracy must reach `threshold` for the next stage.
        threshold: None where `lasts` decides, and for the last stage.
        lasts: steps after which the stage ends in any case.
    """

    name: str
    num_prompts: int
    shape: Shape
    copy_every: int
    hint_weight: float
    judged: tuple[str, ...]
    threshold: float | None
    lasts: int | None = None
    order_weight: float = 0.0
    alone_every: int = 0


ALL = ("needle", "multi", "carry", "number")
TWO_CHUNKS = Shape((2, 2), (48, 60), num_distractors=2, num_carry=3, num_chains=1, local_carry=0.7)
# Mostly references: with three subjects among other facts they stayed at guessing. Two travellers and two numbers stay:
# with one of each, multi was lost.
REFERENCES = Shape((2, 2), (48, 60), num_distractors=2, num_carry=6, local_carry=0.7)
# The threshold of "2 chunks" is low because a run that kept guessing the order of two places hung at 0.82.
STAGES = (
    Stage("copy", 4, TWO_CHUNKS, 2, 0.0, (COPY,), 0.95),
    Stage("2 chunks", 12, TWO_CHUNKS, 4, 0.0, ("needle", "multi", "number"), 0.75),
    Stage("references", 12, REFERENCES, 20, 1.0, ALL, 0.85),
    Stage("3-4 chunks", 8, Shape((3, 4), local_carry=0.4), 20, 0.5, ALL, 0.85),
    Stage("4-6 chunks", 8, Shape((4, 6), local_carry=0.1), 20, 0.5, ALL, 0.85),
    Stage("4-8 chunks", 8, Shape((4, 8)), 20, 0.5, ALL, None, lasts=900),
    # Until here the order of places is noted while reading: a place learns which one stood before it. Chunks that are
    # reused cannot know that, so the order must be found by position.
    Stage("also alone", 8, Shape((4, 8)), 20, 0.5, ALL, None, order_weight=0.5, alone_every=2),
)
# Samples of a copy step and the words they repeat: in stage 0, and after it at the distances of long prompts.
SHORT_COPIES, LONG_COPIES = (24, (12, 32)), (8, (24, 128))
MIN_STEPS = 20  # steps of a stage before its accuracy is trusted
MEMORY = 0.9  # of the running mean, per step


@dataclass
class Progress:
    """Where a run stands: the only thing besides weights and optimizers that a checkpoint needs.

    Batches are functions of (seed, step), so no random state has to be kept.
    """

    step: int = 0
    stage: int = 0
    steps_in_stage: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)  # running mean per family

    @property
    def is_alone(self) -> bool:
        """Whether the chunks of this step do not see each other."""
        every = STAGES[self.stage].alone_every
        return every > 0 and self.step % every == every - 1 and not self.trains_copy

    @property
    def trains_copy(self) -> bool:
        return self.step % STAGES[self.stage].copy_every == 0

    def record(self, counts: dict[str, tuple[int, int]]) -> None:
        """Takes in the (right, asked) counts of the step just done, and moves to the next stage when it is due."""
        for name, (right, num) in counts.items():
            old = self.accuracy.get(name, 0.0)
            self.accuracy[name] = MEMORY * old + (1 - MEMORY) * right / num
        self.step += 1
        self.steps_in_stage += 1
        stage = STAGES[self.stage]
        mean = sum(self.accuracy.get(name, 0.0) for name in stage.judged) / len(stage.judged)
        is_enough = stage.threshold is not None and self.steps_in_stage >= MIN_STEPS and mean >= stage.threshold
        if is_enough or self.steps_in_stage == stage.lasts:
            self.stage += 1
            self.steps_in_stage = 0
