"""Doctor: what is wrong with this machine, or with a running server, and what to do about it.

`machine` and `tiers` look at this machine, `server` at a running one, `compare` at the chunks of two prompts; each
gives `checks.Check` values, and `advice` says what to do about a reason. docs/doctor.md is for users.
"""
