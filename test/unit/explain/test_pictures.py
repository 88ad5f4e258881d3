"""The two kinds of pictures: what stands in them, and that nothing from outside breaks them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.image import imread

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache_tools.explain import explain_page as page
from chunk_cache_tools.explain import picture
from chunk_cache_tools.explain.palette import colour_of
from chunk_cache_tools.explain.shown_prompt import PromptTokens, visible
from chunk_cache_tools.explain.states import explain


def everything(tokens):
    return 0, len(tokens.texts)


class Rows(HTMLParser):
    """The rows of a page: (label, [(class, tooltip, text)])."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[tuple[list[str], list[list[str]]]] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        given = dict(attrs)
        if given.get("class") == "row":
            self.rows.append(([], []))
        self._inside = tag
        if tag == "b" and "title" in given:
            self.rows[-1][1].append([given["class"], given["title"], ""])

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "i":
            self.rows[-1][0].append(data)
        elif self._inside == "b" and self.rows:
            self.rows[-1][1][-1][2] += data


def test_a_page_shows_each_token_of_each_method_on_the_colour_of_its_state(tokens, explanations):
    text = page.render(tokens, explanations, everything(tokens), "T")
    parsed = Rows(text)
    colours = dict(re.findall(r"\.(s\d+) \{ background: (#\w+); \}", text))
    for one in explanations:
        cells = [cell for label, cells in parsed.rows if label == [one.label] for cell in cells]
        assert [cell[2] for cell in cells] == [visible(text) for text in tokens.texts]
        assert [colours[cell[0]] for cell in cells] == [colour_of(state, 4) for state in one.states]
    start = tokens.spans[2][0]
    titles = {cell[1] for label, cells in parsed.rows if label == ["cacheblend"] for cell in cells}
    assert {f"{start}: reused, recomputed", f"{start + 2}: dropped at layer 2", "0: exact prefix"} <= titles


def test_what_comes_from_outside_is_text_in_a_page(tokens, explanations):
    hostile = PromptTokens(("<script>alert(1)</script>", '"><img src=x>', *tokens.texts[2:]), tokens.spans)
    text = page.render(hostile, explanations, everything(tokens), "<b>T</b>")
    parsed = Rows(text)
    assert not parsed.tags & {"script", "img", "link", "iframe"}
    assert parsed.rows[0][1][0][2] == "<script>alert(1)</script>"
    assert "&lt;b&gt;T&lt;/b&gt;" in text
    assert "in &lt;i&gt;Japan&lt;/i&gt; $x$" in text
    assert "\u202e" not in text
    assert not re.search(r"https?://|@import|url\(", text)


def test_a_page_of_a_range(tokens, explanations):
    parsed = Rows(page.render(tokens, explanations, (10, 20), "T"))
    assert sum(len(cells) for _, cells in parsed.rows) == 10 * len(explanations)


def pixels(path):
    image = np.round(imread(path)[..., :3] * 255).astype(int)
    return {f"#{r:02X}{g:02X}{b:02X}" for r, g, b in np.unique(image.reshape(-1, 3), axis=0)}


def test_a_png_has_the_colours_of_all_states(tmp_path, tokens, explanations):
    notes = picture.draw(tmp_path / "out.png", tokens, explanations, everything(tokens))
    assert {colour_of(state, 4) for one in explanations for state in one.states} <= pixels(tmp_path / "out.png")
    assert notes in ([], ["2 different characters are missing in the fonts of this machine; .html shows them"])


def test_dollar_signs_are_no_formula(tmp_path, tokens, explanations):
    odd = PromptTokens(("$a", "\\frac{$", "$\\bad$", *tokens.texts[3:]), tokens.spans)
    picture.draw(tmp_path / "out.svg", odd, explanations, everything(tokens))
    assert "</svg>" in (tmp_path / "out.svg").read_text(encoding="utf-8")


def long_prompt(make_reply, num_tokens):
    tokens = PromptTokens(tuple("word" for _ in range(num_tokens)), ((10, num_tokens - 10),))
    return tokens, [explain("epic", "", make_reply(tokens.spans, num_tokens), "here")]


def test_a_long_prompt_is_drawn_without_text_and_says_so(tmp_path, make_reply):
    tokens, explanations = long_prompt(make_reply, 2000)
    (note,) = picture.draw(tmp_path / "out.png", tokens, explanations, (0, 2000))
    assert "more than 600 tokens are drawn without their text" in note
    assert "--tokens START:END, or write .html" in note
    assert picture.draw(tmp_path / "zoomed.png", tokens, explanations, (0, 300)) == []


def test_a_prompt_that_no_picture_can_hold_is_refused(tmp_path, make_reply):
    tokens, explanations = long_prompt(make_reply, 300_000)
    with pytest.raises(ChunkCacheRequestError, match=r"^--out .*out\.png: 300000 tokens of 1 methods are too many"):
        picture.draw(tmp_path / "out.png", tokens, explanations, (0, 300_000))
    assert not (tmp_path / "out.png").exists()
