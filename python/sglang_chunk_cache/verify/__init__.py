"""`python -m sglang_chunk_cache.verify`: a model compared with itself, before anyone trusts it.

workload   prompts: generated, or from a JSONL file
measure    what is asked of the engine, and the numbers that come of it
verdict    numbers against thresholds, and the table
"""
