"""What all media share: names, fingerprints, the bytes of a description, and the throttle."""

from __future__ import annotations

import base64
import json
import math
import os
import struct
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.lora.lora_registry import LoRARef

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.need import Need
from chunk_cache.index.reusability import share_to_fix, use_weight
from chunk_cache.index.variant import NodeHome
from sgl_kernel_ext.rotary import RotarySpec
from sglang_chunk_cache.kv.fingerprint import FORMAT_VERSION, adapter_settings, rotary_digest, weights_digest
from sglang_chunk_cache.kv.state_layout import StateLayout
from sglang_chunk_cache.kv.stored_variant import TIER_REASONS, TierError
from sglang_chunk_cache.tiers.host import HostMedium
from sglang_chunk_cache.tiers.record import ALIGNMENT, MAGIC, PREFIX, decode, encode
from sglang_chunk_cache.tiers.throttled import Throttled
from unit.tiers.medium_suite import (
    FINGERPRINT,
    KEY,
    OTHER_KEY,
    STATES,
    MediumSuite,
    OpenMedium,
    assert_same,
    make_stored,
)

INFO = make_stored(context=[KEY, OTHER_KEY]).info


class TestNames:
    def test_differ_by_position_generation_and_context(self) -> None:
        changes: list[dict[str, Any]] = [
            {},
            {"start": 8},
            {"generation": 1},
            {"start": 70, "generation": 0},
            {"context": ()},
            {"context": (OTHER_KEY, KEY)},
            {"context": (KEY + OTHER_KEY,)},
        ]
        assert len({replace(INFO, **change).name for change in changes}) == len(changes)

    def test_are_stable(self) -> None:
        """They are file names: another value is another format."""
        assert INFO.name == "a6d8619dd3abb9ac"
        assert INFO.entry_id == (KEY, INFO.name)
        assert str(INFO.entry_id) == f"{KEY.hex()}-{INFO.name}"

    def test_equality_is_of_all_fields(self) -> None:
        same = make_stored(context=[KEY, OTHER_KEY]).info
        assert same == INFO
        for change in ({"start": 8}, {"token_ids": array("q", [1])}, {"statistics": None}, {"payload_len": 1}):
            assert replace(INFO, **change) != INFO

    def test_reasons_are_fixed(self) -> None:
        error = TierError("full", "/disk", "no space left", "free some")
        assert (error.reason, str(error)) == ("full", "/disk: no space left; free some")
        with pytest.raises(AssertionError):
            TierError("tired", "", "", "")
        assert len(set(TIER_REASONS)) == len(TIER_REASONS)


