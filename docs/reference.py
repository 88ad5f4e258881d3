"""Reference: docs/reference.md, everything with a name, as the code has it.

Verbs: `page` (the whole of it), `metrics` (what Prometheus scrapes). `python docs/reference.py` writes it anew.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from prometheus_client import REGISTRY

from chunk_cache.advice import ADVICE
from chunk_cache.gate.target import Target
from chunk_cache.methods import METHODS
from chunk_cache.methods import method_options as options
from chunk_cache.options.config import Config
from chunk_cache.options.event_config import EventConfig
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.options.selector_config import SelectorConfig
from chunk_cache.options.tier_config import TierConfig
from chunk_cache.types import REASONS, Status
from chunk_cache_tools.command import COMMANDS
from sglang_chunk_cache.admin.routes import ROUTES
from sglang_chunk_cache.flags.server_args import add_flags
from sglang_chunk_cache.selector.selector_client import SELECTOR_METERS
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics
from sglang_chunk_cache.telemetry.gate_metrics import GateMetrics
from sglang_chunk_cache.telemetry.meters import Meters
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics

EXIT_CODES = (0, 1, 2, 130)
SELDOM = {
    "": (
        *("max_variants", "max_variants_per_chunk", "max_path_tokens", "max_generation", "min_reuse_len", "ageing"),
        *("promote_uses", "refresh_uses", "statistics_layers", "shown_tokens", "kernel", "attention", "draft_on_gpu"),
    ),
    "tiers.": ("max_variants_per_chunk", "controller", "num_threads", "throttle"),
    "events.": ("replay_endpoint",),
    "selector.": ("timeout_s", "max_bytes", "num_threads"),
}
"""Keys with a table of their own: bounds, kernels and diagnostics, whose defaults an operator leaves alone."""
FILE = Path(__file__).with_suffix(".md")
HEAD = """\
# Reference

