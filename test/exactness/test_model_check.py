"""A model that KV cannot be moved in, or rows computed by themselves, is refused by its layer; others are served."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from exactness import broken_models
from exactness.broken_models import LAYER, start, start_ranks
from exactness.runner import MODEL_DIR
from tiny_models import make_model

SMALL = {"max_total_tokens": 2048}
BROKEN = {
    "another_base": f"rotary embedding of layer {LAYER}",
    "interleaved": f"keys of layer {LAYER}, moved by",
    "scaling_dropped": f"rotary embedding of layer {LAYER}",
    "undeclared_window": f"behind layer {LAYER} rows computed by our kernel differ",
    "score_mod": "its attention takes score_mod",
}


def tiny(kind: str = "llama", **fields: Any) -> Path:
    name = "-".join([kind, *map(str, fields.values())])
    return make_model(kind, MODEL_DIR / f"check-{name}", layers=4, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_wrong_layer_is_named(how: str) -> None:
    rope = "llama3" if how == "scaling_dropped" else None
    sentence = start(tiny(rope=rope), getattr(broken_models, how), dtype="float32", **SMALL)
    assert isinstance(sentence, str)
    assert BROKEN[how] in sentence
    assert "\n" not in sentence


@pytest.mark.slow
def test_a_wrong_layer_is_served_where_the_operator_says_so() -> None:
    found = start(tiny(), broken_models.interleaved, {"models": "any"}, dtype="float32", **SMALL)
    assert isinstance(found, float)


@pytest.mark.slow
@pytest.mark.parametrize("models", ["checked", "any"])
def test_ranks_decide_alike(models: str) -> None:
    """One of two has a wrong layer; alone it would leave the check, and the other wait for its part of a forward."""
    broken, config = broken_models.interleaved_on_one_rank, {"models": models}
    found = start_ranks(2, tiny(), broken, config, within_s=300, dtype="float32", **SMALL)
    if models == "any":
        assert all(isinstance(one, float) for one in found), found
    else:
        assert found[0] == found[1]
        assert BROKEN["interleaved"] in str(found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("qwen3_moe", dtype) for dtype in ("float32", "bfloat16")),
        ("gpt_oss", "bfloat16"),
        pytest.param("qwen3_moe", "float16", marks=pytest.mark.all),
    ],
)
def test_rounding_is_no_difference(kind: str, dtype: str) -> None:
    assert isinstance(start(tiny(kind, dtype=getattr(torch, dtype)), dtype=dtype, **SMALL), float)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_of_a_sharp_model_is_no_difference(dtype: str) -> None:
    """Its own forward moves by more than usual rounding where the prompt stands elsewhere."""
    model = make_model("llama_sharp", MODEL_DIR / "check-sharp", layers=12, hidden=256, max_position=16384)
    assert isinstance(start(model, dtype=dtype, **SMALL), float)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo2", "starcoder2"])
def test_a_decoder_may_be_called_by_keyword(kind: str) -> None:
    """Its arguments are looked at before rows leave."""
    assert isinstance(start(tiny(kind), **SMALL), float)


@pytest.mark.slow
def test_embeddings_may_be_made_in_front_of_the_decoder() -> None:
    """They need not be those that it makes of ids."""
    assert isinstance(start(tiny(), broken_models.early_embeddings, dtype="float32", **SMALL), float)


WITHOUT = {
    "positions_that_are_shared": ("gemma3_mm", "row_positions: those of request 0 must ascend within"),
    "columns_of_the_lengths": ("qwen3_vl", "keys of layer 0, moved by"),
    "columns_that_stay": ("qwen2_5_vl", "must match the size of tensor"),
    "without_sinks": ("gpt_oss", "behind layer 0 rows computed by our kernel differ"),
    "rows_of_the_decoder": ("qwen3_vl", "its decoder is given input_deepstack_embeds of every token"),
}


@pytest.mark.slow
def test_a_model_may_add_to_the_positions_that_it_is_given() -> None:
    found = start(tiny("gemma3_mm"), broken_models.positions_of_the_batch, dtype="float32", **SMALL)
    assert isinstance(found, float)


@pytest.mark.slow
@pytest.mark.parametrize("how", WITHOUT)
def test_what_the_check_would_find_if_ours_were_broken(how: str) -> None:
    kind, found = WITHOUT[how]
    assert found in str(start(tiny(kind), getattr(broken_models, how), dtype="float32", **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_mm", "mistral3", "qwen2_5_vl", "kimi_k25"])
def test_a_text_of_a_model_that_sees_images_is_no_difference(kind: str) -> None:
    assert isinstance(start(tiny(kind), config={"attention": "runs"}, dtype="float32", **SMALL), float)


@pytest.mark.slow
def test_a_server_of_one_request_at_a_time_starts() -> None:
    assert isinstance(start(tiny(), max_running_requests=1, **SMALL), float)


@pytest.mark.slow
def test_a_layer_may_have_a_rotation_of_its_own() -> None:
    found = start(tiny(rope="llama3"), broken_models.another_base_and_says_so, {"attention": "runs"}, **SMALL)
    assert isinstance(found, float)


@pytest.mark.slow
def test_a_cap_that_the_backend_leaves_out_is_named() -> None:
    assert "--attention-backend" in str(start(tiny("gemma2"), **SMALL))


def real_models() -> list[Path]:
    """Hugging Face folders of pretrained models."""
    folder = os.environ.get("REAL_MODELS")
    if folder is None:
        pytest.skip("the variable REAL_MODELS does not name a folder with Hugging Face folders of pretrained models")
    models = [path for path in sorted(Path(folder).iterdir()) if (path / "config.json").exists()]
    assert models, folder
    return models


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["rows", "runs"])
def test_real_models_pass(attention: str, dtype: str) -> None:
    for model in real_models():
        found = start(model, config={"attention": attention}, dtype=dtype, context_length=4096, **SMALL)
        assert isinstance(found, float), f"{model.name}: {found}"
        print(f"{model.name}, {dtype}, {attention}: {found:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["another_base", "interleaved", "undeclared_window"])
def test_a_wrong_layer_of_a_real_model_is_named(how: str) -> None:
    for model in real_models():
        sentence = start(model, getattr(broken_models, how), dtype="bfloat16", context_length=4096, **SMALL)
        assert BROKEN[how] in str(sentence), model.name
