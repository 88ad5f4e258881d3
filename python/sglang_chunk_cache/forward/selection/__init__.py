"""Selection during the forward: scorers (one file per method), the choice by score, and the executor that runs it.

    base        what a scorer sees of one request at one layer
    cacheblend, a3, fusionrag, infoflow, question_drift
                scorers: `score(rows) -> [num_rows]` or `[kv_len]`, found by the name of their method
    choose      the best rows, windows and masks, without a host synchronisation
    focus       Cache-Craft's focused chunks
    progress    one request on its way through the layers
    executor    one forward of many requests
    report      what the reply tells about it

A method of the stages LAYER or QUESTION (`chunk_cache.methods`) has a file of its name here; nothing else knows it.
"""