class TestFingerprint:
    def test_every_field_but_the_label_is_in_the_digest(self) -> None:
        changes: dict[str, Any] = {
            "weights": "x",
            "dtype": "float16",
            "num_layers": 4,
            "kv_heads": 3,
            "head_dim": 16,
            "v_head_dim": 16,
            "rotary": "x",
            "tp_rank": 1,
            "tp_size": 2,
            "settings": (("quantization", "fp8"),),
            "states": STATES,
        }
        with_states = replace(FINGERPRINT, states=STATES)
        assert set(with_states.describe()) - set(changes) == {"format", "byte_order", "model"}
        digests = {replace(FINGERPRINT, **{name: value}).digest for name, value in changes.items()}
        assert len(digests | {FINGERPRINT.digest}) == len(changes) + 1
        assert replace(FINGERPRINT, model="other").digest == FINGERPRINT.digest
        assert len(FINGERPRINT.digest) == 32
        json.dumps(with_states.describe())

    @pytest.mark.skipif(sys.byteorder == "big", reason="of another byte order")
    def test_is_stable(self) -> None:
        """It is the name of a folder: with another value, what is stored is not found any more."""
        assert FINGERPRINT.digest == "a53744b28219cd358d8e087e32111bbb"

    def test_every_field_of_the_layers_with_states_is_in_the_digest(self) -> None:
        changes: dict[str, Any] = {
            "layer_ids": (0, 1, 2),
            "heads": 1,
            "key_size": 3,
            "value_size": 4,
            "channels": 6,
            "width": 2,
            "tail_dtype": "float32",
            "state_dtype": "bfloat16",
            "seam_len": 64,
        }
        assert {one.name for one in fields(STATES)} == set(changes)
        layouts = [STATES, *(replace(STATES, **{name: value}) for name, value in changes.items())]
        assert len({replace(FINGERPRINT, states=layout).digest for layout in layouts}) == len(layouts)

    @pytest.mark.parametrize("states", [None, STATES])
    def test_bytes_and_tokens_of_an_entry(self, states: StateLayout | None) -> None:
        fingerprint = replace(FINGERPRINT, states=states)
        num_bytes = fingerprint.payload_len(7)
        assert num_bytes == FINGERPRINT.payload_len(7) + (0 if states is None else states.num_bytes)
        assert num_bytes == make_stored(fingerprint, length=7).info.payload_len
        assert [fingerprint.num_tokens(one) for one in (0, num_bytes)] == [0, 7]

    def test_rotary(self) -> None:
        spec = RotarySpec(8, True, torch.tensor([1.0, 0.5, 0.25, 0.125]))
        others = [
            replace(spec, is_neox=False),
            replace(spec, magnitude=1.5),
            replace(spec, inv_freq=torch.nextafter(spec.inv_freq, torch.tensor(2.0))),
            RotarySpec(6, True, spec.inv_freq[:3]),
        ]
        assert len({rotary_digest([each]) for each in (spec, replace(spec), *others)}) == 5


