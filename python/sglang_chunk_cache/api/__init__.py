"""What a client sends and gets back: marks, options, bad input, replies, on every route.

`bodies` reads what SGLang would drop (`asked`: the `chunk_cache` object), `marks` splits marked text, `tokens`
tokenizes its pieces, `prepare` turns a request into token ids and one JSON string of options, `served` refuses what
this server cannot do, `replies` sums the scheduler's answers up, `exchange` holds all of it for one HTTP request.
"""
