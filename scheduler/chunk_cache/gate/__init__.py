"""The gate: what a server knows of its own answers, and what it does about it. All of it decides, none of it computes.

Nothing here looks at a clock or draws lots: what happens follows from requests and measures in their order, so all
tensor-parallel ranks agree.
"""
