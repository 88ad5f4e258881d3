"""Selection during the forward: scorers (one file per method), the choice by score, and the executor that runs it.

A method of the stages LAYER or QUESTION (`chunk_cache.methods`) has a file of its name here, `-` written as `_`, with
`score(rows) -> [num_rows]` or `[kv_len]`; nothing else knows it.
"""
