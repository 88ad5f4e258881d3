"""The backend `chunk-cache` of `sglang serve`: SGLang's own server of language models, with the chunk cache on.

`sglang serve --help` prints its help before it loads plugins, so our flags are missing there; it names the backends,
and `sglang serve --model-type chunk-cache --help` has the flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.cli.serve_backends import ServeBackend, ServeRequest


def serve_backend() -> ServeBackend:
    """The entry point's factory; SGLang calls it whenever it looks for the backend of a model, so it imports little."""
    from sglang.cli.serve_backends import SERVE_BACKEND_API_VERSION, ServeBackend

    # Without a detector it is never chosen by itself.
    return ServeBackend(api_version=SERVE_BACKEND_API_VERSION, run=_run)


def _run(request: ServeRequest) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    flags = list(request.argv)
    if "--chunk-cache" not in flags:
        flags.append("--chunk-cache")
    run_server(prepare_server_args(flags))
