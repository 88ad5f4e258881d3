"""The client of the remote medium: one that fails within its timeout, and says why as a `TierError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chunk_cache.options.tier_config import shown_url
from sglang_chunk_cache.kv.stored_variant import TierError

if TYPE_CHECKING:
    from redis import Redis


def connect(url: str, timeout_s: float) -> Redis:
    """A client that is safe to share among threads. Nothing is sent yet.

    A command whose connection turns out to be closed is sent once more over a new one, so a restarted server is not
    noticed. One that times out is not.

    Raises:
        ImportError: the package is not installed.
        ValueError: `url` is not one.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        remedy = "pip install 'redis>=5'"
        raise ImportError(f"the remote tier at {shown_url(url)} needs the Redis client: {remedy}") from error
    client = redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )
    client.connection_pool.connection_kwargs["decode_responses"] = False  # whatever the url says: values are bytes
    return client


@contextmanager
def as_tier_errors(where: str) -> Iterator[None]:
    """An error of the client or the server becomes one of the tier.

    Raises:
        TierError: it names `where`.
    """
    from redis import exceptions as e

    try:
        yield
    except e.TimeoutError as error:
        raise TierError("timeout", where, str(error), "check the server's load and the network") from error
    except (e.AuthenticationError, e.AuthorizationError, e.NoPermissionError) as error:
        raise TierError("unreadable", where, str(error), "give the url a user and password that may") from error
    except e.OutOfMemoryError as error:
        remedy = "raise its maxmemory, or let it evict (maxmemory-policy allkeys-lru)"
        raise TierError("full", where, str(error), remedy) from error
    except e.ReadOnlyError as error:
        raise TierError("unreadable", where, str(error), "name the primary, not a replica") from error
    except e.ResponseError as error:
        raise TierError("unreadable", where, str(error), "check the server's log and version") from error
    except (e.RedisError, OSError) as error:
        raise TierError("unavailable", where, str(error), "start the server, or check the url") from error
