"""A user's script: `engine` without a server. Asked by `test_parallel_server.py`."""

from __future__ import annotations

from typing import Any

from server.own_process import answer
from sglang_chunk_cache.plugin import engine


def options(chunk_cache: dict[str, Any], **params: Any) -> dict[str, Any]:
    return {
        "temperature": 0,
        "max_new_tokens": 8,
        "ignore_eos": True,
        "custom_params": {"chunk_cache": chunk_cache},
        **params,
    }


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the ValueError that the call must raise."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"not refused: {args} {kwargs}")


def main(task: dict[str, Any]) -> dict[str, Any]:
    model = {"model_path": task["model"], "dtype": "float32", "max_total_tokens": 4096, "tp_size": task["tp_size"]}
    refused = [refusal(engine, chunk_cache_ratio=2, **model), refusal(engine, disable_radix_cache=True, **model)]
    llm = engine(chunk_cache_ratio=1.0, chunk_cache_method="random", **model)
    for text in task["primes"]:
        llm.generate(text, {"max_new_tokens": 0})
    prompt, ids, spans = task["prompt"], task["ids"], task["spans"]
    logprobs = {"return_logprob": True, "top_logprobs_num": 5}
    params = options({})
    result: dict[str, Any] = {
        "text": llm.generate(prompt, params, **logprobs),
        "ids": llm.generate(input_ids=ids, sampling_params=options({"spans": spans}), **logprobs),
        "batch": llm.generate([prompt, "plain"], [params, {"max_new_tokens": 2}]),
        "stream": list(llm.generate(prompt, params, stream=True)),
        "async": llm.loop.run_until_complete(llm.async_generate(prompt, params)),
        "params": params,
    }
    bad = options({"spans": [[3, 1]]})
    refused += [
        refusal(llm.generate, input_ids=ids, sampling_params=bad),
        refusal(llm.generate, input_ids=[ids, ids], sampling_params=[options({}), bad]),
        refusal(lambda: list(llm.generate(input_ids=ids, sampling_params=bad, stream=True))),
        refusal(llm.generate, task["lone"], params),
        refusal(lambda: llm.loop.run_until_complete(llm.async_generate(task["lone"], params))),
    ]
    result |= {"refused": refused, "after": llm.generate(prompt, params)}
    llm.shutdown()
    return result


if __name__ == "__main__":
    answer(main)
