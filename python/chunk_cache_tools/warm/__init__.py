"""The command `chunk-cache warm`: has a running server compute the chunks of a corpus ahead of time.

`corpus` reads the file, `neighbours` finds similar chunks in it, `estimate` sums up a dry run, `state` remembers how
far the work has come, `server` talks to the server. Nothing here imports SGLang or, but for a model that finds
neighbours, torch. docs/admin.md describes the command.
"""