class TestAdapters:
    def test_one_that_was_trained_anew_under_its_name_is_another(self, tmp_path: Path) -> None:
        """SGLang names an adapter of --lora-paths by name and path alone."""
        refs = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
            write_safetensors(folder / "adapter_model.safetensors", {"layer": 4000})
            path = str(folder)
            refs.append(LoRARef(lora_id=LoRARef.deterministic_id(name, path), lora_name=name, lora_path=path))
        before = adapter_settings(refs)
        assert before == adapter_settings(refs[::-1])
        assert len(dict(before)) == 2
        write_safetensors(tmp_path / "a" / "adapter_model.safetensors", {"layer": 4000})
        trained = adapter_settings(refs)
        (tmp_path / "a" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
        assert len({before, trained, adapter_settings(refs)}) == 3
        digests = {replace(FINGERPRINT, settings=settings).digest for settings in (before, trained, ())}
        assert len(digests) == 3


class TestWeightsDigest:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "config.json").write_text('{"hidden_size": 8}')
        write_safetensors(tmp_path / "model.safetensors", {f"layer{i}": 300_000 for i in range(30)})
        (tmp_path / "extra.bin").write_bytes(os.urandom(3 << 20))
        return tmp_path

    def test_same_wherever_it_lies(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        digest = weights_digest(str(folder))
        assert digest == weights_digest(str(folder))
        (folder / "README.md").write_text("not a part of it")
        link = tmp_path_factory.mktemp("other") / "link"
        link.symlink_to(folder)
        assert weights_digest(str(link)) == digest

    @pytest.mark.parametrize("tensor", [0, 7, 14, 29])
    def test_one_tensor_was_trained(self, folder: Path, tensor: int) -> None:
        """30 tensors of 300 kB: also one that no block at a fixed distance would hit in full."""
        path = folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        begin = len(raw) - (30 - tensor) * 300_000
        before = weights_digest(str(folder))
        raw[begin : begin + 300_000] = os.urandom(300_000)
        path.write_bytes(raw)
        assert weights_digest(str(folder)) != before

    @pytest.mark.parametrize(
        "change",
        [
            lambda folder: (folder / "config.json").write_text('{"hidden_size": 9}'),
            lambda folder: (folder / "extra.bin").rename(folder / "other.bin"),
            lambda folder: (folder / "extra.bin").unlink(),
            lambda folder: os.truncate(folder / "extra.bin", (3 << 20) - 1),
            lambda folder: (folder / "more.safetensors").write_bytes(b""),
        ],
    )
    def test_files(self, folder: Path, change: Callable[[Path], Any]) -> None:
        before = weights_digest(str(folder))
        change(folder)
        assert weights_digest(str(folder)) != before

    @pytest.mark.parametrize("header", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x03" + bytes(7) + b"{}x"])
    def test_damaged_header(self, folder: Path, header: bytes) -> None:
        (folder / "model.safetensors").write_bytes(header)
        assert len(weights_digest(str(folder))) == 32

    def test_one_file_is_a_model_too(self, folder: Path) -> None:
        assert weights_digest(str(folder / "extra.bin")) != weights_digest(str(folder / "model.safetensors"))

    def test_hub_name_without_snapshot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        names = [
            ("someone/not-there", None),
            ("someone/not-there", "v2"),
            ("someone/else", None),
            ("no such name!", None),
        ]
        assert len({weights_digest(name, revision) for name, revision in names}) == 4


class TestRecord:
    @given(
        tokens=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40),
        context=st.lists(st.binary(min_size=16, max_size=16), max_size=4),
        start=st.integers(0, 2**40),
    )
    def test_round_trip(self, tokens: list[int], context: list[bytes], start: int) -> None:
        info = replace(make_stored(length=len(tokens), context=context).info, token_ids=array("q", tokens), start=start)
        raw = encode(FINGERPRINT, info, [1, 2, 2**32 - 1], "c0ffee")
        assert len(raw) % ALIGNMENT == 0
        record = decode(raw, FINGERPRINT, "")
        assert (record.info, record.checksums, record.place) == (info, (1, 2, 2**32 - 1), "c0ffee")

    @given(raw=st.binary(max_size=200))
    def test_any_bytes(self, raw: bytes) -> None:
        with pytest.raises(TierError):
            decode(raw, FINGERPRINT, "")

    @settings(max_examples=30)
    @given(
        value=st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
    )
    def test_any_json_with_a_good_checksum(self, value: Any) -> None:
        """A store may hold what somebody made on purpose."""
        fields = self.fields()
        for name in fields:
            changed = fields | {name: value}
            if changed != fields:
                try:
                    decode(self.framed(changed), FINGERPRINT, "")
                except TierError as error:
                    if error.reason not in ("corrupt", "mismatch"):
                        raise

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("k_shape", [3, 5, 2, 9]),
            ("v_shape", [3, 6, 2, 4]),
            ("dtype", "float32"),
            ("checksums", [1, 2]),
            ("checksums", [[1], [2], [3]]),
            ("tokens", ""),
            ("tokens", "AAAA"),  # half of a number
            ("tokens", "not base64"),
            ("start", -1),
            ("start", 2**63),
            ("start", math.inf),
            ("generation", -1),
            ("generation", 2**63),
            ("key", "00"),
            ("key", "no hex"),
            ("context", ["00"]),
            ("context", []),  # of a variant with statistics of two
            ("context", KEY.hex()),
            ("statistics", {}),
            ("statistics", []),
            ("cci", None),
            ("cci", 0.4),
            ("cci", math.nan),
        ],
    )
    def test_what_no_server_writes_is_corrupt(self, name: str, value: Any) -> None:
        self.assert_corrupt(self.fields() | {name: value})

    @pytest.mark.parametrize(("name", "length"), [("outside", 4), ("received", 6), ("inter", 1)])
    def test_statistics_of_another_length_are_corrupt(self, name: str, length: int) -> None:
        self.assert_corrupt(self.with_statistics(**{name: [0.5] * length}))

    @pytest.mark.parametrize(
        "inter", [(math.nan, 1.0), (math.inf, 1.0), (math.inf, -math.inf), (-0.7, 0.2), (3e38, -3e38), (0.0, 0.0)]
    )
    def test_statistics_that_no_forward_gives_cost_nothing_but_their_use(self, inter: tuple[float, float]) -> None:
        """Variants are compared by them, and their uses counted, in numbers that stay finite."""
        per_token = [math.nan, math.inf, -math.inf, -1.0, 0.5]
        fields = self.with_statistics(inter=inter, outside=per_token, received=per_token)
        info = decode(self.framed(fields), FINGERPRINT, "").info
        index = ChunkIndex(16, 8, 1000)
        for start, generation in ((info.start, 0), (info.start + 1, 1)):
            index.add(
                info.key,
                length=len(info.token_ids),
                start=start,
                generation=generation,
                context=info.context,
                home=NodeHome(info.token_ids, str(start)),
                statistics=info.statistics,
            )
        for context in ([], [KEY], [OTHER_KEY], [OTHER_KEY, KEY], [KEY, OTHER_KEY], [bytes(16)]):
            found = index.lookup(info.key, lambda variant: variant.length, Need(8, tuple(context)))
            assert found.variant is not None
            assert found.unit_cfo is not None
            assert 0.0 <= share_to_fix(found.unit_cfo) <= 1.0
            assert index.touch(found.variant, use_weight(found.unit_cfo, found.variant.length))
        assert all(math.isfinite(variant.reuse_frequency) for variant in index)
        index.check_integrity()

    def with_statistics(self, **values: Sequence[float]) -> dict[str, Any]:
        fields = self.fields()
        for name, numbers in values.items():
            packed = struct.pack(f"<{len(numbers)}f", *numbers)
            fields["statistics"][name] = base64.b64encode(packed).decode()
        return fields

    def assert_corrupt(self, fields: dict[str, Any]) -> None:
        with pytest.raises(TierError) as caught:
            decode(self.framed(fields), FINGERPRINT, "")
        assert caught.value.reason == "corrupt"

    @staticmethod
    def fields() -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(encode(FINGERPRINT, INFO, [1, 2, 3])[20:])
        return fields

    @staticmethod
    def framed(fields: dict[str, Any]) -> bytes:
        text = json.dumps(fields).encode()
        checksum = zlib.crc32(struct.pack("<II", FORMAT_VERSION, len(text)) + text)
        return PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), checksum) + text


