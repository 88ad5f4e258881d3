"""The documents: links lead somewhere, what the code knows is told, the README has figures of the results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import prometheus_client
import pytest

from chunk_cache.gate.target import KEYS as TARGET_KEYS
from chunk_cache.gate.verification_ledger import MEASURES
from chunk_cache.gate.verification_queue import DROPPED
from chunk_cache.methods import METHODS
from chunk_cache.options.config import STATISTICS_LAYERS, Config
from chunk_cache.options.event_config import EventConfig
from chunk_cache.options.request_options import KEYS, MODES
from chunk_cache.options.selector_config import SelectorConfig
from chunk_cache.options.tier_config import TierConfig
from chunk_cache.prompt.chunk_cache_fields import ROUTE_KEYS
from chunk_cache.types import REASONS, Status
from chunk_cache_tools.doctor.comparison import Cause
from chunk_cache_tools.doctor.doctor_command import main as doctor
from chunk_cache_tools.explain.explain_command import main as explain
from chunk_cache_tools.train_selector.train_selector_command import main as train
from chunk_cache_tools.verify.verify_command import main as verify
from chunk_cache_tools.warm.warm_command import main as warm
from sglang_chunk_cache.kv.stored_variant import TIER_REASONS
from sglang_chunk_cache.selector.selector_client import SELECTOR_METERS
from sglang_chunk_cache.start import model_refusals, refusals
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics
from sglang_chunk_cache.telemetry.gate_metrics import GateMetrics
from sglang_chunk_cache.telemetry.meters import Meters
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from tiny_models import KINDS, architecture_of

ROOT = Path(__file__).parents[3]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/**/*.md")})
DOCS = "\n".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md"))


def told(words: Iterable[str]) -> list[str]:
    """Those of them that no document names."""
    return [word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", DOCS)]


def anchors(page: Path) -> set[str]:
    """Of the headings, as they are shown on the web."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = page if not name else (page.parent / name).resolve()
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_keys_reasons_and_options_are_told() -> None:
    options = {option.name for method in METHODS.values() for option in method.options_schema}
    configs = (Config, TierConfig, SelectorConfig, EventConfig)
    keys = (*KEYS, *ROUTE_KEYS, *(key for config in configs for key in config.__dataclass_fields__))
    choices = (*MODES, *STATISTICS_LAYERS, *METHODS, *Status)
    tier_reasons = (f"tier_{reason}" for reason in TIER_REASONS if reason != "full")  # of writes alone
    gate = (*TARGET_KEYS, *DROPPED, *MEASURES)
    assert not told((*keys, *choices, *options, *REASONS, *tier_reasons, *gate, *Cause))


def test_what_is_refused_and_served_is_told() -> None:
    fields = (*(rule.name for rule in refusals.FLAG_RULES), *refusals.CHOICE_RULES)
    flags = (f"--{field.replace('_', '-')}" for field in fields)
    variables = (rule.name for rule in refusals.VARIABLE_RULES)
    values = (value for served in refusals.CHOICE_RULES.values() for value in served)
    classes = (architecture_of(kind) for kind in KINDS if kind != "gemma2")  # refused on a CPU, where tests run
    assert not told((*flags, *variables, *values, *classes, *model_refusals.ROPE_TYPES))


def test_metrics_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, lambda name, *_, **__: names.append(name))
    ChunkMetrics(enabled=True)
    TierMetrics(enabled=True)
    Meters(SELECTOR_METERS, enabled=True)
    GateMetrics(enabled=True, model="")
    assert len(names) > 15
    assert not [name for name in names if name.removeprefix("sglang:chunk_cache_tier") not in DOCS]


@pytest.mark.parametrize("command", [doctor, explain, warm, verify, train])
def test_flags_of_commands_are_told(command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(["--help"])
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", capsys.readouterr().out))
    assert not told(flags - {"--help", "--prime"})


def test_inputs_that_failed_have_their_tests() -> None:
    page = (ROOT / "benchmark" / "results" / "exactness" / "inputs.md").read_text(encoding="utf-8")
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(tests) == page.count("::") >= 15
    assert not [
        test for file, test in tests if f"def {test}(" not in (ROOT / "test" / file).read_text(encoding="utf-8")
    ]


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    rows = re.findall(r"^\| `.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    results = (ROOT / "benchmark" / "results" / "serving" / "long.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) >= 3
    assert set(rows) <= set(results)
