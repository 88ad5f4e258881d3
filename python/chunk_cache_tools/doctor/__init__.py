"""Doctor: what is wrong with this machine, or with a running server, and what to do about it.

`machine_checks` and `tier_checks` examine this machine, `server_checks` a running server, `comparison` the chunks of a
request and of earlier ones; each gives `checks.Check` values. docs/doctor.md is for users.
"""
