"""MediumSuite: what every medium promises. The test of a new medium inherits it and says how one is opened.

    class TestMine(MediumSuite):
        @pytest.fixture
        def open_medium(self, tmp_path):
            return lambda fingerprint, **kwargs: MyMedium(tmp_path, fingerprint, **kwargs)

`open_medium` opens the same place each time it is called.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.system_prompt import num_pieces
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.state_layout import StateLayout
from sglang_chunk_cache.kv.stored_variant import StoredVariant, TierError, VariantInfo
from sglang_chunk_cache.tiers.medium import Medium

KEY, OTHER_KEY = bytes(range(16)), bytes(range(100, 116))
FINGERPRINT = Fingerprint(
    weights="w" * 32,
    dtype="bfloat16",
    num_layers=3,
    kv_heads=2,
    head_dim=8,
    v_head_dim=4,
    rotary="r" * 32,
    model="tiny",
)
STATES = StateLayout(
    layer_ids=(0, 1, 3),
    heads=2,
    key_size=4,
    value_size=3,
    channels=5,
    width=3,
    tail_dtype="bfloat16",
    state_dtype="float32",
    seam_len=8,
)
LARGE_STATES = replace(STATES, heads=24, key_size=128, value_size=128)  # all layers are more than a batch
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8")

OpenMedium = Callable[..., Medium]
T = TypeVar("T")


def make_stored(
    fingerprint: Fingerprint = FINGERPRINT,
    *,
    key: bytes = KEY,
    length: int = 5,
    start: int = 7,
    generation: int = 0,
    context: Sequence[bytes] = (),
    seed: int = 0,
    statistics: bool = True,
    system: bytes = bytes(range(16)),
) -> StoredVariant:
    """A variant of random bits, NaN and infinities of the dtype among them."""
    rng = np.random.default_rng(seed)
    numbers = rng.random((2, length), dtype=np.float32)
    numbers[0, 0] = np.nan
    inter = rng.random(len(context), dtype=np.float32)
    on_system = rng.random(num_pieces(system), dtype=np.float32)
    info = VariantInfo(
        key=key,
        token_ids=array("q", rng.integers(0, 2**40, length).tolist()),
        start=start,
        generation=generation,
        context=tuple(context),
        statistics=ChunkStatistics(numbers[0], numbers[1], inter, 0.7, on_system) if statistics else None,
        payload_len=fingerprint.payload_len(length),
        system=system,
    )
    k, v = fingerprint.empty(length)
    stored = StoredVariant(info, k, v, None if fingerprint.states is None else fingerprint.states.empty())
    for part in (k, v, *(part for parts in stored.layers[len(k) :] for part in parts)):
        part.view(torch.uint8).copy_(
            torch.from_numpy(rng.integers(0, 256, part.view(torch.uint8).shape, dtype=np.uint8))
        )
    return stored


def assert_same(found: StoredVariant, expected: StoredVariant) -> None:
    """Bit for bit."""
    assert found.info == expected.info
    for layer, other_layer in zip(found.layers, expected.layers, strict=True):
        for mine, other in zip(layer, other_layer, strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def assert_sound(medium: Medium, *written: StoredVariant) -> None:
    """What is found of their keys is just what was written, and can be read."""
    for key in {stored.info.key for stored in written}:
        expected = [stored for stored in written if stored.info.key == key]
        expected.sort(key=lambda stored: (stored.info.generation, stored.info.name))
        assert medium.find(key) == [stored.info for stored in expected]
        for stored in expected:
            assert_same(medium.read(stored.info), stored)


def unless_missing(call: Callable[[], T]) -> T | None:
    """What it returns; None where somebody else has just deleted or replaced the entry."""
    try:
        return call()
    except TierError as error:
        if error.reason != "missing":
            raise
        return None


def act_at_random(medium: Medium, rng: random.Random, stored: StoredVariant) -> list[StoredVariant]:
    """Writes it, or deletes it, or reads what there is of its chunk, which is returned."""
    action = rng.choice("wwrrrd")
    if action == "w":
        medium.write(stored)
    elif action == "d":
        medium.delete(stored.info.entry_id)
    else:
        found = [unless_missing(partial(medium.read, info)) for info in medium.find(stored.info.key)]
        return [one for one in found if one is not None]
    return []


def reason_of(call: Callable[[], Any]) -> str:
    """The reason of the `TierError` that a call ends with."""
    with pytest.raises(TierError) as caught:
        call()
    return caught.value.reason


class MediumSuite:
    survives: ClassVar[bool] = True
    """Whether entries outlive the object."""
    lists: ClassVar[bool] = True
    """Whether `scan` tells what is there; what cannot be listed tells nothing."""

    @pytest.fixture
    def open_medium(self) -> OpenMedium:
        raise NotImplementedError

    @pytest.fixture
    def medium(self, open_medium: OpenMedium) -> Iterator[Medium]:
        opened = open_medium(FINGERPRINT)
        yield opened
        opened.close()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_round_trip(self, open_medium: OpenMedium, dtype: str) -> None:
        fingerprint = replace(FINGERPRINT, dtype=dtype)
        medium, stored = open_medium(fingerprint), make_stored(fingerprint, context=[OTHER_KEY, KEY])
        assert medium.find(KEY) == []
        medium.write(stored)
        assert_sound(medium, stored)

    @pytest.mark.parametrize("length", [1, 33])
    def test_length(self, medium: Medium, length: int) -> None:
        stored = make_stored(length=length, statistics=False)
        medium.write(stored)
        assert_sound(medium, stored)

    def test_larger_than_a_batch(self, open_medium: OpenMedium) -> None:
        fingerprint = replace(FINGERPRINT, kv_heads=8, head_dim=128, v_head_dim=128, num_layers=4)
        medium, stored = open_medium(fingerprint), make_stored(fingerprint, length=700)
        medium.write(stored)
        assert_sound(medium, stored)

    @pytest.mark.parametrize("states", [STATES, LARGE_STATES])
    def test_what_a_chunk_does_to_states_is_a_part_of_it(self, open_medium: OpenMedium, states: StateLayout) -> None:
        fingerprint = replace(FINGERPRINT, states=states)
        medium, stored = open_medium(fingerprint), make_stored(fingerprint)
        medium.write(stored)
        assert_sound(medium, stored)
        assert [layer for layer, _, _ in medium.read_layers(stored.info)] == list(range(FINGERPRINT.num_layers))
        other = open_medium(replace(FINGERPRINT, states=replace(states, seam_len=16)))
        assert other.find(KEY) == []
        self.assert_fails(other, stored.info, "missing")

    def test_nan_keeps_its_bits(self, medium: Medium) -> None:
        stored = make_stored()
        stored.k.fill_(float("nan"))
        stored.k.view(torch.int16)[..., 0] = 0x7F81  # a signalling NaN
        medium.write(stored)
        assert_sound(medium, stored)

    def test_variants_of_one_chunk(self, medium: Medium) -> None:
        variants = [
            make_stored(start=start, generation=generation, context=context, seed=generation)
            for start in (0, 9)
            for generation in (2, 0, 1)
            for context in ([], [KEY], [KEY, OTHER_KEY], [OTHER_KEY, KEY])
        ]
        other = make_stored(key=OTHER_KEY)
        for stored in (*variants, other):
            medium.write(stored)
        assert_sound(medium, *variants, other)

    def test_write_again_is_fine(self, medium: Medium) -> None:
        stored = make_stored()
        for _ in range(2):
            medium.write(stored)
            assert_sound(medium, stored)

    def test_write_replaces(self, medium: Medium) -> None:
        old, new = make_stored(), make_stored()
        new.k.zero_()
        medium.write(old)
        medium.write(new)
        assert_sound(medium, new)

    def test_what_was_written_is_a_copy(self, medium: Medium) -> None:
        stored, same = make_stored(), make_stored()
        medium.write(stored)
        stored.k.zero_()
        assert_same(medium.read(same.info), same)

    def test_delete(self, medium: Medium) -> None:
        gone, kept = make_stored(), make_stored(start=0)
        medium.write(gone)
        medium.write(kept)
        assert medium.delete(gone.info.entry_id)
        assert not medium.delete(gone.info.entry_id)
        assert_sound(medium, kept)
        self.assert_fails(medium, gone.info, "missing")
        medium.write(gone)
        assert_sound(medium, gone, kept)

    def test_delete_while_layers_are_read(self, medium: Medium) -> None:
        stored = make_stored()
        medium.write(stored)
        layers = medium.read_layers(stored.info)
        next(layers)
        medium.delete(stored.info.entry_id)
        rest = unless_missing(lambda: list(layers))
        assert rest is None or len(rest) == FINGERPRINT.num_layers - 1
        assert medium.find(KEY) == []

    def test_scan(self, medium: Medium) -> None:
        assert list(medium.scan()) == []
        written = [make_stored(key=bytes([i]) * 16, start=i % 3, seed=i) for i in range(20)]
        for stored in written:
            medium.write(stored)
        medium.delete(written.pop().info.entry_id)
        expected = sorted((stored.info for stored in written), key=lambda info: info.entry_id)
        for known in ((), [info.key for info in expected]):
            found = sorted(medium.scan(known), key=lambda info: info.entry_id)
            assert found == (expected if self.lists or known else [])

    def test_a_note_beside_the_entries(self, open_medium: OpenMedium) -> None:
        first, stored = open_medium(FINGERPRINT), make_stored()
        assert first.read_note() is None
        first.write(stored)
        for note in (b"one", b"another"):
            first.write_note(note)
        assert list(first.scan()) == ([stored.info] if self.lists else []), "it is no entry"
        if self.survives:
            assert first.read_note() == open_medium(FINGERPRINT).read_note() == b"another"
            assert open_medium(replace(FINGERPRINT, weights="x")).read_note() is None

    def test_opened_again(self, open_medium: OpenMedium) -> None:
        if not self.survives:
            pytest.skip("does not outlive the object")
        first, stored = open_medium(FINGERPRINT), make_stored()
        first.write(stored)
        first.close()
        second = open_medium(FINGERPRINT)
        assert list(second.scan()) == ([stored.info] if self.lists else [])
        assert_sound(second, stored)

    def test_two_at_one_place(self, open_medium: OpenMedium) -> None:
        if not self.survives:
            pytest.skip("belongs to one object")
        first, second, stored = open_medium(FINGERPRINT), open_medium(FINGERPRINT), make_stored()
        first.write(stored)
        assert_sound(second, stored)
        assert second.delete(stored.info.entry_id)
        assert first.find(KEY) == []
        self.assert_fails(first, stored.info, "missing")

    @pytest.mark.parametrize(
        "change", [{"weights": "x"}, {"rotary": "x"}, {"tp_rank": 1}, {"settings": (("quantization", "fp8"),)}]
    )
    def test_another_fingerprint_finds_nothing(self, open_medium: OpenMedium, change: dict[str, Any]) -> None:
        mine, other, stored = open_medium(FINGERPRINT), open_medium(replace(FINGERPRINT, **change)), make_stored()
        mine.write(stored)
        assert other.find(KEY) == list(other.scan()) == []
        self.assert_fails(other, stored.info, "missing")
        assert not other.delete(stored.info.entry_id)
        assert_sound(mine, stored)

    def test_other_tokens_are_a_mismatch(self, medium: Medium) -> None:
        stored = make_stored()
        medium.write(stored)
        tokens = array("q", stored.info.token_ids)
        tokens[-1] += 1
        self.assert_fails(medium, replace(stored.info, token_ids=tokens), "mismatch")
        assert_sound(medium, stored)  # it is not damaged

    def test_read_layers(self, medium: Medium) -> None:
        stored = make_stored()
        medium.write(stored)
        layers = list(medium.read_layers(stored.info))
        assert [layer for layer, _, _ in layers] == list(range(FINGERPRINT.num_layers))
        k, v = (torch.stack(parts) for parts in list(zip(*layers, strict=True))[1:])
        assert_same(StoredVariant(stored.info, k, v), stored)

    @pytest.mark.parametrize("change", [{"num_layers": 2}, {"states": STATES}])
    def test_wrong_shape_is_a_mistake_of_the_caller(self, medium: Medium, change: dict[str, Any]) -> None:
        with pytest.raises(AssertionError, match="in a medium for"):
            medium.write(make_stored(replace(FINGERPRINT, **change)))

    def test_threads(self, medium: Medium) -> None:
        """Writers, readers and deleters of few entries: what is read is one of what was written, whole."""
        versions = {(i, seed): make_stored(start=i, seed=0) for i in range(3) for seed in range(3)}
        for (_, seed), stored in versions.items():
            stored.k.view(torch.uint8).fill_(seed)
            stored.v.view(torch.uint8).fill_(seed)
        num_read = [0]
        lock = threading.Lock()

        def work(worker: int) -> None:
            rng = random.Random(worker)
            for _ in range(12):
                for found in act_at_random(medium, rng, versions[rng.randrange(3), rng.randrange(3)]):
                    values = torch.cat([part.view(torch.uint8).flatten() for part in (found.k, found.v)])
                    assert len(values.unique()) == 1
                    with lock:
                        num_read[0] += 1

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, i) for i in range(4)]:
                done.result()
        assert num_read[0]
        for info in medium.find(KEY):
            medium.read(info)

    @staticmethod
    def assert_fails(medium: Medium, info: VariantInfo, reason: str) -> None:
        assert reason_of(lambda: medium.read(info)) == reason
        assert reason_of(lambda: list(medium.read_layers(info))) in (reason, "missing")
