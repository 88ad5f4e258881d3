"""The older way to call `chunk-cache explain`: `python -m sglang_chunk_cache.explain`."""

import sys

from chunk_cache_tools.command import main

if __name__ == "__main__":
    sys.exit(main(["explain", *sys.argv[1:]]))
