"""Fingerprint: everything that must agree for stored KV to be usable by a server.

Fingerprint       the value; its `digest` names the folder or the key space that an entry lies in
weights_digest    which weights a model folder holds, without reading all of them
adapter_settings  the same for LoRA adapters
rotary_digest     how keys were turned
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sgl_kernel_ext.rotary import RotarySpec
from sgl_kernel_ext.transfer import host_buffer
from sglang_chunk_cache.kv.state_layout import StateLayout

FORMAT_VERSION = 3
"""Version of the bytes that media write; part of the fingerprint, so entries of another version are never found."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BLOCK_LEN = 4096
_EDGE_LEN = 1 << 20
_NUM_STRIDED = 64
_MAX_HEADER_LEN = 100 << 20  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the KV of one rank depends on. With equal digests, bytes of one server mean the same to the other."""

    weights: str
    """`weights_digest` of the model."""
    dtype: str
    """Dtype of the KV, as torch names it: "bfloat16", "float8_e4m3fn", "uint8", ..."""
    num_layers: int
    kv_heads: int
    """Heads of this rank."""
    head_dim: int
    v_head_dim: int
    rotary: str
    """`rotary_digest` of the model."""
    tp_rank: int = 0
    tp_size: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    """Whatever else changes the KV that this server computes: dtype of the weights, quantization."""
    states: StateLayout | None = None
    """Layers of this rank that keep states; None = there are none, and the digest leaves the field out."""
    model: str = field(default="", compare=False)
    """Name for people; neither compared nor in the digest."""

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.kv_heads, self.head_dim, self.v_head_dim)
        assert min(sizes) > 0, f"layers, heads and dimensions must be positive, not {sizes}"
        assert isinstance(getattr(torch, self.dtype, None), torch.dtype), f"torch has no dtype {self.dtype!r}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def digest(self) -> str:
        """Hex of 16 bytes."""
        return _digest(self)

    def describe(self) -> dict[str, Any]:
        """All of it, for people and for JSON; all but "model" is in the digest."""
        described = {
            "format": FORMAT_VERSION,
            "byte_order": sys.byteorder,
            **asdict(self),
            "settings": [list(pair) for pair in self.settings],
        }
        if self.states is None:
            del described["states"]
        return described

    @property
    def layer_groups(self) -> tuple[range, ...]:
        """Layers of an entry, those of equal size together: first those with KV, then those that keep states."""
        num_states = 0 if self.states is None else len(self.states.layer_ids)
        groups = range(self.num_layers), range(self.num_layers, self.num_layers + num_states)
        return tuple(group for group in groups if group)

    @property
    def num_stored_layers(self) -> int:
        """Layers of an entry."""
        return self.layer_groups[-1].stop

    def part_lens(self, layer: int, num_tokens: int) -> tuple[int, ...]:
        """Bytes of K and V of a layer of an entry, or of operator, offset and tail of one that keeps states."""
        if layer >= self.num_layers:
            assert self.states is not None, f"no layer {layer}"
            return self.states.part_lens
        return tuple(num_tokens * self.kv_heads * dim * self.torch_dtype.itemsize for dim in self._dims)

    def payload_len(self, num_tokens: int) -> int:
        """Bytes of an entry of `num_tokens` tokens: K and V of all layers, and what the tokens do to states."""
        return self.num_layers * self.layer_len(num_tokens) + self._state_len

    def num_tokens(self, payload_len: int) -> int:
        """Tokens of an entry of so many bytes; 0 of none."""
        return max(0, payload_len - self._state_len) // (self.num_layers * self.layer_len(1))

    def layer_len(self, num_tokens: int) -> int:
        """Bytes of K and V of one layer."""
        return sum(self.part_lens(0, num_tokens))

    def empty_layer(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[num_tokens, kv_heads, head_dim]` and V `[..., v_head_dim]` on the CPU, not initialised."""
        k, v = (torch.empty(num_tokens, self.kv_heads, dim, dtype=self.torch_dtype) for dim in self._dims)
        return k, v

    def empty(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[num_layers, num_tokens, kv_heads, head_dim]` and V in memory for copies to a GPU, not initialised."""
        shapes = ((self.num_layers, num_tokens, self.kv_heads, dim) for dim in self._dims)
        k, v = (host_buffer(shape, self.torch_dtype) for shape in shapes)
        return k, v

    @property
    def _state_len(self) -> int:
        return 0 if self.states is None else self.states.num_bytes

    @property
    def _dims(self) -> tuple[int, int]:
        return self.head_dim, self.v_head_dim


@lru_cache(maxsize=16)
def _digest(fingerprint: Fingerprint) -> str:
    """Cached, because every entry that is read is compared with it."""
    described = {name: value for name, value in fingerprint.describe().items() if name != "model"}
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def rotary_digest(specs: Sequence[RotarySpec | None]) -> str:
    """Hex of 16 bytes over what each layer has: frequencies (as float64), pairing, dimensions and magnitude."""
    hasher = hashlib.blake2b(digest_size=16)
    distinct = dict.fromkeys(specs)
    for spec in filter(None, distinct):
        hasher.update(spec.inv_freq.detach().to("cpu", torch.float64).numpy().astype("<f8").tobytes())
        hasher.update(json.dumps([bool(spec.is_neox), int(spec.rotary_dim), float(spec.magnitude)]).encode())
    if len(distinct) > 1:
        order = list(distinct)
        hasher.update(json.dumps([None if spec is None else order.index(spec) for spec in specs]).encode())
    return hasher.hexdigest()


def weights_digest(model_path: str, revision: str | None = None) -> str:
    """Hex of 16 bytes that tells the weights of one model folder from those of another.

    It hashes config.json (of an adapter adapter_config.json) and, of every file of weights, its name, its size, its
    first and last MiB and 63 blocks of 4 KiB between; of a safetensors file also its header and three blocks of 4 KiB
    of every tensor, so that a fine-tune of the same shape differs even if it changed one tensor only. So it reads 2 MiB
    and some blocks per file.

    Limits: an edit of a few values between the blocks is not seen. The files are read, not what the server made of
    them: quantization at load, or weights that were replaced while it runs, belong into `Fingerprint.settings`.

    Args:
        model_path: a folder, one file of weights (GGUF), or a name on the Hugging Face hub. For a name, the snapshot in
            the local cache is read; nothing is downloaded. Without a snapshot, only name and revision are hashed: a new
            commit on the same branch is then not seen.
        revision: of a hub name.

    Raises:
        OSError: a file cannot be read.
    """
    path = Path(model_path)
    if not path.exists():
        snapshot = _local_snapshot(model_path, revision)
        if snapshot is None:
            return hashlib.blake2b(f"hub:{model_path}@{revision or 'main'}".encode(), digest_size=16).hexdigest()
        path = snapshot
    hasher = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in WEIGHT_SUFFIXES)
    for name, tag in (("config.json", b"config"), ("adapter_config.json", b"adapter")):
        config = path / name
        if config.is_file():
            hasher.update(tag + _framed(config.read_bytes()))
    for file in files:
        hasher.update(_framed(file.name.encode()))
        with file.open("rb", buffering=0) as raw:
            size = raw.seek(0, 2)
            hasher.update(size.to_bytes(8, "little"))
            for offset, length in _samples(raw, size, file.suffix == ".safetensors"):
                raw.seek(offset)
                hasher.update(_framed(raw.read(length)))
    return hasher.hexdigest()


def adapter_settings(adapters: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    """Settings that tell the LoRA adapters of `--lora-paths` from others that once had the same names and paths.

    SGLang names such an adapter by its name and path alone, so its chunks keep their keys when it is trained anew. An
    adapter that is loaded later gets a name that is never used again.

    Args:
        adapters: SGLang's `LoRARef`s.
    """
    return tuple(sorted((f"adapter {one.lora_id}", weights_digest(one.lora_path)) for one in adapters))


def _samples(raw: BinaryIO, size: int, is_safetensors: bool) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is hashed of one file; reading clips it at the end of the file."""
    yield 0, _EDGE_LEN
    yield max(0, size - _EDGE_LEN), _EDGE_LEN
    yield from ((size * i // _NUM_STRIDED, _BLOCK_LEN) for i in range(1, _NUM_STRIDED))
    if not is_safetensors:
        return
    raw.seek(0)
    header_len = int.from_bytes(raw.read(8), "little")
    if header_len > min(size - 8, _MAX_HEADER_LEN):
        return  # not a safetensors file whatever its name says
    header = raw.read(header_len)
    yield 8, header_len
    for begin, end in _tensor_ranges(header):
        for offset in sorted({begin, (begin + end) // 2, max(begin, end - _BLOCK_LEN)}):
            if 0 <= offset < size:
                yield 8 + header_len + offset, max(0, min(_BLOCK_LEN, end - offset))


def _tensor_ranges(header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        ranges = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return sorted((int(begin), int(end)) for begin, end in ranges)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # damaged; the server will say so


def _framed(part: bytes) -> bytes:
    """A part behind its length, so that parts that are cut differently are hashed differently."""
    return len(part).to_bytes(8, "little") + part


def _local_snapshot(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download  # transformers brings it
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, FileNotFoundError):  # no such name; LocalEntryNotFoundError is the latter
        return None
