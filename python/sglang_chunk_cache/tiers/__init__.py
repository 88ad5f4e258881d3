"""Where chunks are kept below the KV pool. Importing this package loads nothing.

A *tier* is a place below the pool as the scheduler sees it; its *medium* moves the bytes. `chunk_cache.tiers` decides
what it keeps, which variant is read, and what is written where; here that is carried out.

    medium        the contract of a medium (`Medium`)
    record        the bytes of an entry's description, shared by the media that leave the process
    host          memory of this process
    disk          one file per variant in a folder, shared by servers; `files` writes them
    redis_medium  a Redis or Valkey server; `redis_client` talks to it
    mooncake      Mooncake's distributed store
    throttled     any of these, slowed down

    tier          a tier: name, medium, ledger, measured speed; `registry` opens those of the configuration
    manager       all tiers, for the radix cache and the scheduler
    writer        pool -> tiers; `workers` move the bytes
    loader        tiers -> pool, for requests that wait; `search` asks tiers and reads variants

A new tier is a medium here, a line of `registry.MEDIA`, a field of `chunk_cache.options.tier_config.TierConfig`, and
a class in `test/unit/tiers` that inherits `MediumSuite`, which is a part of the contract.
"""
