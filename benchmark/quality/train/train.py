"""Trains a small Llama or hybrid on synthetic notes, from scratch, on one CPU core (or a GPU).

    OMP_NUM_THREADS=1 python benchmark/quality/train/train.py --seed 0 --out FOLDER [--resume]

The number of steps is fixed, never the time, so a seed gives the same weights on the same machine. FOLDER gets
`checkpoint.pt` (every --save-every steps, at the end, and when the process is asked to stop by SIGTERM or Ctrl-C) and
`log.jsonl`. `--resume` goes on from the checkpoint and ends at the same bits as a run that was never stopped.
`export.py` makes a model folder of the checkpoint. See `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.nn.functional as F
from benchmark.quality.synthetic.vocabulary import WORDS
from benchmark.quality.train.batches import (
    IGNORED,
    WITHIN_CHUNKS,
    Batch,
    SeedError,
    check_seed,
    copy_batch,
    is_exact,
    notes_batch,
    to_device,
)
from benchmark.quality.train.curriculum import COPY, LONG_COPIES, SHORT_COPIES, STAGES, Progress
from benchmark.quality.train.hybrid import Hybrid, HybridConfig, make_model
from benchmark.quality.train.model import Attention, ModelConfig
from benchmark.quality.train.muon import Muon
from torch import Tensor

LOG_EVERY = 20
DECAY_SHARE = 0.35  # the learning rate falls linearly over the last part of the run
WARMUP_STEPS = 20


@dataclass(frozen=True)
class Size:
    """A model and how long it trains; `prompt_factor` multiplies the prompts per step of every stage."""

    model: ModelConfig
    num_steps: int
    prompt_factor: int
    muon_lr: float = 0.01
    adam_lr: float = 2e-3


SIZES = {
    "1m": Size(ModelConfig(len(WORDS)), num_steps=4000, prompt_factor=1),
    "hybrid-1m": Size(HybridConfig(len(WORDS)), num_steps=3000, prompt_factor=1),
    # For a GPU; never run where these models were made.
    "15m": Size(
        ModelConfig(len(WORDS), hidden_size=320, num_layers=12, num_heads=10, num_kv_heads=5, mlp_size=864),
        num_steps=20000,
        prompt_factor=8,
    ),
}


class Trainer:
    """Owns weights, optimizers and progress of one run; `step` does one step, `save` and `load` keep all of it."""

    def __init__(self, size: Size, seed: int, device: str = "cpu") -> None:
        check_seed(seed)
        self.size, self.seed, self.device = size, seed, device
        self.model = make_model(size.model, torch.Generator().manual_seed(seed)).to(device)
        matrices = [p for name, p in self.model.named_parameters() if _is_matrix(name, p)]
        others = [p for name, p in self.model.named_parameters() if not _is_matrix(name, p)]
        self.optimizers = (
            Muon(matrices, lr=size.muon_lr),
            torch.optim.AdamW(others, lr=size.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._looking_layer().keep_seen = True
        self.progress = Progress()

    @property
    def is_done(self) -> bool:
        return self.progress.step >= self.size.num_steps

    def step(self) -> dict[str, Any]:
        """One optimizer step; returns what the log says about it."""
        progress, start = self.progress, time.perf_counter()
        stage = STAGES[progress.stage]
        batch = to_device(self._batch(), self.device)
        hidden = self.model(batch.ids, batch.layout)
        logits = self.model.logits(hidden[:, batch.first_target :])
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        self._with_hints(loss, hidden, batch).backward()
        factor = self._lr_factor()
        for optimizer, lr in zip(self.optimizers, (self.size.muon_lr, self.size.adam_lr), strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        predicted = logits.argmax(-1)
        if progress.is_alone:
            found = is_exact(batch, predicted)
            counts = {f"{family} alone": found[family] for family in WITHIN_CHUNKS if family in found}
        elif batch.families:
            counts = is_exact(batch, predicted)
        else:
            asked = batch.targets != IGNORED
            counts = {COPY: (int((predicted == batch.targets)[asked].sum()), int(asked.sum()))}
        progress.record(counts)
        return {
            "step": progress.step,
            "stage": stage.name,
            "loss": round(loss.item(), 4),
            "lr_factor": round(factor, 4),
            "step_s": round(time.perf_counter() - start, 3),
            "accuracy": {name: round(value, 4) for name, value in progress.accuracy.items()},
        }

    def _with_hints(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        """Adds what a role stands for, and where questions about subjects and travellers find their answers."""
        stage = STAGES[self.progress.stage]
        # Without this loss from the start, a hybrid learnt the first place and never the second one. Its looking layer
        # is the last, so no later layer can leave out the places that were said: it looks at the next one only.
        is_hybrid = isinstance(self.model, Hybrid)
        order_weight = max(stage.order_weight, 0.5 if is_hybrid else 0.0)
        if batch.orders is not None and order_weight:
            ordered = batch.orders.sum(-1) > 0
            scores = self._looking_layer().first_head_logits(batch.layout)[ordered]
            shares, wanted = F.log_softmax(scores, dim=-1)[:, : batch.orders.shape[-1]], batch.orders[ordered]
            if is_hybrid:
                is_next = (
                    batch.ids[ordered.nonzero()[:, 0], : batch.orders.shape[-1]] == batch.targets[ordered][:, None]
                )
                wanted = ((wanted > 0) & is_next).float()
            # -inf where a question does not look, times a share of 0
            loss = loss - order_weight * (wanted * shares.masked_fill(wanted == 0, 0.0)).sum(-1).mean()
        if batch.hints is None or batch.looks is None or stage.hint_weight == 0:
            return loss
        hinted = batch.hints != IGNORED
        logits = self.model.logits(hidden[:, : batch.hints.shape[1]][hinted])
        meaning = F.cross_entropy(logits, batch.hints[hinted])
        looking = batch.looks != IGNORED
        scores = self._looking_layer().first_head_logits(batch.layout)[looking]
        return loss + stage.hint_weight * (meaning + F.cross_entropy(scores, batch.looks[looking]))

    def _looking_layer(self) -> Attention:
        last = -1 if isinstance(self.model, Hybrid) else self.size.model.num_layers // 2
        return self.model.model.layers[last].self_attn

    def _batch(self) -> Batch:
        progress, stage = self.progress, STAGES[self.progress.stage]
        if progress.trains_copy:
            num_samples, lens = LONG_COPIES if progress.stage else SHORT_COPIES
            return copy_batch(self.seed, progress.step, num_samples * self.size.prompt_factor, lens)
        num_prompts = stage.num_prompts * self.size.prompt_factor
        return notes_batch(self.seed, progress.step, stage.shape, num_prompts, is_alone=progress.is_alone)

    def _lr_factor(self) -> float:
        step, num_steps = self.progress.step, self.size.num_steps
        return min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / (DECAY_SHARE * num_steps))

    def save(self, path: Path) -> None:
        """Replaces `path` in one go, so that a stop in between leaves the older checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
            "size": asdict(self.size),
            "seed": self.seed,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Goes on where `save` was called.

        Before the learning rate falls, another number of steps is the same run so far, and is taken.

        Raises:
            ValueError: the checkpoint is of another size or seed, or of another number of steps and too late.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        step, num_steps = state["progress"]["step"], state["size"]["num_steps"]
        if step <= (1 - DECAY_SHARE) * min(num_steps, self.size.num_steps):
            state["size"]["num_steps"] = self.size.num_steps
        for name, value in (("size", asdict(self.size)), ("seed", self.seed)):
            if state[name] != value:
                raise ValueError(f"{path}: made with another {name}; give the same --size, --steps and --seed.")
        self.model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        self.progress = Progress(**state["progress"])


