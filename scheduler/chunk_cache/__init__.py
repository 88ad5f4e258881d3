"""The deciding half of the chunk cache: which stored chunks a prompt reuses, and which of their tokens it recomputes.

Standard library and numpy only, and msgspec for messages: it never imports torch or sglang, reads no wall clock and
iterates over no set, so that every rank that makes the same calls makes the same plan.

Not to be confused with SGLang's chunked prefill, nor with the class `ChunkCache` of older SGLang ("no radix cache").
"""
