"""Requests that would crash a stock server, or get a 500 from it, with marks or without: each gets a 400.

Verbs: `check_body` and `check_vertex` (what SGLang's readers of bodies let through), `check_vocabulary` (token ids),
`check_parameters` (how it is sampled, which log-probabilities are returned); `sampling_problem` says what is wrong with
sampling parameters.
`Names` has the names of the fields on a route.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
from pydantic import TypeAdapter, ValidationError
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams
from sglang.srt.runtime_context import get_observability
from sglang.srt.utils.msgpack_utils import dec_hook, enc_hook, ext_hook

from chunk_cache.errors import known_names, one_line, request_error, show
from chunk_cache.prompt.chunk_cache_fields import KEY


@dataclass(frozen=True)
class Names:
    """The names of the fields of a request on a route, for error messages.

    Attributes:
        text, ids: the fields of text and of token ids.
        sampling_params: the object with `custom_params`; empty where `custom_params` is at the top.
        num_top: the number of best tokens whose log-probabilities are returned.
        options: the object of the options, where it is not in `custom_params`; empty = it is.
    """

    text: str
    ids: str
    sampling_params: str
    num_top: str
    options: str = ""


_ONE_FOR_ONE = ("rid", "return_hidden_states")
"""Fields of which a stock server cannot use a list for a single prompt."""
_ONE_FOR_EACH = (
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_sampling_mask"),
    *("sampling_logprobs_mode", "lora_path", "custom_logit_processor", "video_data", "audio_data", "modalities"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
)
"""Fields of which a stock server takes the i-th entry for the i-th prompt without checking the list's length."""

_OF_INSTANCES = ("text", "input_ids", "input_embeds", "image_data")
"""Fields that the instances of a request of Vertex AI have."""
_TEMPLATE_ARGUMENTS = ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "return_dict")
"""Arguments that SGLang gives a chat template itself."""
_MOST_BIAS = 1e30
_LEAST_PENALTY = 1e-6
"""Beyond these a stock server may divide logits to infinity, of which it cannot sample."""
_MOST_ANSWERS = 4096
"""To one prompt. A stock server copies the request so often before it serves any other."""

GENERATE_NAMES = Names("text", "input_ids", "sampling_params", "top_logprobs_num")
COMPLETION_NAMES = Names("prompt", "prompt", "", "logprobs")
CHAT_NAMES = Names("messages", "messages", "", "top_logprobs")


def check_body(body: object) -> None:
    """Checks fields of a request on any route that only the server may set, or that may not be empty.

    Raises:
        ChunkCacheRequestError: a stock server would crash, or answer with a 500.
    """
    if not isinstance(body, Mapping):
        return
    if body.get("token_indices_to_pool") is not None:
        raise request_error("token_indices_to_pool", "only the server sets it, for scores", "leave it out")
    kwargs = body.get("chat_template_kwargs")
    for name in kwargs if isinstance(kwargs, Mapping) else ():
        if name in _TEMPLATE_ARGUMENTS:
            raise request_error(f"chat_template_kwargs.{name}", "only the server sets it", "leave it out")
    embeds = body.get("input_embeds")
    if isinstance(embeds, list) and (not embeds or [] in embeds):
        raise request_error("input_embeds", "a prompt without tokens", "give at least one token")


def check_vertex(body: object) -> None:
    """Checks the parameters of a request of Vertex AI, which SGLang takes as they are.

    Raises:
        ChunkCacheRequestError: `/generate` has no such parameter, or would refuse its value.
    """
    parameters = body.get("parameters") if isinstance(body, Mapping) else None
    if not isinstance(parameters, Mapping):
        return
    known = [field.name for field in dataclasses.fields(GenerateReqInput) if field.name not in _OF_INSTANCES]
    for name in parameters:
        if name in _OF_INSTANCES:
            raise request_error(f"parameters.{name}", "each instance has its own", "put it into the instances")
        if name not in known:
            raise request_error(f"parameters.{name}", "unknown parameter", known_names(name, known, "parameters"))
    try:
        _generate_reader().validate_python(dict(parameters))
    except ValidationError as error:
        found = error.errors()[0]
        path = f"parameters.{found['loc'][0]}" if found["loc"] else "parameters"
        raise request_error(path, found["msg"], "give such a value, or leave it out") from None


@cache
def _generate_reader() -> TypeAdapter[Any]:
    return TypeAdapter(GenerateReqInput)


def check_vocabulary(ids: Sequence[int], manager: Any, path: str) -> None:
    """Checks token ids that a client gave, also of unmarked requests: one too large crashes stock SGLang.

    Raises:
        ChunkCacheRequestError: one is not of the model's vocabulary.
    """
    vocab_size = manager.model_config.vocab_size
    if not _are_below(ids, vocab_size):
        problem = f"a token id is not in the vocabulary, 0 to {vocab_size - 1}"
        raise request_error(path, problem, "remove it")