Everything with a name, made from the code by `python docs/reference.py`.
"""


def page() -> str:
    """The page as Markdown."""
    sections = {
        "Flags of the server": _table(("flag", "meaning"), _flags(_server())),
        "Keys of `--chunk-cache-config`": _table(("key", "default", "meaning"), _fields(Config, SELDOM[""])),
        "Keys of `tiers`": _table(("key", "default", "meaning"), _fields(TierConfig, SELDOM["tiers."])),
        "Keys of `events`": _table(("key", "default", "meaning"), _fields(EventConfig, SELDOM["events."])),
        "Keys of `--chunk-cache-target`": _table(("key", "default", "meaning"), _fields(Target)),
        "Keys whose defaults hardly anybody changes": _table(("key", "default", "meaning"), _seldom()),
        "Options of a request": _table(("option", "default", "meaning"), _fields(RequestOptions, ("turn_tokens",))),
        "Options of methods": _table(("option", "methods", "default", "meaning"), _method_options()),
        "What becomes of a chunk": _table(("status", "meaning"), _statuses()),
        "Reasons": _table(("reason", "meaning", "what to do"), _reasons()),
        "Routes of administration": _table(("route", "meaning"), _routes()),
        "Metrics": _table(("metric", "type", "labels", "meaning"), _metrics()),
    }
    parsers = {name: importlib.import_module(of.partition(":")[0])._parser() for name, (_, of, _) in COMMANDS.items()}
    sections["Exit codes of `chunk-cache`"] = _table(("command", *map(str, EXIT_CODES)), _exit_codes(parsers))
    for name, parser in parsers.items():
        title = f"Flags of `chunk-cache {name}`"
        sections[title] = _table(("flag", "meaning"), _flags(parser, "--help", "--chunk-cache"))
    return HEAD + "".join(f"\n## {title}\n\n" + "\n".join(table) + "\n" for title, table in sections.items())


def _exit_codes(parsers: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, parser in parsers.items():
        yield f"`{name}`", *(parser.exit_codes.get(code, "") for code in EXIT_CODES)


def metrics() -> list[Any]:
    """All collectors that the chunk cache has, known to nobody afterwards."""
    before = set(REGISTRY._collector_to_names)
    ChunkMetrics(enabled=True)
    TierMetrics(enabled=True)
    Meters(SELECTOR_METERS, enabled=True)
    GateMetrics(enabled=True, model="m")
    ours = [one for one in REGISTRY._collector_to_names if one not in before]
    for one in ours:
        REGISTRY.unregister(one)
    return ours


def _server() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return parser


def _flags(parser: argparse.ArgumentParser, *left_out: str) -> Iterator[Sequence[str]]:
    """Of a command; without those that begin with one of `left_out`."""
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")] or [str(action.metavar)]
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        if not names[0].startswith(left_out):
            meaning = parser._get_formatter()._expand_help(action).replace("(default: None)", "(default: none)")
            yield f"`{names[0]}{value}`", meaning


def _fields(owner: type, left_out: Sequence[str] = ()) -> Iterator[Sequence[str]]:
    meanings = _attribute_docs(owner)
    for one in fields(owner):
        if one.name in left_out:
            continue
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        is_list = default == () and not _is_mapping(get_type_hints(owner)[one.name])
        shown = "" if default is MISSING else "`[]`" if is_list else f"`{_shown(default)}`"
        yield f"`{one.name}`", shown, meanings.get(one.name, "")


def _seldom() -> Iterator[Sequence[str]]:
    owners = {"": Config, "tiers.": TierConfig, "events.": EventConfig, "selector.": SelectorConfig}
    for path, owner in owners.items():
        others = [one.name for one in fields(owner) if one.name not in SELDOM[path]]
        for name, *rest in _fields(owner, others):
            yield f"`{path}{name[1:]}", *rest


def _is_mapping(hint: Any) -> bool:
    """Whether a field is a tuple of (name, value), which stands for an object of JSON."""
    inner = get_args(hint)[0]
    return get_origin(inner) is tuple and get_args(inner)[0] is str


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value == () or isinstance(value, SelectorConfig):
        return "{}"
    return str(value)


def _attribute_docs(owner: type | Any) -> dict[str, str]:
    """Name -> the text that stands below its definition, in a class or a module."""
    tree: Any = ast.parse(inspect.getsource(owner))
    body = tree.body[0].body if isinstance(owner, type) else tree.body
    docs: dict[str, str] = {}
    for one, below in pairwise(body):
        target = getattr(one, "target", None) or next(iter(getattr(one, "targets", ())), None)
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text:
            docs[target.id] = _with_choices(" ".join(str(below.value.value).split()), owner)
    return docs


def _with_choices(text: str, owner: type | Any) -> str:
    """What "one of `NAMES`" means, in the place of the name."""
    module = inspect.getmodule(owner)

    def choices(found: re.Match[str]) -> str:
        value = getattr(module, found[2].rpartition(".")[2])
        return found[1] + ", ".join(f"`{one}`" for one in value)

    return re.sub(r"([Oo]ne of )`([a-z_.]*[A-Z_]+)`", choices, text)


def _method_options() -> Iterator[Sequence[str]]:
    known: dict[tuple[str, str], list[str]] = {}
    texts: dict[str, str] = {}
    for module in (options, *_modules_of_methods()):
        docs = _attribute_docs(module)
        texts |= {one.name: docs[name] for name, one in vars(module).items() if name in docs and hasattr(one, "check")}
    for method in METHODS.values():
        for option in method.options_schema:
            known.setdefault((option.name, _shown(option.default)), []).append(method.name)
    for (name, default), methods in sorted(known.items()):
        shown = "all" if len(methods) == len(METHODS) else ", ".join(f"`{method}`" for method in methods)
        yield f"`{name}`", shown, f"`{default}`", texts.get(name, "")


def _modules_of_methods() -> set[Any]:
    classes = {cls for method in METHODS.values() for cls in type(method).__mro__}
    return {inspect.getmodule(cls) for cls in classes if cls.__module__.startswith("chunk_cache.")}


def _statuses() -> Iterator[Sequence[str]]:
    docs = _attribute_docs(Status)
    for status in Status:
        yield f"`{status.value}`", docs[status.name]


def _reasons() -> Iterator[Sequence[str]]:
    for name, meaning in REASONS.items():
        yield f"`{name}`", meaning, ADVICE[name][1]


def _routes() -> Iterator[Sequence[str]]:
    for method, path, answer in ROUTES:
        yield f"`{method} {path}`", " ".join((inspect.getdoc(answer) or "").partition("\n\n")[0].split())


def _metrics() -> Iterator[Sequence[str]]:
    for one in sorted(metrics(), key=lambda one: str(one._name)):
        name = one._name + ("_total" if one._type == "counter" else "")
        yield f"`{name}`", one._type, ", ".join(f"`{label}`" for label in one._labelnames), one._documentation


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
