"""Vocabulary: the words of the synthetic notes, in the order of their token ids.

`WORDS` is the whole vocabulary; `encode` and `decode` do what the exported tokenizer does, one word per token.
Every text is words joined by one space, so the ids of a text are the ids of its parts, joined.
"""

from __future__ import annotations

from collections.abc import Iterable

PAD, UNKNOWN, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
SYSTEM = "answer from notes"

# Words of one kind, separated by spaces or line breaks.
_NAMES = """
ada amy ann art bea ben bob cal cam cat dan dee don dot eda eli eva fay fox gil gus guy hal ian ida ike ira
ivy jan jay jim joe jon kay ken kim kit lea lee len leo liz lou mae max may meg mia moe nan ned nia noa ora
pam pat peg rae ray rex rob ron roy sal sam sid
"""
_THINGS = """
axe bag bed bell boat book bowl box cap cart chair clock coin comb cup desk drum flute fork glass hat jar key
lamp
"""
_PLACES = """
accra bern cairo delhi dubai essen genoa hanoi kyiv lagos lima lyon milan minsk oslo paris perth porto quito
riga rome seoul sofia tokyo
"""
_COLOURS = """
amber beige black blue brown coral cream green grey lilac olive orange pink purple red white
"""
_ROLES = """
baker clerk cook guard guide judge miner nurse pilot poet sailor tailor
"""
_DIGITS = """
0 1 2 3 4 5 6 7 8 9
"""
_FILLERS = """
also anyway besides hence however indeed later maybe meanwhile perhaps quite rather so still thus yet
"""
NAMES, THINGS, PLACES, COLOURS, ROLES, DIGITS, FILLERS = (
    tuple(words.split()) for words in (_NAMES, _THINGS, _PLACES, _COLOURS, _ROLES, _DIGITS, _FILLERS)
)

# Words with a grammatical role: see `notes.py` for the sentences, `questions.py` for the questions.
GRAMMAR = (".", "owner", "alias", "visitor", "phone", "wearer", "ask", "garb")

WORDS = (
    PAD,
    UNKNOWN,
    BOS,
    EOS,
    *SYSTEM.split(),
    *GRAMMAR,
    *NAMES,
    *THINGS,
    *PLACES,
    *COLOURS,
    *ROLES,
    *DIGITS,
    *FILLERS,
)
ID_OF = {word: index for index, word in enumerate(WORDS)}
assert len(ID_OF) == len(WORDS), "a word is listed twice"


def encode(text: str) -> list[int]:
    """Token ids of words joined by spaces, without the beginning-of-sequence token. An unknown word raises KeyError."""
    return [ID_OF[word] for word in text.split()]


def decode(ids: Iterable[int]) -> str:
    """The words of token ids joined by one space."""
    return " ".join(WORDS[index] for index in ids)
