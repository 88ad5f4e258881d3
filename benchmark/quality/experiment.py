"""Experiment: one model and one task, from prompts to table rows.

- `Experiment.ask` asks for the replies that the log lacks, the reference first.
- `Experiment.num_missing` counts these, `Experiment.reply` finds a logged one.
- `table_of` tabulates the complete conditions of one task, or of several together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmark.common.server import Server
from benchmark.quality.prompts import Prompt
from benchmark.quality.question import Question
from benchmark.quality.table import Row, tabulate
from benchmark.quality.tasks import Task

from chunk_cache_tools.conditions import REFERENCE, Condition, parse_method
from chunk_cache_tools.verify.reply_log import Reply, ReplyLog
from chunk_cache_tools.verify.session import WARMED, Session


@dataclass(frozen=True)
class Experiment:
    """A task asked of one model; `prompts` has one prompt per question of the task, `stored` is one of `STORED`."""

    model: str
    task: Task
    prompts: Sequence[Prompt]
    log: ReplyLog
    stored: str = WARMED

    def num_missing(self, conditions: Iterable[Condition]) -> int:
        """Replies that are not in the log, including those of the reference."""
        prompts = self._distinct()
        return sum(self.log.find(p.key, c) is None for c in (REFERENCE, *conditions) for p in prompts)

    def ask(self, server: Server, conditions: Sequence[Condition], tick: Callable[[int], None]) -> None:
        """Asks for the missing replies; `tick` is called with the number of replies just received.

        Raises:
            SetupError: a reply was not computed as wanted.
        """
        session = Session(server.client, self.task.asking, self.stored)
        missing = [prompt for prompt in self._distinct() if self.log.find(prompt.key, REFERENCE) is None]
        if missing:
            for replies in session.ask_reference(missing):
                self._keep(replies, tick)
        references = {prompt.key: self.reply(prompt, REFERENCE) for prompt in self.prompts}
        lengths = {key: reply.prompt_len for key, reply in references.items()}
        for block in session.blocks(self._distinct(), lengths):
            asks = [(p, c) for c in conditions for p in block if self.log.find(p.key, c) is None]
            if asks:
                session.prime(block)
                for replies in session.ask(asks, references):
                    self._keep(replies, tick)

    def reply(self, prompt: Prompt, condition: Condition) -> Reply:
        """The reply to a prompt that has been asked under this condition."""
        reply = self.log.find(prompt.key, condition)
        assert reply is not None, f"{condition.label} at {condition.ratio} of {prompt.key} was not asked"
        return reply

    def complete(self) -> list[Condition]:
        """All conditions for which every prompt has a reply, in this or an earlier run."""
        known = dict.fromkeys((reply.method, reply.ratio) for reply in self.log if reply.method != REFERENCE.label)
        conditions = [Condition(parse_method(label), ratio) for label, ratio in known]
        return [c for c in conditions if all(self.log.find(p.key, c) is not None for p in self.prompts)]

    def _distinct(self) -> list[Prompt]:
        return list({prompt.key: prompt for prompt in self.prompts}.values())

    def _keep(self, replies: list[Reply], tick: Callable[[int], None]) -> None:
        self.log.append(replies)
        tick(len(replies))


def table_of(family: str, experiments: Sequence[Experiment]) -> list[Row]:
    """Rows over all questions of experiments of one model and metric, for the conditions that all of them have."""
    first, *others = experiments
    complete = [other.complete() for other in others]
    conditions = [c for c in first.complete() if all(c in known for known in complete)]
    asked: list[tuple[Question, str]] = []
    replies: dict[Condition, dict[str, Reply]] = {condition: {} for condition in (REFERENCE, *conditions)}
    for experiment in experiments:
        for question, prompt in zip(experiment.task.questions, experiment.prompts, strict=True):
            asked.append((question, prompt.key))
            for condition, found in replies.items():
                found[prompt.key] = experiment.reply(prompt, condition)
    return tabulate(first.model, family, first.task.metric, asked, replies, conditions)
