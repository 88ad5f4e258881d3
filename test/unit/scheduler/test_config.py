from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.errors import ChunkCacheConfigError, show
from chunk_cache.options.config import Config, describe, parse_config
from chunk_cache.options.tier_config import DiskConfig, TierConfig


def test_empty_object_is_the_defaults() -> None:
    assert parse_config({}) == Config()


def test_every_field_can_be_given() -> None:
    given: dict[str, Any] = {
        "max_variants": 10,
        "max_variants_per_chunk": 2,
        "max_path_tokens": 1000,
        "max_generation": 0,
        "min_reuse_len": 16,
        "seam_len": 8,
        "state_bytes": 1000,
        "models": "any",
        "kernel": "torch",
        "attention": "runs",
        "statistics_layers": "all",
        "options": {"deviation": "v", "ends": 20, "focus_window": 3, "layers": (0, 2)},
        "eviction": "frequency-reuse",
        "ageing": 2.5,
        "keep_share": 0.5,
        "partition_share": 0.3,
        "remember": "contexts",
        "system_prompts": "same",
        "trust": "warmed",
        "promote_uses": 3,
        "refresh_uses": 2,
        "verify_share": 0.1,
        "verify_file": "quality.json",
        "keep_tokens": 1024,
        "shown_tokens": 8,
        "alpha": 1.5,
        "max_cfo": 0.9,
        "tiers": None,
        "draft_on_gpu": True,
        "selector": {"timeout_s": 1.0, "max_bytes": 10, "num_threads": 2},
        "events": {"endpoint": "tcp://*:5557", "replay_endpoint": None, "salt": "x"},
    }
    found = describe(parse_config(given))
    del given["events"]["salt"]  # a secret
    assert found == given
    assert set(given) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "--chunk-cache-config: [] is not an object; "),
        (None, "--chunk-cache-config: null is not an object; "),
        (
            {"max_variant": 1},
            "--chunk-cache-config: max_variant: unknown key 'max_variant'; did you mean max_variants? known keys: ",
        ),
        ({"tier": {}}, "--chunk-cache-config: tier: unknown key 'tier'; did you mean tiers? known keys: "),
        (
            {"partition_share": 0},
            "--chunk-cache-config: partition_share: 0 lets nobody keep a chunk; give a number in (0",
        ),
        ({"partition_share": 1.5}, "--chunk-cache-config: partition_share: 1.5 is not a number in [0, 1]; "),
        ({"partition_share": "half"}, "--chunk-cache-config: partition_share: 'half' is not a number in [0, 1]; "),
        ({"max_variants": 0}, "--chunk-cache-config: max_variants: 0 is not an integer of at least 1; "),
        ({"max_variants": 10**400}, "--chunk-cache-config: max_variants: a huge integer is too large; give at most"),
        ({"state_bytes": 10**400}, "--chunk-cache-config: state_bytes: a huge integer is not"),
        ({"state_bytes": "9e99GB"}, "--chunk-cache-config: state_bytes: '9e99GB' is not a number of bytes"),
        ({"max_variants": True}, "--chunk-cache-config: max_variants: true is not an integer"),
        ({"max_variants_per_chunk": 1.0}, "--chunk-cache-config: max_variants_per_chunk: 1.0 is not an integer"),
        ({"max_path_tokens": "9"}, "--chunk-cache-config: max_path_tokens: '9' is not an integer"),
        ({"max_generation": -1}, "--chunk-cache-config: max_generation: -1 is not an integer of at least 0"),
        *[
            (
                {"ageing": value},
                f"--chunk-cache-config: ageing: {show(value)} is not a number in [0, 1000]; give such a number, or",
            )
            for value in (True, -1, 1001, "10", float("nan"))
        ],
        *[
            (
                {"keep_share": value},
                f"--chunk-cache-config: keep_share: {show(value)} is not a number in [0, 0.9]; ",
            )
            for value in (False, -0.1, 1, "0.5", float("nan"))
        ],
        (
            {"verify_share": 1.1},
            "--chunk-cache-config: verify_share: 1.1 is not a number in [0, 1]; give such a number",
        ),
        ({"verify_share": 1, "verify_file": 3}, "--chunk-cache-config: verify_file: 3 is not a file; give the path"),
        ({"verify_file": "a"}, "--chunk-cache-config: verify_file: nothing is verified; give verify_share too"),
        ({"kernel": "cuda"}, "unknown kernel 'cuda'; known values: auto, torch, triton"),
        ({"kernel": []}, "unknown kernel []"),
        ({"options": []}, "--chunk-cache-config: options: [] is not an object; give an object of options"),
        (
            {"options": {"sed": 1}},
            "--chunk-cache-config: options.sed: unknown option 'sed'; did you mean seed? known",
        ),
        ({"options": {"alpha": 1}}, "--chunk-cache-config: options.alpha: is a key of its own; give it beside this"),
        ({"options": {"seed": -1}}, "--chunk-cache-config: options.seed: -1 is not an integer in [0, "),
        ({"options": {"layers": [2, 1]}}, "--chunk-cache-config: options.layers: [2, 1] does not ascend; "),
        ({"options": {"group_size": 4}}, "options.group_threshold: no window of 4 tokens has more than 5 of them; "),
        ({"options": {"first_ratio": 0.5}}, "options.first_ratio: 0.5 is smaller than last_ratio 0.94"),
        ({"remember": "all"}, "remember: unknown remember 'all'; known values: misses, contexts"),
        ({"system_prompts": ""}, "system_prompts: unknown system_prompts ''; known values: any, same"),
        *[
            (
                {"statistics_layers": value},
                f"--chunk-cache-config: statistics_layers: {show(value)} is neither a list of layer numbers nor one of "
                "sampled, all, none; count layers from 0",
            )
            for value in ("some", "", 3, True, 1.5, {}, [], [-1], [True], [1.0], ["1"])
        ],
    ],
)
def test_bad_values_name_the_key_and_the_remedy(value: object, message: str) -> None:
    with pytest.raises(ChunkCacheConfigError) as caught:
        parse_config(value)
    assert message in str(caught.value)


