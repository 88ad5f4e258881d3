"""The older way to call `chunk-cache train-selector`: `python -m sglang_chunk_cache.selector.train`."""

import sys

from chunk_cache_tools.command import main

if __name__ == "__main__":
    sys.exit(main(["train-selector", *sys.argv[1:]]))
