"""HOOKS: every name of SGLang that we wrap, in one table. Each entry is a debt.

Verbs: `apply_hooks` (wrap now), `register_hooks` (let SGLang's `load_plugins` wrap), `verify_hooks` (stop the start
if a name was not wrapped).

Promises: nothing in `HOOKS` is applied while `--chunk-cache` is off; a handler is imported only when it is applied;
where the chunk cache is on, a name that is missing in this version of SGLang stops the start. SGLang itself only logs
such a failure, and a server without one of these hooks gives plausible wrong answers.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_chunk_cache.server_args import RADIX_CACHE_BACKEND, refuse

_SOURCE = HookSource(plugin_name="chunk_cache", dist_name=None)


@dataclass(frozen=True)
class Hook:
    """One wrapped name.

    Attributes:
        target: dotted path of the function or method in SGLang.
        kind: how it is wrapped; see `sglang.srt.plugins.hook_registry`.
        handler: `"package.module:function"`, imported when the hook is applied.
        why: one line.
    """

    target: str
    kind: HookType
    handler: str
    why: str

    def resolve(self) -> Callable[..., object]:
        """Imports the handler.

        Raises:
            StartRefused: the handler is not there.
        """
        try:
            return pkgutil.resolve_name(self.handler)
        except (ImportError, AttributeError) as error:
            refuse(f"the handler {self.handler} for {self.target} cannot be imported: {error}.")


# Applied in every launching process, on or off: without them there are no flags.
FLAG_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        "sglang_chunk_cache.plugin:add_cli_args",
        "the flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        "sglang_chunk_cache.plugin:from_cli_args",
        "reads the flags and turns everything else on",
    ),
)

# Applied in the launching process, which tokenizes and answers, only where --chunk-cache is on.
API_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        HookType.AROUND,
        "sglang_chunk_cache.plugin:resolve_once",
        "checks the resolved flags and the model before any child is started",
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        HookType.AROUND,
        "sglang_chunk_cache.plugin:launch_subprocesses",
        "children inherit the options",
    ),
    Hook(
        "sglang.srt.entrypoints.api_contract.generate_contract_error",
        HookType.AROUND,
        "sglang_chunk_cache.host.generate:generate_contract_error",
        "a top-level chunk_cache field on /generate is a 400",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server.serve_generate_request",
        HookType.AROUND,
        "sglang_chunk_cache.host.generate:serve_generate_request",
        "bad marks and options on /generate are a 400, also with stream",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        HookType.AROUND,
        "sglang_chunk_cache.api.prepare:generate_request",
        "checks options, splits marked text, tokenizes its pieces; all routes and the Engine come by",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
        HookType.AFTER,
        "sglang_chunk_cache.admin.client:init_communicators",
        "replies of the schedulers to requests of /chunk_cache/...",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        HookType.AROUND,
        "sglang_chunk_cache.api.reply:update_request_meta_info",
        "the reply arrives as one object",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._stream_one_response",
        HookType.AROUND,
        "sglang_chunk_cache.api.reply:stream_one_response",
        "the reply stays in every later output of a stream",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        HookType.AROUND,
        "sglang_chunk_cache.host.completions:handle_request",
        "a top-level chunk_cache field is a 400",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
        HookType.AROUND,
        "sglang_chunk_cache.host.completions:convert_completion",
        "marks in prompts; the echo has no separators",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        HookType.AROUND,
        "sglang_chunk_cache.host.chat:convert_chat",
        "marks in message contents",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._apply_conversation_template",
        HookType.AROUND,
        "sglang_chunk_cache.host.chat:apply_conversation_template",
        "marks with a built-in chat template",
    ),
    Hook(
        "sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_chat",
        HookType.AROUND,
        "sglang_chunk_cache.host.ollama:handle",
        "marked text is a 400: this route tokenizes by itself",
    ),
    Hook(
        "sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_generate",
        HookType.AROUND,
        "sglang_chunk_cache.host.ollama:handle",
        "marked text is a 400: this route tokenizes by itself",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.parallel_prompt_encode.parallel_prompt_encode",
        HookType.AROUND,
        "sglang_chunk_cache.host.chat:parallel_prompt_encode",
        "tokenizes the pieces of a rendered chat prompt one by one",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.parallel_prompt_encode.encode_prompt_segments",
        HookType.AROUND,
        "sglang_chunk_cache.host.chat:encode_prompt_segments",
        "the same for a template written in Python",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._build_completion_response",
        HookType.AROUND,
        "sglang_chunk_cache.host.completions:build_response",
        "sglext.chunk_cache",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
        HookType.AROUND,
        "sglang_chunk_cache.host.completions:build_response",
        "sglext.chunk_cache",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._generate_completion_stream",
        HookType.AROUND,
        "sglang_chunk_cache.host.completions:completion_stream",
        "sglext.chunk_cache in the last chunk of a stream",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        HookType.AROUND,
        "sglang_chunk_cache.host.completions:chat_stream",
        "sglext.chunk_cache in the last chunk of a stream",
    ),
)

# Applied in the children, only where --chunk-cache is on; the launching process applies them too, so that a name that
# is missing stops the start there, with a sentence, before a child exists.
SCHEDULER_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler",
        HookType.REPLACE,
        "sglang_chunk_cache.host.scheduler:ChunkScheduler",
        "requests wait for their chunks, are charged their rows and get a reply; /chunk_cache/... is heard",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        HookType.AROUND,
        "sglang_chunk_cache.host.schedule_batch:init_next_round_input",
        "what was loaded goes into the KV pool just before the request is matched",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        HookType.AROUND,
        "sglang_chunk_cache.host.schedule_batch:prepare_for_extend",
        "cached_tokens counts exact tokens only",
    ),
    *(
        Hook(
            f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{name}",
            HookType.AFTER,
            "sglang_chunk_cache.host.weight_updater:weights_changed",
            "KV of other weights must not come up again",
        )
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "begin_weight_update",
        )
    ),
    Hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        HookType.AROUND,
        "sglang_chunk_cache.host.forward:init_forward_batch",
        "adds the chosen rows to the batch that the model sees",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        HookType.AROUND,
        "sglang_chunk_cache.host.forward:forward",
        "announces the rows to the attention; no captured graph",
    ),
    Hook(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        HookType.AROUND,
        "sglang_chunk_cache.host.attention_backend:forward",
        "fused batches attend by row positions",
    ),
)

HOOKS: tuple[Hook, ...] = API_HOOKS + SCHEDULER_HOOKS

_expected: tuple[Hook, ...] = ()  # what this process needs
_wrapped: set[str] = set()  # targets that carry our handlers although another plugin had wrapped them before


def _by_target(hooks: Iterable[Hook]) -> dict[str, list[Hook]]:
    grouped: dict[str, list[Hook]] = {}
    for hook in hooks:
        grouped.setdefault(hook.target, []).append(hook)
    return grouped


def _has_ours(target: str) -> bool:
    return any(source == _SOURCE for _, _, source in HookRegistry._hooks.get(target, ()))


def register_hooks(hooks: Iterable[Hook]) -> None:
    """Hands the hooks to SGLang's registry; `load_plugins` applies them with those of other plugins.

    From then on `verify_hooks` expects them in this process.
    """
    global _expected
    hooks = tuple(hooks)
    _expected += tuple(hook for hook in hooks if hook not in _expected)
    for target, group in _by_target(hooks).items():
        if _has_ours(target) or target in _wrapped:
            continue
        for hook in group:
            HookRegistry.register(target, hook.resolve(), hook.kind, source=_SOURCE)


def apply_hooks(hooks: Iterable[Hook] = HOOKS) -> None:
    """Applies the hooks now, after `load_plugins` ran, and verifies them.

    The registry skips a target that another plugin has wrapped already, so such a target is wrapped once more here.

    Raises:
        StartRefused: a target or a handler is not there.
    """
    for target, group in _by_target(hooks).items():
        if target in HookRegistry._patched and not _has_ours(target) and target not in _wrapped:
            HookRegistry._apply_target(target, [(hook.kind, hook.resolve(), _SOURCE) for hook in group])
            _wrapped.add(target)
    register_hooks(hooks)
    HookRegistry.apply_hooks()
    verify_hooks()


def missing_hooks() -> list[str]:
    """The targets that should carry our handlers in this process and do not."""
    return [
        hook.target
        for hook in _expected
        if hook.target not in _wrapped and not (hook.target in HookRegistry._patched and _has_ours(hook.target))
    ]


def verify_hooks() -> None:
    """Checks that every hook that was registered in this process is applied.

    Raises:
        StartRefused: one is not; the sentence names it.
    """
    from sglang.version import __version__

    missing = missing_hooks()
    if missing:
        refuse(f"SGLang {__version__} does not fit, {', '.join(missing)} could not be hooked; install sglang 0.5.23.")


def register_radix_cache() -> None:
    """Makes our radix cache known under its name, by which a server is told to use it."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(RADIX_CACHE_BACKEND) is None:
        register_radix_cache_backend(RADIX_CACHE_BACKEND, _create_radix_cache)


def _create_radix_cache(ctx: object) -> object:
    from sglang_chunk_cache.host.radix_cache import create

    return create(ctx)
