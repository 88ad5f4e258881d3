"""What SGLang chooses on a GPU for checkpoints that people use, and what the chunk cache refuses; no GPU is needed.

Verbs: `choices` (for every generation of GPUs, each in a process of its own), `tables` (of docs/checkpoints.md).
`python test/stock_choices.py` writes that page's section anew.

torch is made to tell of a GPU, and SGLang's own functions do the rest. `checkpoints.json` holds configurations as far
as they matter to a start: `config` is config.json (on top of that of `like`), `hf_quant_config` the file of that name,
`flags` what the command line adds, `source` where it is from. `with` lists flags that help: the entry is there without
them, and with each of them. `list` is "most served" or "hybrid" (docs/checkpoints.md says which are); `downloads` are
millions in thirty days, the most that was seen in 2026.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from doc_pages import write_made_part

CHECKPOINTS = Path(__file__).with_name("checkpoints.json")


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory_gib: int


GPUS = {"sm_80": Gpu("A100", (8, 0), 80), "sm_90": Gpu("H100", (9, 0), 80), "sm_100": Gpu("B200", (10, 0), 180)}

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
DETERMINISTIC = {"enable_deterministic_inference": True}
RUNS = {"attention": "runs"}
STARTS: dict[str, dict[str, Any]] = {
    "deterministic": {"flags": DETERMINISTIC, "options": {"config": RUNS}},
    "deterministic, triton": {"flags": {**DETERMINISTIC, "attention_backend": "triton"}, "options": {"config": RUNS}},
    "deterministic, flashinfer": {"flags": {**DETERMINISTIC, "attention_backend": "flashinfer"}},
    "deterministic, any attention": {"flags": {**DETERMINISTIC, "attention_backend": "triton"}},
    "deterministic, cacheblend": {
        "flags": {**DETERMINISTIC, "attention_backend": "triton"},
        "options": {"config": RUNS, "method": "cacheblend"},
    },
    "on policy": {"flags": {"rl_on_policy_target": "fsdp", "attention_backend": "flashinfer"}},
    "split": {"flags": {"prefill_attention_backend": "triton", "decode_attention_backend": "flashinfer"}},
    "fa4": {"flags": {"attention_backend": "fa4"}},
    "fa3, e5m2": {"flags": {"attention_backend": "fa3", "kv_cache_dtype": "fp8_e5m2"}},
    "e4m3": {"flags": {"kv_cache_dtype": "fp8_e4m3"}},
    "fa4, e4m3": {"flags": {"attention_backend": "fa4", "kv_cache_dtype": "fp8_e4m3"}},
    "trtllm_mha, e5m2": {"flags": {"attention_backend": "trtllm_mha", "kv_cache_dtype": "fp8_e5m2"}},
    "full prefill graphs": {"flags": {"cuda_graph_backend_prefill": "full"}},
    "hnd": {"variables": {"SGLANG_USE_HND_KVCACHE": "1"}},
    "post-capture": {"variables": {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}},
    "post-capture, no graphs": {
        "variables": {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"},
        "flags": {"disable_cuda_graph": True},
    },
}
"""Starts of `LLAMA` with flags, options of the chunk cache or variables."""


@cache
def checkpoints() -> dict[str, dict[str, Any]]:
    """By name; each with its whole `config`."""
    found = {one["name"]: one for one in json.loads(CHECKPOINTS.read_text())}
    for one in found.values():
        one["config"] = {**found.get(one.get("like"), {}).get("config", {}), **one.get("config", {})}
    helped = {}
    for name, one in found.items():
        helped[name] = one
        for flags in one.get("with", ()):
            helped[_name_with(name, flags)] = {**one, "list": None, "flags": {**one.get("flags", {}), **flags}}
    return helped


def _name_with(name: str, flags: Mapping[str, Any]) -> str:
    """Name of a checkpoint with flags that help."""
    words = (f"--{flag.replace('_', '-')}" + ("" if value is True else f" {value}") for flag, value in flags.items())
    return f"{name}, {' '.join(words)}"


@dataclass(frozen=True)
class Choice:
    """What becomes of a start.

    Attributes:
        attention: backends for prefill and for decoding.
        kv: type of the KV pool.
        page_size: tokens per page.
        prefill_graph: how prefills are captured.
        refused: our sentence; None = it starts.
        error: SGLang's own; None = it starts.
    """

    attention: tuple[str, str] = ("", "")
    kv: str = ""
    page_size: int = 0
    prefill_graph: str = ""
    refused: str | None = None
    error: str | None = None

    @property
    def reason(self) -> str | None:
        """Why there is no server; None = there is one."""
        return self.refused or self.error


@dataclass(frozen=True)
class Choices:
    """By name of a checkpoint, or of one of `STARTS`.

    Attributes:
        stock: without the chunk cache.
        ours: with it.
    """

    stock: dict[str, Choice]
    ours: dict[str, Choice]


@cache
def choices() -> dict[str, Choices]:
    """By name of one of `GPUS`; found in another process, since a pretence cannot be taken back."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "choices"
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, __file__, str(file)], check=True, env={**os.environ, **hidden})
        found = json.loads(file.read_text())
    return {gpu: Choices(**{side: _choice_by_name(one) for side, one in sides.items()}) for gpu, sides in found.items()}


