"""The documentation as it is built and as it is run: strictly, from the code, and with commands that exist."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from browser import MISSING, find_chromium, messages, open_browser
from chunk_cache_tools.command import COMMANDS
from doc_pages import blocks

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
TEXTS = {
    *PAGES,
    *(path for path in (ROOT / "docs").rglob("*.*") if path.is_file() and path.suffix not in (".png", ".svg", ".pyc")),
    ROOT / "docs" / "fleet" / "Dockerfile",
}
OTHERS = {"curl", "smg", "valkey-server", "uvicorn", "pip", "docker", "kubectl", "mooncake_master", "git", "cd", "."}
"""Commands that are not ours."""


@pytest.fixture(scope="module")
def site() -> Path:
    built = subprocess.run([sys.executable, "docs/site.py"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return ROOT / "build" / "site"


def test_the_site_builds_strictly_and_asks_nothing_of_the_internet(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*rel=\"stylesheet\"[^>]*//")
    assert not [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason=MISSING)
def test_the_site_is_read_and_searched_from_disk(site: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with open_browser() as browser:
        browser.get((site / "docs" / "fleet.html").as_uri())
        widths = "[...document.querySelectorAll('pre > code')].map((code) => code.scrollWidth - code.clientWidth)"
        assert max(browser.execute_script(f"return {widths}")) <= 0
        browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys("partition_share")
        result = (By.CSS_SELECTOR, ".md-search-result__item a[href*='variants.html']")
        WebDriverWait(browser, 60).until(lambda _: browser.find_elements(*result))
        assert not messages(browser)


def test_the_reference_is_that_of_the_code() -> None:
    program = "import runpy; print(runpy.run_path('docs/reference.py')['page'](), end='')"
    made = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), "python docs/reference.py"


def test_the_project_is_installed_from_a_file_alone() -> None:
    """It is on no index, where a stranger could register its name."""
    code = [path for folder in ("python", "scheduler", "sgl-kernel-ext") for path in (ROOT / folder).rglob("*.py")]
    installs = [
        (path.name, what)
        for path in (*TEXTS, *code)
        for what in re.findall(r"pip install([^`\n]*)", path.read_text(encoding="utf-8"))
    ]
    assert len(installs) > 15
    ours = re.compile(r"sglang[-_.]chunk[-_.]cache|DISTRIBUTION")
    assert not [one for one in installs if ours.search(one[1]) and ".whl" not in one[1]]


def test_one_name_for_this_machine() -> None:
    assert not [path.name for path in TEXTS if "localhost" in path.read_text(encoding="utf-8")], "write 127.0.0.1"


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command that the documents show, without comments and variables."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        indented = re.findall(r"^    ((?:python|make|sglang|chunk-cache) .*)$", text, re.MULTILINE)
        inline = re.findall(r"`(chunk-cache [^`]*)`", text)
        for line in [*("\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()), *indented, *inline]:
            if re.match(r"[a-z.]", line) and not line.startswith(('"', "'")):
                try:
                    words = shlex.split(line, comments=True)
                except ValueError:  # a body over several lines
                    words = line.split()
                for is_end, one in itertools.groupby(words, "&&".__eq__):
                    command = [*itertools.dropwhile(re.compile(r"[A-Z_]+=").match, one)]
                    if command and not is_end:
                        yield page.name, command


def unknown(flags: set[str], folder: Path) -> set[str]:
    """Those of the flags that no program of the folder names."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return {flag for flag in flags if f'"{flag}"' not in source}


@pytest.mark.parametrize(("page", "words"), [*commands()], ids=lambda value: value if isinstance(value, str) else None)
def test_a_command_exists_with_its_flags(page: str, words: list[str]) -> None:
    program = Path(words[0]).name or words[0]
    flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word and word[0] != "-"} <= targets
    elif program in ("python", "python3"):
        if words[1] == "-m":
            assert find_spec(words[2]) is not None
            assert not words[2].startswith("sglang_chunk_cache"), "write chunk-cache"
        elif words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file()
            assert not unknown(flags, ROOT / Path(words[1]).parts[0])
    elif program == "chunk-cache":
        _, of, _ = COMMANDS[words[1]]
        known = importlib.import_module(of.partition(":")[0])._parser()._option_string_actions
        of_sglang = words[words.index("--") :] if "--" in words else []
        assert flags - set(of_sglang) <= known.keys()
    else:
        assert program in OTHERS or find_spec(program) or (Path(sys.executable).parent / program).exists()