class TestThrottled(MediumSuite):
    survives = False

    @pytest.fixture
    def open_medium(self) -> OpenMedium:
        return lambda fingerprint, **kwargs: Throttled(HostMedium(fingerprint, **kwargs), 1e9)

    def test_takes_its_time(self) -> None:
        stored = make_stored(length=50)
        medium = Throttled(HostMedium(FINGERPRINT), bytes_per_s=stored.info.payload_len / 0.3, latency_s=0.1)
        assert medium.name == "host"
        assert seconds(lambda: medium.write(stored)) > 0.39
        assert seconds(lambda: medium.read(stored.info)) > 0.39
        assert seconds(lambda: medium.find(KEY)) > 0.09
        arrived, begun_at = [], time.monotonic()
        for _ in medium.read_layers(stored.info):
            arrived.append(time.monotonic() - begun_at)
        assert all(now > due for now, due in zip(arrived, [0.19, 0.29, 0.39], strict=True)), arrived

    def test_one_pipe_for_all(self) -> None:
        stored = make_stored(length=50)
        medium = Throttled(HostMedium(FINGERPRINT), bytes_per_s=stored.info.payload_len / 0.1)
        medium.write(stored)
        with ThreadPoolExecutor(4) as pool:
            took = seconds(lambda: [assert_same(found, stored) for found in pool.map(medium.read, [stored.info] * 4)])
        assert took > 0.39


def seconds(call: Callable[[], Any]) -> float:
    begun_at = time.monotonic()
    call()
    return time.monotonic() - begun_at


def write_safetensors(path: Path, sizes: dict[str, int]) -> None:
    header, offset = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + os.urandom(offset))
