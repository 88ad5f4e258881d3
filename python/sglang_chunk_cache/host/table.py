"""Everything of SGLang that is changed. Each row is a debt.

HOOKS: classes that are replaced by a subclass of ours (so `isinstance` holds, and `super()` is SGLang's own code), and
functions that are wrapped. SUBCLASSES: classes that SGLang takes from us through seams of its own. What a class
overrides is computed from it (`signatures.py`) and never written by hand. TOUCHED: what is used in a way that SGLang
did not offer.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_chunk_cache.server_args import refuse


@dataclass(frozen=True)
class Hook:
    """A replaced class or a wrapped function.

    Attributes:
        target: dotted path in SGLang.
        kind: REPLACE for a class; otherwise how the function is wrapped, see `sglang.srt.plugins.hook_registry`.
        handler: `"package.module:name"` of our class or function, imported when the hook is applied.
        why: one line.
        breaks: what would break in silence if the target kept its name and signature and changed its meaning.
    """

    target: str
    kind: HookType
    handler: str
    why: str
    breaks: str

    @property
    def replaces_class(self) -> bool:
        return self.kind is HookType.REPLACE

    def resolve(self) -> Any:
        """Imports the handler.

        Raises:
            StartRefused: the handler, or what it is built on, is not there.
        """
        try:
            return pkgutil.resolve_name(self.handler)
        except (ImportError, AttributeError) as error:
            refuse(f"the handler {self.handler} for {self.target} cannot be imported: {error}.")


@dataclass(frozen=True)
class Touch:
    """A name of SGLang that is used in a way that SGLang did not offer, without a hook.

    Attributes:
        name: dotted path; the last part may be an attribute that instances get.
        file: ours, below `python/sglang_chunk_cache/`.
        why: one line.
        breaks: as for a hook.
    """

    name: str
    file: str
    why: str
    breaks: str


_HOST = "sglang_chunk_cache.host"

# Applied in every launching process, on or off: without them there are no flags.
FLAG_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        "sglang_chunk_cache.plugin:add_cli_args",
        "the flags",
        "the flags would be unknown to the command line.",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        "sglang_chunk_cache.plugin:from_cli_args",
        "reads the flags and turns everything else on",
        "a command line that is read elsewhere would start a server without the chunk cache.",
    ),
)

# Applied in the launching process, which tokenizes and answers, only where --chunk-cache is on.
API_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        HookType.AROUND,
        "sglang_chunk_cache.plugin:resolve_once",
        "checks the resolved flags and the model before any child is started",
        "flags that are resolved later would not be checked, and a model we cannot serve would be served wrongly.",
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        HookType.AROUND,
        "sglang_chunk_cache.plugin:launch_subprocesses",
        "children inherit the options",
        "children that are started outside of it would run without the hooks, and remember nothing.",
    ),
    Hook(
        "sglang.srt.entrypoints.api_contract.generate_contract_error",
        HookType.AROUND,
        f"{_HOST}.generate:generate_contract_error",
        "options at a place of `/generate` that is not read are a 400",
        "a `chunk_cache` at the top of a request would be dropped unseen.",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server.serve_generate_request",
        HookType.AROUND,
        f"{_HOST}.generate:serve_generate_request",
        "bad marks and options on `/generate` are a 400, also with `stream`",
        "a bad request with `stream` would get status 200 and an error event.",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager",
        HookType.REPLACE,
        f"{_HOST}.tokenizer_manager:ChunkTokenizerManager",
        "checks options, tokenizes marked text, makes one object of the reply, speaks to the schedulers",
        "a route that does not come by `generate_request` would send separators to the model as text; a reply could be "
        "missing in later outputs of a stream.",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat",
        HookType.REPLACE,
        f"{_HOST}.chat:ChunkServingChat",
        "marks in message contents; `sglext.chunk_cache`; options at a place that is not read are a 400",
        "chunks of a chat could get other token ids than those of `/generate`, and would never be found again.",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion",
        HookType.REPLACE,
        f"{_HOST}.completions:ChunkServingCompletion",
        "marks in prompts; an echo without separators; `sglext.chunk_cache`; as for chats, a 400",
        "an echo could show separators; a reply could lack `sglext.chunk_cache`.",
    ),
    Hook(
        "sglang.srt.entrypoints.ollama.serving.OllamaServing",
        HookType.REPLACE,
        f"{_HOST}.ollama:ChunkOllamaServing",
        "marked text is a 400: these routes tokenize by themselves",
        "separators would reach the model as text.",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.parallel_prompt_encode.parallel_prompt_encode",
        HookType.AROUND,
        f"{_HOST}.chat:parallel_prompt_encode",
        "tokenizes the pieces of a rendered chat prompt one by one",
        "a chat whose prompt is encoded elsewhere is refused (its rendering was never seen), never served wrongly.",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.parallel_prompt_encode.encode_prompt_segments",
        HookType.AROUND,
        f"{_HOST}.chat:encode_prompt_segments",
        "the same for a template written in Python",
        "as above.",
    ),
)

# Applied in the children, only where --chunk-cache is on; the launching process applies them too, so that a name that
# is missing stops the start there, with a sentence, before a child exists.
SCHEDULER_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler",
        HookType.REPLACE,
        f"{_HOST}.scheduler:ChunkScheduler",
        "requests wait for their chunks, are charged their rows and get a reply; `/chunk_cache/...` is heard",
        "requests that enter the queue elsewhere would not have their chunks loaded; a step that admits them elsewhere "
        "would compute more rows than its budget.",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        HookType.AROUND,
        f"{_HOST}.schedule_batch:init_next_round_input",
        "what was loaded goes into the KV pool just before the request is matched",
        "a request matched before it would compute what was loaded for it.",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        HookType.AROUND,
        f"{_HOST}.schedule_batch:prepare_for_extend",
        "`cached_tokens` counts exact tokens only",
        "`cached_tokens` would count tokens that came from chunks.",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
        HookType.REPLACE,
        f"{_HOST}.weight_updater:ChunkWeightUpdater",
        "KV of other weights must not come up again from below the pool",
        "a new way to change the weights would leave KV of the old ones in the tiers below the pool.",
    ),
    Hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        HookType.AROUND,
        f"{_HOST}.forward:init_forward_batch",
        "adds the chosen rows to the batch that the model sees",
        "a length that is derived elsewhere would not count the rows; logits would be taken from wrong ones.",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        HookType.AROUND,
        f"{_HOST}.forward:forward",
        "announces the rows to the attention; no captured graph",
        "a captured graph would replay a forward without the rows.",
    ),
    Hook(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        HookType.AROUND,
        f"{_HOST}.attention_backend:forward",
        "fused batches attend by row positions",
        "a backend that attends past this method would mask rows by their order and not by their positions.",
    ),
)

HOOKS: tuple[Hook, ...] = API_HOOKS + SCHEDULER_HOOKS

# Subclasses that SGLang takes through seams of its own: methods of the scheduler, the registry of caches, a platform.
SUBCLASSES: tuple[str, ...] = (
    f"{_HOST}.prefill_adder:ChunkPrefillAdder",
    f"{_HOST}.output_streamer:ChunkOutputStreamer",
    f"{_HOST}.radix_cache:ChunkRadixCache",
    "sglang_chunk_cache.platform_cpu.platform:TorchCpuPlatform",
)

TOUCHED: tuple[Touch, ...] = (
    Touch(
        "sglang.srt.entrypoints.openai.protocol.SglExt",
        "host/sglext.py",
        "gets the field `chunk_cache`, after which the four response types are built anew",
        "a response type that is built otherwise would drop the reply.",
    ),
    Touch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._result_dispatcher",
        "host/tokenizer_manager.py",
        "`+=`: replies of the schedulers to `/chunk_cache/...`",
        "the routes would wait for ever.",
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler._request_dispatcher",
        "host/admin_requests.py",
        "`+=`: requests of `/chunk_cache/...`",
        "the routes would wait for ever.",
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler.waiting_queue",
        "host/scheduler.py",
        "another list within one call: requests whose loads run are not seen by this step",
        "a reference that SGLang keeps to the list would miss requests that are put back, and they would hang.",
    ),
    Touch(
        "sglang.srt.model_executor.model_runner.ModelRunner.prefill_cuda_graph_runner",
        "host/forward.py",
        "None for the time of a fused forward",
        "a captured prefill graph would replay a forward without the rows.",
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.residual_stream",
        "selection/executor.py",
        "cut to the rows that are left, between layers",
        "hidden states of one row would be added to those of another.",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_leaf",
        "kv/store.py",
        "frees the node of a variant that is not needed any more",
        "slots of a node could be freed while its entry stays in the tree.",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.tree_core",
        "kv/store.py",
        "`collect_path_info`, `match_full_device_prefix`: what lies in front of a node, without a use being counted",
        "a variant could be found where other tokens lie.",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._enable_metrics_flag",
        "host/runtime.py",
        "whether there are metrics",
        "metrics of the chunk cache would be missing.",
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder.log_hit_tokens",
        "host/prefill_adder.py",
        "loaded tokens are taken out of what SGLang counted as hits, with the three other counters beside it",
        "the log line and the metrics of a prefill would count loaded tokens as hits.",
    ),
    Touch(
        "sglang.srt.constants.HEALTH_CHECK_RID_PREFIX",
        "host/refresh.py",
        "names requests of our own, whose replies nobody waits for",
        "every refresh would leave a warning in the log.",
    ),
    Touch(
        "sglang.srt.server_args.ServerArgs._resolution_finished",
        "plugin.py",
        "a record is checked once",
        "a record would be checked at each use: slower, not wrong.",
    ),
    Touch(
        "sglang.srt.entrypoints.http_server.app",
        "host/admin_routes.py",
        "gets the routes `/chunk_cache/...`",
        "the routes would be missing.",
    ),
    Touch(
        "sglang.srt.utils.auth.auth_level",
        "host/admin_routes.py",
        "marks the routes as administration, as SGLang marks its own",
        "anybody could administrate a server that has an admin key.",
    ),
    Touch(
        "sglang.srt.managers.io_struct.hook_custom_types",
        "admin/messages.py",
        "makes our messages known to the decoder of SGLang's sockets",
        "the routes would wait for ever.",
    ),
    Touch(
        "sglang.srt.plugins.hook_registry.HookRegistry._hooks",
        "host/hooks.py",
        "whether a name carries our handler, and who else replaces a class",
        "another plugin's replacement of one of our classes would not be noticed.",
    ),
    Touch(
        "sglang.srt.plugins.hook_registry.HookRegistry._patched",
        "host/hooks.py",
        "whether a hook was applied",
        "a hook that was not applied would not be noticed.",
    ),
    Touch(
        "sglang.srt.plugins.hook_registry.HookRegistry._apply_target",
        "host/hooks.py",
        "replaces a class at once, and wraps a function that another plugin has wrapped",
        "modules that imported a name before would go on with SGLang's own.",
    ),
    Touch(
        "sglang.lang.ir.SglConstantText",
        "frontend.py",
        "its text is a string that shares separators with the text in front of it",
        "two chunks that follow each other would have an empty one between them, and be refused.",
    ),
)
