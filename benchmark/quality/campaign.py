"""Campaign: asks all models, each on its own server, `Plan.jobs` servers at a time.

- `ask_models` asks for the missing replies and returns the rows of all models. Models without missing replies need no
  server.
- `Result` says how many replies were asked for, and how many were kept from earlier runs.
- `prompt_builder` returns the function that makes prompts of a model from questions.

Servers start one after the other in the calling thread, so that an interruption always stops them; other threads send
the requests. All servers stop when the campaign ends, for whatever reason; replies so far stay in the reply logs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.common.server import Server, offline_env
from benchmark.quality.experiment import Experiment, table_of
from benchmark.quality.prompts import Prompt, PromptFormat, build_chat_prompt, build_prompt
from benchmark.quality.question import DataError, Question
from benchmark.quality.table import Row
from benchmark.quality.tasks import Task
from rich.progress import Progress, TaskID

from chunk_cache.errors import known_names
from chunk_cache_tools.conditions import REFERENCE, Condition
from chunk_cache_tools.verify.reply_log import ReplyLog, files_in, fingerprint
from chunk_cache_tools.verify.session import WARMED

TOGETHER = "all questions"
PATIENCE_S = 1800.0  # large models take long to load, and to answer a call with many prompts


@dataclass(frozen=True)
class Plan:
    """What is asked of every model, and how.

    Attributes:
        redo: labels of methods whose kept replies are dropped.
        work: folder of reply logs and server logs.
        flags: flags of `launch_server`, after the model.
        jobs: models at a time.
        stored: how chunks are stored, one of `STORED`.
    """

    tasks: Sequence[Task]
    conditions: Sequence[Condition]
    work: Path
    chat: bool = False
    resume: bool = False
    redo: Sequence[str] = ()
    flags: tuple[str, ...] = ("--chunk-cache",)
    jobs: int = 1
    stored: str = WARMED


@dataclass(frozen=True)
class Result:
    """Rows of all models, in their order, and how many replies they were made of."""

    rows: list[Row]
    num_asked: int
    num_kept: int


def ask_models(models: Mapping[str, str], plan: Plan, progress: Progress) -> Result:
    """Asks all models for the missing replies, and tabulates.

    Args:
        models: name -> path.

    Raises:
        DataError: `Plan.redo` names a method that is not asked for.
        SetupError, ServerError, ServerRefused, ServerGone: a server failed, or answered in another way than wanted.
    """
    known = dict.fromkeys(condition.label for condition in (REFERENCE, *plan.conditions))
    for label in plan.redo:
        if label not in known:
            raise DataError(f"--redo: unknown method {label!r}; {known_names(label, known, 'methods')}")
    with ExitStack() as stack:
        experiments = {name: _open(name, path, plan, stack) for name, path in models.items()}
        missing = {n: sum(e.num_missing(plan.conditions) for e in mine) for n, mine in experiments.items()}
        running: dict[Future[None], Server] = {}
        threads = stack.enter_context(ThreadPoolExecutor(plan.jobs))
        stack.callback(lambda: [server.stop() for server in running.values()])  # before the pool waits for threads
        for name in filter(missing.get, models):
            _finish(running, at_most=plan.jobs - 1)
            bar = progress.add_task(f"{name}: starting a server", total=missing[name])
            server = _server(name, models[name], plan)
            server.start()
            running[threads.submit(_ask, server, experiments[name], plan, progress, bar)] = server
        _finish(running, at_most=0)
        done = [experiment for mine in experiments.values() for experiment in mine]
        num_asked = sum(missing.values())
        return Result(
            rows=[row for mine in experiments.values() for row in _rows(mine)],
            num_asked=num_asked,
            num_kept=sum(len(experiment.log) for experiment in done) - num_asked,
        )


def prompt_builder(model: str, *, chat: bool) -> Callable[[Question, PromptFormat], Prompt]:
    """Returns the function that makes prompts of this model from questions.

    Raises:
        DataError: its tokenizer has no chat template.
    """
    if not chat:
        return build_prompt
    from transformers import AutoTokenizer  # the import takes seconds

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        raise DataError(f"--chat: {model} has no chat template; run without --chat.")
    # If the tokenizer adds BOS, so does the server; the template's own is removed, else there would be two.
    adds_bos = tokenizer.bos_token is not None and tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    bos = tokenizer.bos_token if adds_bos else ""

    def render(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).removeprefix(bos)

    return lambda question, style: build_chat_prompt(question, render, style)


def _open(name: str, path: str, plan: Plan, stack: ExitStack) -> list[Experiment]:
    """One experiment per task, with its log."""
    build = prompt_builder(path, chat=plan.chat)
    model = fingerprint(path)
    experiments = []
    for task in plan.tasks:
        flags = [*plan.flags, *files_in(plan.flags)]
        settings = {"model": model, "flags": flags, "asking": asdict(task.asking), "stored": plan.stored}
        log = ReplyLog(plan.work / name / f"{task.family}.jsonl", settings, resume=plan.resume)
        stack.enter_context(log)
        if plan.redo:
            log.drop(plan.redo)
        experiments.append(Experiment(name, task, task.prompts(build), log, plan.stored))
    return experiments


def _rows(experiments: Sequence[Experiment]) -> list[Row]:
    """Rows of each task, then of all questions together if all tasks have one metric and measure likelihood."""
    rows = [row for experiment in experiments for row in table_of(experiment.task.family, [experiment])]
    tasks = [experiment.task for experiment in experiments]
    if len(tasks) > 1 and len({task.metric for task in tasks}) == 1 and all(task.asking.likelihood for task in tasks):
        rows += table_of(TOGETHER, experiments)
    return rows


def _server(name: str, path: str, plan: Plan) -> Server:
    env = offline_env() if Path(path).is_dir() else {}
    if plan.jobs > 1:
        env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // plan.jobs))
    log_path = plan.work / name / "server.log"
    patience = {"start_deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
    return Server(path, *plan.flags, env=env, log_path=log_path, **patience)


def _ask(server: Server, experiments: Sequence[Experiment], plan: Plan, progress: Progress, bar: TaskID) -> None:
    for experiment in experiments:
        if experiment.num_missing(plan.conditions):
            progress.update(bar, description=f"{experiment.model}: {experiment.task.family}")
            experiment.ask(server, plan.conditions, lambda num: progress.advance(bar, num))
    progress.update(bar, description=f"{experiments[0].model}: done")


def _finish(running: dict[Future[None], Server], *, at_most: int) -> None:
    """Waits until at most `at_most` models are left and stops the other servers; raises the errors of their threads."""
    while len(running) > at_most:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
            running.pop(future).stop()