def check_parameters(obj: Any, manager: Any, names: Names) -> None:
    """Checks the parameters of a `GenerateReqInput`.

    Raises:
        ChunkCacheRequestError: a stock server could not use one, or a client may not give it.
    """
    _check_adapter(obj.lora_id)
    _check_tenant(obj.extra_key, manager)
    _check_lists(obj)
    _check_embeds(obj)
    _check_labels(obj.custom_labels)
    _check_session(obj.session_params)
    _check_logprobs(obj, manager, names)
    _check_stop_ids(obj.sampling_params, manager, names)
    _check_sampling(obj.sampling_params, manager, names)


def _prompts_of(obj: Any) -> Any:
    return obj.text if obj.text is not None else obj.input_ids


def _is_one_prompt(obj: Any) -> bool:
    """Whether a request has a single prompt, not a list; False where only embeddings are given."""
    prompts = _prompts_of(obj)
    return isinstance(prompts, str) or bool(prompts and isinstance(prompts, list) and isinstance(prompts[0], int))


def _check_adapter(lora_id: object) -> None:
    """Checks that no client names an adapter's id: SGLang joins it to `extra_key`, where it could name a tenant."""
    if lora_id is not None:
        raise request_error("lora_id", "only the server sets it", "name the adapter in lora_path")


def _check_tenant(extra_key: object, manager: Any) -> None:
    """Checks that no `extra_key` ends with the id of an adapter, to which SGLang joins it: such a request would store
    KV of the bare model for those of the adapter. Who knows name and path of one of `--lora-paths` knows its id."""
    if extra_key is None:
        return
    ids = tuple(one.lora_id for one in manager.lora_registry.get_all_adapters().values())
    if any(isinstance(one, str) and one.endswith(ids) for one in each(extra_key)):
        raise request_error("extra_key", "ends with the id of a LoRA adapter", "name the tenant otherwise")


def _check_lists(obj: Any) -> None:
    """Checks that one prompt has no lists of values, and that lists for several prompts are long enough."""
    if _is_one_prompt(obj):
        for name in _ONE_FOR_ONE:
            if isinstance(getattr(obj, name), list):
                raise request_error(name, "a list for one prompt that is no list", "give one value")
        return
    prompts = _prompts_of(obj)
    for name in _ONE_FOR_EACH:
        values = getattr(obj, name)
        is_for_all = (
            not isinstance(values, list)
            or (name == "token_ids_logprob" and not isinstance(next(iter(values), 0), list))
            or (name == "modalities" and (not values or obj.image_data))
        )
        if not is_for_all and len(values) < len(prompts or ()):
            problem = f"a list of {len(values)} for {len(prompts)} prompts"
            raise request_error(name, problem, "give one value for all prompts, or a list with one for each")


def _check_labels(labels: object) -> None:
    """Checks labels of metrics: those that the operator did not allow crash a stock server with metrics."""
    flags = get_observability()
    allowed = flags.tokenizer_metrics_allowed_custom_labels or ()
    for name in labels if flags.enable_metrics and isinstance(labels, Mapping) else ():
        if name not in allowed:
            remedy = "leave it out, or name it in --tokenizer-metrics-allowed-custom-labels"
            raise request_error(f"custom_labels.{name}", "the server has no such label", remedy)


def _check_session(session_params: object) -> None:
    """Checks names and types of the fields of a turn of a session: wrong ones crash a stock server, or get a 500."""
    types = {field.name: field.type for field in msgspec.structs.fields(SessionParams)}
    for name, value in session_params.items() if isinstance(session_params, Mapping) else ():
        if name not in types:
            raise request_error("session_params", f"unknown field {show(name)}", known_names(name, types, "fields"))
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            remedy = "give such a value, or leave the field out"
            raise request_error(f"session_params.{name}", one_line(error), remedy) from None
    if isinstance(session_params, Mapping) and session_params.get("replace") and session_params.get("rid") is None:
        problem = "SGLang cannot replace all turns of a session"
        raise request_error("session_params.replace", problem, "name a turn in rid, or open another session")


def _check_embeds(obj: Any) -> None:
    """Checks embeddings in the place of tokens: only the offline engine can give some; others crash a stock server."""
    overrides = obj.positional_embed_overrides
    for one in [overrides] if _is_one_prompt(obj) else each(overrides):
        if one is not None and not isinstance(one, PositionalEmbeds):
            raise request_error("positional_embed_overrides", f"{show(one)} is no PositionalEmbeds", "leave it out")


