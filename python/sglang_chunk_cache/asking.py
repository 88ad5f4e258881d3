"""Flags of the commands that ask a running server: `add_server_flags`."""

from __future__ import annotations

import argparse
import os

KEY_ENV = "CHUNK_CACHE_API_KEY"


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """`--url` and `--api-key`; the key is taken from the environment where it is not given."""
    url = "http://127.0.0.1:30000"
    parser.add_argument("--url", default=url, help="a server with --chunk-cache (default: %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get(KEY_ENV), metavar="KEY", help=f"of the server (default: ${KEY_ENV})"
    )
