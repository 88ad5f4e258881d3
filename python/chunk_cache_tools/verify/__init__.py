"""`chunk-cache verify`: which method and ratio can be trusted with a model and a user's prompts.

workload        reads a user's prompts, or generates some; each is a `token_prompt`
session         asks a server, and checks that each reply was computed as asked for; a `reply_log` keeps the replies
fit             checks that the implementation fits the model
measurement     turns replies into numbers
recommendation  turns numbers into a verdict
results, plot   write what a user reads
"""
