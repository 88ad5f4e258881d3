"""Models that are served if the user gives none: `documents_model`, and the trained one in `TRAINED_DIR`."""

from __future__ import annotations

from pathlib import Path

from benchmark.common.machine import ROOT
from benchmark.common.models import LlamaShape, make_llama
from benchmark.demo.corpus import Passage, train_on_corpus

CACHE_DIR = ROOT / ".cache" / "serving"  # models, logs, and results that are not to be kept
TRAINED_DIR = ROOT / "benchmark" / "quality" / "models" / "qa-1m-seed1"
TRAINED_FLAGS = ("--dtype", "float32")  # stored in bfloat16, which many CPUs emulate, ten times as slow
SMALL_POOL_LEN = 65536  # tokens of the KV pool of servers of the trained model


def documents_model(shape: LlamaShape) -> tuple[Path, list[Passage]]:
    """A random model whose tokenizer was trained on this repository's prose, and that prose as passages."""
    tokenizer, passages = train_on_corpus(shape.vocab)
    return make_llama(CACHE_DIR / f"llama-{shape.layers}x{shape.hidden}", shape, tokenizer=tokenizer), passages
