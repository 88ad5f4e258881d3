"""Where chunks are kept below the KV pool. Importing this package loads nothing.

    base          the contract of a medium (`Medium`), what it moves, why it fails
    fingerprint   what must agree for stored KV to be usable
    record        the bytes of an entry's description, shared by the media that leave the process
    host          memory of this process
    disk          one file per variant in a folder, shared by servers; `files` writes them
    remote        a Redis or Valkey server; `redis_client` talks to it
    hicache       a storage backend of SGLang's HiCache; `hicache_backend` talks to it
    throttled     any of these, slowed down

A medium only moves bytes: `chunk_cache.tier_ledger` decides what is stored and evicted. A new medium is one file here
and one class in `test/unit/tiers` that inherits `MediumSuite`, which is a part of the contract.
"""
