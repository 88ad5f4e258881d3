"""The older way to call `chunk-cache verify`: `python -m sglang_chunk_cache.verify`."""

import sys

from chunk_cache_tools.command import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
