"""Kind: the ways a token's KV came about, and the colour and the words of each in every picture and on the page.

Colours are those of Okabe and Ito (2008), told apart with any kind of colour vision.
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """The ways a token's KV came about, in the order of a legend."""

    PREFIX = "prefix"
    REUSED = "reused"
    RECOMPUTED = "recomputed"
    DROPPED = "dropped"
    COMPUTED = "computed"


COLOURS = {
    Kind.PREFIX: "#009E73",
    Kind.REUSED: "#56B4E9",
    Kind.RECOMPUTED: "#D55E00",
    Kind.COMPUTED: "#CC79A7",
}
WORDS = {
    Kind.PREFIX: "exact prefix",
    Kind.REUSED: "reused",
    Kind.RECOMPUTED: "reused, recomputed",
    Kind.COMPUTED: "computed",
}
