"""Selection during the forward: scorers (one file per method), the choice by score, and the executor that runs it.

A method of the stages LAYER or QUESTION (`chunk_cache.methods`) has a file of its name here, with `_` for `-`, that
defines `score` (see `scorer.Scorer`); nothing else here knows the method.
"""
