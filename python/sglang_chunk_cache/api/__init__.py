"""What a client sends and gets back: marks, options, bad input, replies, on every route.

A body is read by `bodies` (what SGLang would drop), then `prepare` makes token ids and one string of options of it.
"""
