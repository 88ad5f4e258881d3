"""The older way to call `chunk-cache doctor`: `python -m sglang_chunk_cache.doctor`."""

import sys

from chunk_cache_tools.command import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
