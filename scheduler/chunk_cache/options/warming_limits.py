"""Limits and defaults of one request of administration."""

MAX_ITEMS = 4096
"""Chunks in one request."""

MAX_BATCH, DEFAULT_BATCH = 64, 8
"""Chunks that one request of warming computes at a time."""

MAX_NEIGHBOURS = 32
"""Neighbours of one chunk; each takes room in the context and in the KV pool while the chunk is computed behind it."""

DEFAULT_RETRIEVER = "tfidf"
"""What finds the neighbours of a chunk."""
