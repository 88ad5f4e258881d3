"""Doctor: what is wrong with this machine, or with a running server, and what to do about it.

`machine_checks` and `tier_checks` look at this machine, `server_checks` at a running one, `comparison` at the chunks of
two prompts; each gives `checks.Check` values. docs/doctor.md is for users.
"""
