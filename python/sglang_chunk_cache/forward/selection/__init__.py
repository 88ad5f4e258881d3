"""Selection during the forward: scorers, the choice by score, and the executor that runs it.

A method of the stages LAYER or QUESTION (`chunk_cache.methods`) has a file of its name here, with `_` for `-`, that
defines `score` (see `scorer.Scorer`). Methods that score as `scorer.scorer_of` does need none. Nothing else here knows
the method.
"""
