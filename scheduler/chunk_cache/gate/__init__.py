"""The gate: what a server knows of its own answers, and what it does about it. All of it decides, none of it computes.

    selection.py    which fused requests are verified, and what became of each
    ledger.py       what was found, as histograms
    target.py       what the operator wants
    controller.py   how methods and ratios move towards it

Nothing here looks at a clock or draws lots: what happens follows from requests and measures in their order, so all
tensor-parallel ranks agree.
"""