def _check_logprobs(obj: Any, manager: Any, names: Names) -> None:
    """Checks numbers that crash stock SGLang, also of unmarked requests: too many best tokens, a start below -1."""
    vocab_size = manager.model_config.vocab_size
    for num_top in _numbers(obj.top_logprobs_num):
        if num_top > vocab_size:
            raise request_error(
                names.num_top, f"{num_top}, and the vocabulary has {vocab_size} tokens", "ask for fewer"
            )
    for start in _numbers(obj.logprob_start_len):
        if start < -1:
            remedy = "give -1 for the answer alone, or a position of the prompt"
            raise request_error("logprob_start_len", f"{start} is not a position", remedy)


def _check_stop_ids(sampling_params: object, manager: Any, names: Names) -> None:
    """Checks stop ids where `min_new_tokens` suppresses them: ids outside the vocabulary crash stock SGLang."""
    vocab_size = manager.model_config.vocab_size
    for params in each(sampling_params):
        ids = _numbers(params.get("stop_token_ids")) if isinstance(params, Mapping) else []
        if any(not 0 <= one < vocab_size for one in ids) and params.get("min_new_tokens"):
            problem = f"with a minimal length all must be token ids of the vocabulary, 0 to {vocab_size - 1}"
            raise request_error(f"{names.sampling_params}.stop_token_ids".lstrip("."), problem, "remove what is not")


def _check_sampling(sampling_params: object, manager: Any, names: Names) -> None:
    """Checks sampling parameters that stock SGLang answers with a 500, such as an invalid pattern."""
    is_list = isinstance(sampling_params, (list, tuple))
    for index, params in enumerate(each(sampling_params)):
        path = f"{names.sampling_params}[{index}]" if is_list else names.sampling_params
        num = params.get("n", 1) if isinstance(params, Mapping) else 1
        if num is None or (isinstance(num, int) and num < 1):
            wrong = "null is not a number" if num is None else f"{num} answers"
            raise request_error(f"{path}.n".lstrip("."), wrong, "give at least 1, or leave it out")
        if isinstance(num, int) and num > _MOST_ANSWERS:
            raise request_error(f"{path}.n".lstrip("."), f"{num} answers", f"give at most {_MOST_ANSWERS}")
        if params is None or sampling_problem(params, manager) is None:
            continue
        if not isinstance(params, Mapping):
            raise request_error(path, f"{show(params)} is not an object", 'give an object such as {"temperature": 0}')
        for name, value in params.items():
            problem = sampling_problem({name: value}, manager)
            if problem is not None and str(name) not in problem:
                where = f"{path}.{name}".lstrip(".")
                raise request_error(where, f"{show(value)} cannot be used: {problem}", "correct it, or leave it out")


def sampling_problem(params: Any, manager: Any) -> str | None:
    """Why these parameters cannot be sent to a scheduler, in SGLang's words; None = they can."""
    try:
        built = manager.sampling_params_class(**{**params, "custom_params": _others_params(params)})
        built.normalize(manager.tokenizer)
        built.verify(manager.model_config.vocab_size)
        if built.top_k >= 2**31:  # it becomes a tensor of 32 bits
            return "it must be below 2**31"
        if max(map(abs, (built.logit_bias or {}).values()), default=0.0) > _MOST_BIAS:
            return f"a bias must be from -{_MOST_BIAS:g} to {_MOST_BIAS:g}"
        if built.repetition_penalty < _LEAST_PENALTY:
            return f"it must be at least {_LEAST_PENALTY:g}"
        sent = msgspec.msgpack.encode(built, enc_hook=enc_hook)
        msgspec.msgpack.decode(sent, type=type(built), dec_hook=dec_hook, ext_hook=ext_hook)
    except Exception as error:  # noqa: BLE001  (any kind: stock SGLang fails with it too)
        return one_line(error).rstrip(".")
    return None


def _others_params(params: Mapping[str, Any]) -> Any:
    """The `custom_params` without ours, which are checked by themselves."""
    given = params.get("custom_params")
    return {key: value for key, value in given.items() if key != KEY} if isinstance(given, Mapping) else given


def _numbers(given: object) -> list[int]:
    """The integers among what was given, for all prompts or one for each."""
    return [one for one in each(given) if isinstance(one, int)]


def each(given: object) -> Sequence[Any]:
    """`given` as a sequence: a value for each prompt, or the one for all."""
    return given if isinstance(given, (list, tuple)) else [given]


def _are_below(ids: Sequence[int], bound: int) -> bool:
    """Whether all are whole numbers from 0 to `bound - 1`, in a sixth of the time that `min` and `max` take."""
    try:
        return bool(np.frombuffer(array("I", ids), dtype="I").max(initial=0) < bound)
    except (OverflowError, TypeError):
        return False
