"""Site: the documentation as a web site, in build/site, from the same files that are read in the repository.

    python docs/site.py [--serve]

The files are copied to where their links lead, so that a link which leads nowhere ends the build. Nothing comes from
the internet, and nothing is asked of it when the pages are read.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"
CONFIG = ROOT / "docs" / "mkdocs.yml"
FOLDERS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "benchmark", "test", "python")
ENDINGS = (".md", ".png", ".svg", ".json", ".csv", ".yml", ".txt", ".py", ".css", ".js", "LICENSE", "Dockerfile")


def gather() -> None:
    """Copies what the pages are made of, and what they link to."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if name.endswith(ENDINGS) and (ROOT / name).is_file():
            (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, SOURCE / name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the documentation as a web site, in build/site.")
    parser.add_argument("--serve", action="store_true", help="show it on http://127.0.0.1:8000 instead")
    command = "serve" if parser.parse_args().serve else "build"
    gather()
    return subprocess.run([sys.executable, "-m", "mkdocs", command, "--strict", "--config-file", CONFIG]).returncode


if __name__ == "__main__":
    sys.exit(main())