def _choice_by_name(found: dict[str, dict[str, Any]]) -> dict[str, Choice]:
    return {name: Choice(**{**one, "attention": tuple(one["attention"])}) for name, one in found.items()}


# In the process of one generation.


def pretend(gpu: Gpu) -> None:
    """Makes this process, which has imported SGLang without a GPU, take the machine for one that has it."""
    import sglang.srt.platforms as platforms
    import torch
    from sglang.srt.utils import common

    memory = gpu.memory_gib << 30
    told = {
        "is_available": True,
        "is_initialized": True,  # or SGLang asks the driver instead of torch
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "get_device_properties": SimpleNamespace(name=gpu.name, total_memory=memory, multi_processor_count=108),
        "mem_get_info": (memory, memory),
        "synchronize": None,
    }
    for name, value in told.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    for value in vars(common).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    sys.modules.pop("flashinfer", None)  # which the platform of the machine without a GPU has shut out
    before, now = platforms.current_platform, platforms.CudaSRTPlatform()
    platforms._current_platform = now
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang.")]:
        for name, value in list(vars(module).items()):
            if value is before:
                setattr(module, name, now)
            elif name in ("_is_cuda", "_is_cpu"):
                setattr(module, name, name == "_is_cuda")


def start(folder: Path, flags: Mapping[str, Any], options: Mapping[str, Any] | None) -> Choice:
    """What becomes of a start, up to its children; `options` are the chunk cache's, None = without it."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.common import get_device_sm

    from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, StartRefused
    from sglang_chunk_cache.plugin import enable
    from sglang_chunk_cache.start.pool_check import check_pool_dtype
    from sglang_chunk_cache.start.window_check import check_windows

    server_args = ServerArgs(model_path=str(folder), skip_tokenizer_init=True, **flags)
    try:
        if options is not None:
            enable(server_args, ChunkCacheArgs(**options))
        server_args.resolve_once()
    except StartRefused as refusal:
        return Choice(refused=str(refusal.code).removeprefix("chunk cache: "))
    except (ValueError, RuntimeError, AssertionError) as error:
        return Choice(error=str(error).partition("\n")[0])
    unknown = _unknown_class(server_args)
    if unknown is not None:
        return Choice(error=f"SGLang {version('sglang')} does not serve {unknown}")
    quant_config = _quant_config(server_args)
    if quant_config is not None and get_device_sm() < quant_config.get_min_capability():  # the model loader would stop
        return Choice(error=f"{quant_config.get_name()} needs sm_{quant_config.get_min_capability()}")
    view = resolved_view(server_args)
    if "fa3" in attention_backends_of(view) and get_device_sm() >= 100:  # the making of the backend would stop
        return Choice(error="fa3 needs sm_80 to sm_90")
    kv = _kv_dtype(server_args, view.kv_cache_dtype, quant_config)
    if options is not None:
        try:
            check_pool_dtype(kv, attention_backends_of(view))
            check_windows(*_windows(server_args), attention_backends_of(view))
        except StartRefused as refusal:
            return Choice(refused=str(refusal.code).removeprefix("chunk cache: "))
    return Choice(
        attention=attention_backends_of(view),
        kv=kv,
        page_size=view.page_size,
        prefill_graph=view.cuda_graph_config.prefill.backend,
    )


def _unknown_class(server_args: Any) -> str | None:
    """The class of a model, where SGLang has none of that name and transformers would run it."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    name: str = model_config_of(server_args).hf_config.architectures[0]
    return None if name in _classes() else name


@cache
def _classes() -> dict[str, str]:
    """Source of the models of SGLang, by the names of their classes; read, since to import them all takes long."""
    import sglang.srt.models as models

    texts = [file.read_text() for file in Path(models.__path__[0]).glob("*.py")]
    lists = re.compile(r"^EntryClass\b[^=]*=\s*(\[.*?\]|\w+)", re.M | re.S)
    return {name: text for text in texts for one in lists.findall(text) for name in re.findall(r"\w+", one)}


def _windows(server_args: Any) -> tuple[int | None, list[int]]:
    """What `check_windows` is given of a model that SGLang would keep in two pools."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    from sglang_chunk_cache.start.model_refusals import has_window_pool

    config = model_config_of(server_args)
    window = config.sliding_window_size
    if window is None or not has_window_pool(config):
        return None, [-1]
    is_told = "def get_attention_sliding_window_size" in _classes()[config.hf_config.architectures[0]]
    return window if is_told else None, [window]


def _quant_config(server_args: Any) -> Any:
    """The quantization that a model is built with."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    config = model_config_of(server_args)
    return None if config.quantization is None else get_quant_config(config, LoadConfig(), {})


