"""Screenshot: docs/images/page.png, the page of a server that answers the questions of the demonstration.

    make chromium && python docs/screenshot.py [--minutes 3]

The server has the demonstration's random model, a pool too small for all passages with memory of the host below it, and
verifies replies while it is idle. Its traffic is spread over minutes, so that there is something to draw.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "test"))

from benchmark.common.machine import ROOT
from benchmark.common.models import make_llama
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.demo.corpus import train_on_corpus
from benchmark.demo.demo import OUT_DIR, SEED, SHAPE, prompts_of
from benchmark.quality.evaluate import server_flags

from browser import MISSING, find_chromium, look, open_browser, save

FILE = ROOT / "docs" / "images" / "page.png"
CONFIG = {"verify_share": 0.2, "tiers": {"host_bytes": "1GB"}}
FLAGS = ("--max-total-tokens", "8192", "--chunk-cache-config", json.dumps(CONFIG))
NUM_QUESTIONS = 120
# The newest request with a reason to show.
CHOOSE = """const rows = [...document.querySelectorAll("#requests tr")];
(rows.find(row => /(\\d+) of (?!\\1\\b)/.test(row.innerText)) || rows[0]).click()"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="of traffic (default: 3)")
    args = parser.parse_args()
    if find_chromium() is None:
        parser.error(MISSING)
    leave_on_sigterm()
    tokenizer, passages = train_on_corpus(SHAPE.vocab)
    model = make_llama(OUT_DIR / "model", SHAPE, tokenizer=tokenizer, seed=SEED)
    prompts = [prompt.text for _, prompt in prompts_of(passages, NUM_QUESTIONS)]
    draw = random.Random(SEED)
    with Server(model, *server_flags(""), *FLAGS, env=offline_env()) as server, open_browser() as browser:
        end = time.monotonic() + 60.0 * args.minutes
        for number, prompt in enumerate(prompts):
            server.generate(prompt, max_new_tokens=4, rid=f"question-{number}")
            left = end - time.monotonic()
            time.sleep(max(0.0, 2.0 * left / (NUM_QUESTIONS - number) * draw.random()))
        browser.get(f"{server.url}/chunk_cache")
        browser.implicitly_wait(10)
        browser.find_element("css selector", "#requests tr")
        browser.execute_script(CHOOSE)
        look(browser)
        save(browser, FILE)
    print(f"{FILE.relative_to(ROOT)}: {FILE.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
