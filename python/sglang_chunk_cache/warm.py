"""The older way to call `chunk-cache warm`: `python -m sglang_chunk_cache.warm`."""

import sys

from chunk_cache_tools.command import main

if __name__ == "__main__":
    sys.exit(main(["warm", *sys.argv[1:]]))
