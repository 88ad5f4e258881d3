"""Filler: the passages that stand in front of a chunk when its KV is computed ahead of time.

It was written for this project, names no person, place or date, and no request reads it. Why a chunk is stored behind
something rather than alone, and what that is worth: `docs/variants.md`.
"""

from __future__ import annotations

FILLER = (
    "Bread\nBread is made from flour, water, salt and something that makes the dough rise. The dough is kneaded "
    "until it is smooth, then it rests in a warm place while bubbles form inside it. A baker shapes the loaf, cuts "
    "its top so that it can open, and bakes it in a hot oven. The crust turns brown because sugars and proteins "
    "react with each other, while the inside stays soft.\n\nRiver delta\nA delta forms where a river reaches still "
    "water and slows down. Slow water can no longer carry its sand and mud, which sink and build up in layers. The "
    "river then splits into channels that move from season to season. Reeds grow on the new ground, and birds that "
    "feed in shallow water come to live there. Farmers value the soil because it is deep and rich.\n\nPublic "
    "library\nA public library lends books to anyone who lives nearby. Readers look up a title in the catalogue, "
    "find the shelf, and take the book to the desk. Many libraries also lend films, records and tools, and offer "
    "quiet rooms in which people can work. The staff repair old volumes, choose new ones, and help visitors to "
    "find what they are looking for.\n\n"
)
