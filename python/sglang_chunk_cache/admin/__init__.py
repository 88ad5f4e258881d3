"""Administration of a running server: what is stored, pins, eviction, flush and warming.

`body` checks what a client sends, `client` (in the process that answers HTTP) asks every scheduler process through
`messages`, `scheduler_side` answers there and keeps the `pins`, `warming` computes chunks ahead of time, `routes` is
HTTP, `offline` is the same for an Engine. docs/admin.md describes the routes.
"""
