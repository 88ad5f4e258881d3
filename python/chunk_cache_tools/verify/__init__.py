"""`chunk-cache verify`: which method and ratio can be trusted with a model and a user's prompts.

workload        prompts: from a file of a user, or generated; each a `token_prompt`
session         asks a server, and makes sure that what comes back is what was asked for; replies go to a `reply_log`
fit             does the implementation fit the model?
measurement     replies as numbers
recommendation  numbers as a verdict
results, plot   what a user reads
"""
