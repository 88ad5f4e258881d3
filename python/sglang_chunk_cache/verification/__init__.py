"""The gate in a scheduler process: it verifies fused replies while nothing else is to do, and keeps what it finds.

`chunk_cache.gate` decides; `exact_pass.py` computes.
"""