def test_null_is_not_given() -> None:
    assert parse_config(dict.fromkeys(field.name for field in dataclasses.fields(Config))) == Config()
    tiers = {"disk": "~/x", "host_bytes": None, "write": None, "throttle": {"disk": None}}
    found = parse_config({"tiers": tiers, "options": {"seed": None}, "selector": {"timeout_s": None}})
    path = str(Path.home() / "x")
    assert found == Config(tiers=TierConfig(disk=DiskConfig(path)))
    assert parse_config({"verify_share": 1, "verify_file": "~/x"}).verify_file == path


def test_layers_with_statistics() -> None:
    def layers(value: object, num_layers: int) -> tuple[int, ...]:
        return parse_config({"statistics_layers": value}).layers_with_statistics(num_layers)

    assert [layers(value, 12) for value in ("sampled", "none", [5, 0, 5])] == [(4, 8), (), (0, 5)]
    assert layers("all", 3) == (0, 1, 2)
    assert layers([1, 7, 8], 8) == (1, 7)
    for num_layers in range(1, 100):
        sampled = layers("sampled", num_layers)
        assert sampled == Config().layers_with_statistics(num_layers)
        assert 0 < len(sampled) <= 2
        assert set(sampled) <= set(range(num_layers))


def test_what_is_shown_of_a_store_has_no_secret() -> None:
    url = parse_config({"tiers": {"remote": "redis://me:secret@host:6379/0?password=other"}})
    found = describe(url)
    assert found["tiers"]["remote"]["url"] == "redis://host:6379/0"
    assert "secret" not in str(found)
    assert found["max_variants"] == Config().max_variants
    assert describe(Config())["tiers"] is None
