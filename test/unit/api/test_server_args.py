"""Flags, and how the options reach every process."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os

import pytest

from sglang_chunk_cache.flags import server_args as options
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, StartRefused


def parse(*argv: str) -> ChunkCacheArgs | None:
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    return options.from_flags(parser.parse_args(argv))


def test_off_is_none():
    assert parse() is None


def test_defaults():
    assert parse("--chunk-cache") == ChunkCacheArgs("near-words", 0.15, "<|chunk|>", {})


def test_all_flags(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"verify_share": 0.1}')
    args = parse(
        "--chunk-cache", "--chunk-cache-method", "random", "--chunk-cache-ratio", "1", "--chunk-cache-separator", "##",
        "--chunk-cache-config", f"@{config}", "--chunk-cache-selector", "small/model",
        "--chunk-cache-target", '{"kl": 0.1}',
    )  # fmt: skip
    assert args == ChunkCacheArgs("random", 1.0, "##", {"verify_share": 0.1}, "small/model", {"kl": 0.1})
    assert ChunkCacheArgs.loads(args.dumps()) == args


def test_flags_stand_in_a_group_of_their_own():
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    text = parser.format_help()
    group = text[text.index("chunk cache:") :]
    for flag in ("", "-method", "-ratio", "-separator", "-selector", "-config", "-target"):
        assert f"--chunk-cache{flag}" in group


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--chunk-cache-ratio", "0.5"], "--chunk-cache-ratio is given without --chunk-cache"),
        (["--chunk-cache-separator", "#"], "--chunk-cache-separator is given without --chunk-cache"),
        (["--chunk-cache", "--chunk-cache-ratio", "1.5"], "--chunk-cache-ratio must be a number from 0 to 1"),
        (["--chunk-cache", "--chunk-cache-ratio", "nan"], "--chunk-cache-ratio must be a number from 0 to 1"),
        (["--chunk-cache", "--chunk-cache-ratio", "half"], "--chunk-cache-ratio must be a number from 0 to 1"),
        (["--chunk-cache", "--chunk-cache-method", "best"], "--chunk-cache-method 'best' is not known"),
        (["--chunk-cache", "--chunk-cache-separator", " "], "--chunk-cache-separator must be a string"),
        (
            ["--chunk-cache", "--chunk-cache-config", '{"verify_share": 0.5, "verify_share": 0}'],
            "--chunk-cache-config: verify_share is given twice; leave one of them out.",
        ),
        (["--chunk-cache", "--chunk-cache-config", "{"], "--chunk-cache-config is not valid JSON"),
        *(
            (
                ["--chunk-cache", flag, text],
                "; remove the trailing comma.",
            )
            for flag in ("--chunk-cache-config", "--chunk-cache-target")
            for text in ('{"kl": 0.1,}', '{"a": [1, 2,], "b": 1}', '{"kl": 1,\n }', '{"a": ",}", }')
        ),
        (
            ["--chunk-cache", "--chunk-cache-config", '{"tier": {}}'],
            "unknown key 'tier'; did you mean tiers? known",
        ),
        (["--chunk-cache", "--chunk-cache-config", "[1]"], "--chunk-cache-config must be a JSON object"),
        (["--chunk-cache", "--chunk-cache-config", "@/no/such/file"], "--chunk-cache-config: cannot read"),
        (["--chunk-cache", "--chunk-cache-target", "0.1"], "--chunk-cache-target: 0.1 is not an object"),
        (["--chunk-cache", "--chunk-cache-target", "null"], "--chunk-cache-target is null; give an object, or leave"),
        (["--chunk-cache", "--chunk-cache-target", "{kl"], "--chunk-cache-target is not valid JSON"),
        (["--chunk-cache", "--chunk-cache-target", '{"kl": 0.1}'], '--chunk-cache-target needs "verify_share" above 0'),
        (
            [
                *("--chunk-cache", "--chunk-cache-target", '{"kl": 0.1}'),
                *("--chunk-cache-config", '{"verify_share": 1, "alpha": 1}'),
            ],
            '--chunk-cache-target moves ratios, and "alpha"',
        ),
        *(
            (
                [
                    *("--chunk-cache", "--chunk-cache-config", '{"verify_share": 1}', *more),
                    *("--chunk-cache-target", '{"kl": 0.1, "steps": [["epic", 0.1], ["cacheclip", 0.3]]}'),
                ],
                "--chunk-cache-target: steps[1][0]: nobody would ask the selector for 'cacheclip'",
            )
            for more in (
                [],
                ["--chunk-cache-selector", "DIR"],
                ["--chunk-cache-selector", "DIR", "--chunk-cache-method", "cacheclip", "--chunk-cache-ratio", "1"],
            )
        ),
        (
            ["--chunk-cache", "--chunk-cache-config", '{"no_such_key": 1}'],
            "--chunk-cache-config: no_such_key: unknown key",
        ),
        (["--chunk-cache-selector", "DIR"], "--chunk-cache-selector is given without --chunk-cache"),
        (["--chunk-cache", "--chunk-cache-selector", " "], "--chunk-cache-selector must be a Hugging Face folder or"),
        (["--chunk-cache", "--chunk-cache-method", "cacheclip"], "--chunk-cache-method cacheclip needs a small model"),
        (
            ["--chunk-cache", "--chunk-cache-config", '{"selector": {"timeout_s": 1}}'],
            "--chunk-cache-config: selector is given without a model; add --chunk-cache-selector",
        ),
    ],
)
def test_bad_flags_are_one_sentence(argv, sentence):
    with pytest.raises(StartRefused) as refused:
        parse(*argv)
    assert isinstance(refused.value.code, str)
    assert sentence in refused.value.code
    assert "\n" not in refused.value.code


@pytest.mark.parametrize("steps", [{}, {"steps": [["epic", 0.3], ["cacheclip", 0.3]]}, {"steps": [["cacheclip", 1]]}])
def test_steps_of_a_target_may_ask_the_selector_where_the_server_does(steps):
    args = ChunkCacheArgs(method="cacheclip", selector="DIR", config={"verify_share": 1}, target={"kl": 0.1, **steps})
    assert args.parsed_target.steps[-1].method == "cacheclip"


def test_a_child_inherits_the_options(monkeypatch):
    monkeypatch.delenv(options.ENV_NAME, raising=False)
    args = ChunkCacheArgs(ratio=0.25)
    spawn = multiprocessing.get_context("spawn")
    with options.exported(args), concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        assert pool.submit(options.inherit).result() == args
    assert options.ENV_NAME not in os.environ


def test_a_process_started_by_hand_ignores_and_drops_the_variable(monkeypatch):
    monkeypatch.setenv(options.ENV_NAME, ChunkCacheArgs().dumps())
    monkeypatch.setattr(options, "_current", None)
    assert options.inherit() is None
    assert options.get_args() is None
    assert options.ENV_NAME not in os.environ


def test_exporting_nothing_hides_an_older_variable(monkeypatch):
    monkeypatch.setenv(options.ENV_NAME, "older")
    with options.exported(None):
        assert options.ENV_NAME not in os.environ
    assert os.environ[options.ENV_NAME] == "older"


def test_options_travel_with_the_pickled_server_args():
    import pickle

    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path="none")
    assert options.attached(server_args) is None
    options.attach(server_args, ChunkCacheArgs(method="random"))
    copied = pickle.loads(pickle.dumps(server_args))
    assert options.attached(copied) == ChunkCacheArgs(method="random")
    assert json.loads(ChunkCacheArgs().dumps())["separator"] == "<|chunk|>"
