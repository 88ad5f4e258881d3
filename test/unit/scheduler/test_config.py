from __future__ import annotations

import dataclasses

import pytest

from chunk_cache.config import Config, parse_config
from chunk_cache.errors import ChunkCacheConfigError


def test_empty_object_is_the_defaults() -> None:
    assert parse_config({}) == Config()


def test_every_field_can_be_given() -> None:
    given = {
        "max_variants": 10,
        "max_variants_per_chunk": 2,
        "max_path_tokens": 1000,
        "max_generation": 0,
        "min_reuse_len": 16,
        "kernel": "torch",
    }
    assert dataclasses.asdict(parse_config(given)) == given
    assert set(given) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "--chunk-cache-config: [] is not an object; "),
        (None, "--chunk-cache-config: None is not an object; "),
        (
            {"max_variant": 1},
            "--chunk-cache-config: max_variant: unknown key 'max_variant'; known keys: max_variants, ",
        ),
        ({"max_variants": 0}, "--chunk-cache-config: max_variants: 0 is not an integer of at least 1; "),
        ({"max_variants": True}, "--chunk-cache-config: max_variants: True is not an integer"),
        ({"max_variants_per_chunk": 1.0}, "--chunk-cache-config: max_variants_per_chunk: 1.0 is not an integer"),
        ({"max_path_tokens": "9"}, "--chunk-cache-config: max_path_tokens: '9' is not an integer"),
        ({"max_generation": -1}, "--chunk-cache-config: max_generation: -1 is not an integer of at least 0"),
        ({"min_reuse_len": None}, "--chunk-cache-config: min_reuse_len: None is not an integer"),
        ({"kernel": "cuda"}, "unknown kernel 'cuda'; known kernels: auto, torch, triton"),
        ({"kernel": []}, "unknown kernel []"),
    ],
)
def test_bad_values_name_the_key_and_the_remedy(value: object, message: str) -> None:
    with pytest.raises(ChunkCacheConfigError) as caught:
        parse_config(value)
    assert message in str(caught.value)