def _kv_dtype(server_args: Any, asked: str, quant_config: Any) -> str:
    """The type of the KV pool, as a scheduler finds it once it has the model."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=asked,
        model=SimpleNamespace(quant_config=quant_config),
        model_dtype=model_config_of(server_args).dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    return str(dtype).removeprefix("torch.")


@contextmanager
def _folder(checkpoint: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        for file, key in (("config.json", "config"), ("hf_quant_config.json", "hf_quant_config")):
            if key in checkpoint:
                (Path(name) / file).write_text(json.dumps(checkpoint[key]))
        yield Path(name)


def _choices_on(gpu: str) -> Choices:
    pretend(GPUS[gpu])
    found = Choices({}, {})
    starts = {name: (one, one.get("flags", {}), {}, {}) for name, one in checkpoints().items()}
    for name, one in STARTS.items():
        rest = (one.get("flags", {}), one.get("options", {}), one.get("variables", {}))
        starts[name] = (checkpoints()[LLAMA], *rest)
    for name, (checkpoint, flags, options, variables) in starts.items():
        os.environ.update(variables)
        with _folder(checkpoint) as folder:
            found.stock[name] = start(folder, flags, None)
            found.ours[name] = start(folder, flags, options)
        for variable in variables:
            del os.environ[variable]
    return found


def _write_choices(file: Path) -> None:
    """Imports what a start imports, once, and forks a process for each generation."""
    from sglang.srt.server_args import ServerArgs

    from sglang_chunk_cache.flags.server_args import ChunkCacheArgs
    from sglang_chunk_cache.plugin import enable

    enable(ServerArgs(model_path="none"), ChunkCacheArgs())
    logging.disable(logging.WARNING)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = zip(GPUS, pool.map(_choices_on, GPUS, chunksize=1), strict=True)
        file.write_text(json.dumps({gpu: asdict(one) for gpu, one in found}))


# docs/checkpoints.md


def accepted(name: str) -> str | None:
    """How a checkpoint is accepted on every generation on which SGLang serves it: "as it is", "with flags", or None.

    The flags need not be the same on all.
    """
    served = [one for one in choices().values() if one.stock[name].error is None]
    ways = [[way for way in (name, *_helped(name)) if one.ours[way].reason is None] for one in served]
    if not served or not all(ways):
        return None
    return "as it is" if all(name in one for one in ways) else "with flags"


def _helped(name: str) -> list[str]:
    """Names of a checkpoint with the flags that help."""
    return [_name_with(name, flags) for flags in checkpoints()[name].get("with", ())]


def count() -> str:
    """How many of the most served checkpoints are accepted, as a sentence."""
    ways, hybrids = (
        [accepted(name) for name, one in checkpoints().items() if one.get("list") == which]
        for which in ("most served", "hybrid")
    )
    return (
        f"Of the {len(ways)} most served checkpoints that are no hybrids of linear attention or of state-space layers "
        f"(in bold), {len(ways) - ways.count(None)} are accepted on every generation that SGLang serves them on, "
        f"{ways.count('with flags')} of these with flags on some; of {len(hybrids)} hybrids, counted apart, "
        f"{len(hybrids) - hybrids.count(None) or 'none'}."
    )


def tables() -> str:
    """The tables as Markdown, and what they count."""
    served: dict[str, list[str]] = {}
    refused = []
    for name, checkpoint in checkpoints().items():
        title = f"**{name}**" if checkpoint.get("list") == "most served" else name
        found = [one.ours[name] for one in choices().values()]
        kv = next((one.kv for one in found if one.reason is None), None)
        if kv is None:
            reason = str(found[-1].reason).removeprefix("this model cannot be served with --chunk-cache because ")
            refused.append(f"| {title} | {reason.rstrip('.')} | {_help(name)} |")
        else:
            served.setdefault(f"`{kv}` | {' | '.join(map(_cell, found))}", []).append(title)
    gpus = " | ".join(f"{gpu.name} ({name})" for name, gpu in GPUS.items())
    rows = [f"| {'<br>'.join(names)} | {cells} |" for cells, names in served.items()]
    head = f"| checkpoints | KV cache | {gpus} |\n| --- | --- |{' --- |' * len(GPUS)}"
    rest = ["", "| checkpoint | refused because | what helps |\n| --- | --- | --- |", *refused]
    return "\n".join([count(), "", head, *rows, *rest])


def _help(name: str) -> str:
    """The flags with which a refused checkpoint is served."""
    served = [way for way in _helped(name) if any(one.ours[way].reason is None for one in choices().values())]
    return ", ".join(f"`{way.removeprefix(name)[2:]}`" for way in served) or "nothing"


def _cell(choice: Choice) -> str:
    if choice.reason is not None:
        return f"SGLang: {choice.error}" if choice.refused is None else choice.refused
    backends = " and ".join(f"`{backend}`" for backend in dict.fromkeys(choice.attention))
    return backends if choice.page_size == 1 else f"{backends}, pages of {choice.page_size}"


def main() -> None:
    if len(sys.argv) > 1:
        _write_choices(Path(sys.argv[1]))
        return
    write_made_part("checkpoints.md", "test/stock_choices.py", tables())


if __name__ == "__main__":
    main()
