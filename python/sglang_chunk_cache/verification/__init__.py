"""The gate in a scheduler process: it verifies fused replies while there is nothing else to do, and keeps the results.

`chunk_cache.gate` decides; `exact_pass.py` computes.
"""
