"""The page /chunk_cache in Debian's Chromium, on a real server with an API key, a tier and a gate."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import MISSING, find_chromium, look, messages, open_browser
from chunk_cache.token_kinds import COLOURS, Kind
from chunk_cache.types import REASONS
from server.admin_server import KEY, AdminServer
from server.conftest import FLAGS, STRICT
from server.contract import marked, statuses
from sglang_chunk_cache.admin.journal import KINDS

pytestmark = [
    pytest.mark.all,
    pytest.mark.server,
    pytest.mark.skipif(find_chromium() is None, reason=MISSING),
]
CONFIG = {"verify_share": 0.5, "tiers": {"host_bytes": "50MB", "controller": False}}
FAR_TOO_WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[AdminServer]:
    flags = ("--chunk-cache", "--chunk-cache-config", json.dumps(CONFIG), "--api-key", KEY)
    with AdminServer(model_dir, *FLAGS, *flags, env=STRICT) as one:
        yield one
        assert one.alive()


@pytest.fixture(scope="module")
def browser(server: AdminServer) -> Iterator[Any]:
    with open_browser() as driver:
        driver.implicitly_wait(5)
        yield driver


@pytest.fixture
def page(server: AdminServer, browser: Any) -> Any:
    """The page of a server that was flushed, and the key given."""
    server.ask("flush", timeout_s=10)
    browser.get(f"{server.url}/chunk_cache")
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()
    give_key(browser, KEY)
    wait_for(lambda: browser.find_element("id", "all").is_displayed())
    messages(browser)
    return browser


def give_key(browser: Any, key: str) -> None:
    wait_for(lambda: browser.find_element("id", "ask").is_displayed())
    browser.find_element("id", "key").send_keys(key)
    browser.find_element("css selector", "#ask button").click()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.1)


def texts_of(page: Any, selector: str) -> list[str]:
    return [one.text for one in page.find_elements("css selector", selector)]


def update(page: Any) -> None:
    page.execute_async_script("update().then(arguments[0])")


def journal(server: AdminServer) -> Any:
    return server.get("/chunk_cache/requests").json()


def test_an_empty_server_is_shown(server: AdminServer, page: Any) -> None:
    assert journal(server)["requests"] == []
    tiles = texts_of(page, "#tiles dd")
    assert [tile.split("\n")[0] for tile in tiles] == ["-", "-", "-", "-", "0", "0"]
    assert texts_of(page, "#tiers td:first-child") == ["pool", "host"]
    assert messages(page) == []


def test_nothing_is_shown_without_the_key(server: AdminServer, browser: Any) -> None:
    browser.get(f"{server.url}/chunk_cache")
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()
    give_key(browser, "no")
    wait_for(lambda: "does not take this key" in browser.find_element("id", "problem").text)
    assert not browser.find_element("id", "all").is_displayed()
    assert browser.find_element("id", "tiles").get_attribute("innerHTML") == ""


def test_what_the_server_has_done_is_shown(server: AdminServer, page: Any, passages: Any) -> None:
    prompt = marked(passages.several(3, 40))
    server.generate(prompt.text, max_new_tokens=1)
    server.generate(marked(list(reversed(prompt.chunks))).text, max_new_tokens=1)
    update(page)
    told = journal(server)
    reply, totals = told["requests"][0], told["totals"]
    assert reply["reused_tokens"] > 0
    row, *others = texts_of(page, "#requests tr")
    assert len(others) == len(told["requests"]) - 1
    assert row.startswith(page.execute_script("return clock(arguments[0])", reply["at"]))
    tiles = dict(zip(texts_of(page, "#tiles dt"), texts_of(page, "#tiles dd"), strict=True))
    share = (totals["reused"] + totals["recomputed"]) / sum(totals[kind] for kind in KINDS)
    assert float(tiles["From chunks"].split()[0]) == pytest.approx(100 * share, abs=0.51)
    assert tiles["Requests"].startswith(f"{totals['requests']:,}\n")
    assert {chunk["key"][:12] for chunk in reply["chunks"]} <= set(texts_of(page, "#chunks td:first-child"))
    assert len(page.find_elements("css selector", "#shares g")) == len(told["minutes"])
    assert messages(page) == []


def test_a_chosen_request_shows_its_tokens_and_its_reasons(server: AdminServer, page: Any, passages: Any) -> None:
    known, new = passages(40), passages(40)
    server.generate(marked([known]).text, max_new_tokens=1)
    server.generate(marked([new, known]).text, max_new_tokens=1)
    update(page)
    page.find_element("css selector", "#requests tr").click()
    reply = journal(server)["requests"][0]
    assert statuses(reply) == ["miss", "hit"]
    first, reason, second = texts_of(page, "#one tbody tr")
    assert (first.split()[5], second.split()[5]) == ("miss", "hit")
    assert reason.startswith(f"not_stored: {REASONS['not_stored']} What to do: ")
    drawn = [one.get_attribute("fill") for one in page.find_elements("css selector", "#one rect")]
    held = [kind for column in reply["picture"] for kind, count in zip(KINDS, column, strict=True) if count]
    assert drawn == [COLOURS[Kind(kind)] for kind in held]
    server.generate(marked([known, new]).text, max_new_tokens=1)
    update(page)
    assert [row.get_attribute("class") for row in page.find_elements("css selector", "#requests tr")][:2] == [
        "",
        "chosen",
    ], "it stays chosen"
    page.find_elements("css selector", "#requests tr")[1].send_keys("\n")
    assert not page.find_element("id", "one").is_displayed()
    assert messages(page) == []


def test_what_a_client_writes_is_text_on_the_page(server: AdminServer, page: Any, passages: Any) -> None:
    name = "<img src=x onerror=\"document.title='taken'\">\"]'"
    named = {"chunk_ids": [name, None]}
    server.generate(marked(passages.several(2)).text, max_new_tokens=1, rid=name, extra_key="<b>", chunk_cache=named)
    update(page)
    page.find_element("css selector", "#requests tr").click()
    update(page)
    assert name in page.find_element("id", "one").text
    assert name in texts_of(page, "#chunks td:first-child")
    assert page.find_elements("css selector", "#requests img, #one img, #chunks img") == []
    assert page.title == "Chunk cache"
    assert messages(page) == []


def test_more_requests_than_are_kept_fit_on_any_screen(server: AdminServer, page: Any, passages: Any) -> None:
    chunks = passages.several(8)
    for number in range(60):
        server.generate(marked(chunks[number % 6 :][:3], head=f"{number} ").text, max_new_tokens=1)
    told = journal(server)
    for width, is_dark in ((1240, False), (390, True)):
        look(page, width, is_dark=is_dark)
        update(page)
        page.find_elements("css selector", "#requests tr")[1].click()
        assert len(page.find_elements("css selector", "#requests tr")) == len(told["requests"]) == 50
        assert page.execute_script(FAR_TOO_WIDE) == 0
        paper = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) < 200) is is_dark
    look(page)
    assert messages(page) == []


def test_it_asks_nobody_else(server: AdminServer, page: Any) -> None:
    asked = page.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert asked
    assert all(name.startswith(f"{server.url}/chunk_cache/") for name in asked)


def test_a_server_that_does_not_answer_is_named(server: AdminServer, page: Any) -> None:
    page.execute_cdp_cmd("Network.enable", {})
    page.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    update(page)
    assert page.find_element("id", "problem").text.startswith("The server does not answer: ")
    assert page.find_element("id", "all").is_displayed(), "what was known stays"
