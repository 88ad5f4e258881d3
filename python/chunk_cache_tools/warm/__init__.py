"""The command `chunk-cache warm`: has a running server compute the chunks of a corpus ahead of time.

`corpus` reads the file, `corpus_neighbours` finds similar chunks in it, `estimate` sums up a dry run, `warm_state`
remembers how far the work has come, `warm_server` talks to the server. docs/admin.md describes the command.
"""
