"""What a client sends and gets back: marks, options, bad input, replies, on every route.

`chunk_cache/prompt/marked_body` reads a body (what SGLang would drop); `prepare` makes token ids and one string of
options of it.
"""
