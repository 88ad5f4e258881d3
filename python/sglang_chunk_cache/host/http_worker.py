"""The HTTP app of one of several tokenizer workers (`--tokenizer-worker-num`): `app`.

Such a process imports its app by the name in `SGLANG_HTTP_SERVER_APP_PATH` and loads no plugin. So the hooks for
tokenizing and answering are applied here, before SGLang makes objects. The options come with SGLang's own `ServerArgs`.
"""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import app

from sglang_chunk_cache.host.admin_routes import add_routes
from sglang_chunk_cache.start.hooks import API_HOOKS, apply_hooks

apply_hooks(API_HOOKS)
add_routes(app)