def _is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon trains it; not the embedding, nor what gives each head one number."""
    return weight.ndim == 2 and not any(part in name for part in ("embed", "in_proj_a", "in_proj_b"))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint.pt and log.jsonl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=sorted(SIZES), default="1m")
    parser.add_argument("--steps", type=int, help="other number of steps than the size's own")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    args = parser.parse_args(argv)
    checkpoint = args.out / "checkpoint.pt"
    if args.resume and not checkpoint.exists():
        parser.error(f"--resume: {checkpoint} does not exist; leave --resume out to start from scratch.")
    if not args.resume and checkpoint.exists():
        parser.error(f"--out: {checkpoint} exists; give --resume to go on from it, or another folder.")
    try:
        check_seed(args.seed)
    except SeedError as error:
        parser.error(f"--seed: {error}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no CUDA device; leave it out to train on the CPU.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    size = SIZES[args.size]
    if args.steps:
        size = replace(size, num_steps=args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint, log = args.out / "checkpoint.pt", args.out / "log.jsonl"
    trainer = Trainer(size, args.seed, args.device)
    if args.resume:
        try:
            trainer.load(checkpoint)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stops.append(received))
    lines = _lines_until(log, trainer.progress.step)
    with log.open("w", encoding="utf-8", buffering=1) as file:
        file.writelines(lines)
        while not trainer.is_done and not stops:
            entry = trainer.step()
            if entry["step"] % LOG_EVERY == 0 or trainer.is_done:
                file.write(json.dumps(entry) + "\n")
            if entry["step"] % args.save_every == 0:
                trainer.save(checkpoint)
    trainer.save(checkpoint)
    print(f"{checkpoint}: step {trainer.progress.step} of {size.num_steps}")
    return 0 if trainer.is_done else 128 + stops[0]


def _lines_until(log: Path, step: int) -> list[str]:
    """Log lines up to `step`; what was logged after the checkpoint will be logged again."""
    if step == 0 or not log.exists():
        return []
    with log.open(encoding="utf-8") as file:
        return [line for line in file if json.loads(line)["step"] <= step]


if __name__ == "__main__":
    sys.exit(main())
