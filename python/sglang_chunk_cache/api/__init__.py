"""What a client sends and gets back: marks, options, bad input, replies, on every route.

`chunk_cache/prompt/marked_body` reads from a body what SGLang would drop; `prepare` turns the request into token ids
and one string of options.
"""
