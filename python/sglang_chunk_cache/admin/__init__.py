"""Administration of a running server: what is stored, pins, eviction, flush and warming.

`administration` works in the process that answers HTTP and asks every scheduler process, where `scheduler_side`
answers. docs/admin.md describes the routes.
"""
