"""Layers that keep a state instead of KV (gated delta rule: Qwen3-Next, Qwen3.5), in plain torch.

SGLang's kernels for them need a GPU. The functions here replace these kernels (`patches.toml`, moment "states") and
take their arguments; `use_states` puts them in place if a model has such layers. Pools of states are `[slots, value
heads, value size, key size]` and those of convolutions `[slots, channels, kernel - 1]`; both are updated in place. Slot
-1 means that there is no slot.

For each token and head, with decay exp(g), step size beta, and keys and queries of norm 1 (Yang et al., Gated Delta
Networks, 2412.06464, eq. 10):

    S <- exp(g) S;    S <- S + beta (v - S k) k^T;    out = S q / sqrt(key size)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from sglang_plain_cpu import patches

BLOCK = 64
"""Tokens that `delta_rule` computes in one step; `extend` returns a state at each multiple, as SGLang expects."""


def use_states(make: Callable[..., Any], runner: Any, full_attention: Any) -> Any:
    """Wraps SGLang's choice of the attention backend; puts the functions below in place if the model keeps states.

    Raises:
        ValueError: the server speculates, which needs kernels that are not replaced here.
    """
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    if hybrid_gdn_config(runner.model_config) is not None:
        if not runner.spec_algorithm.is_none():
            raise ValueError("speculative decoding of a model with states needs a GPU; leave its flags out on a CPU.")
        patches.apply("states")
    return make(runner, full_attention)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Outputs of all tokens, the state after the last one, and the states at the beginning of each block.

    A token with beta = g = 0 leaves the state as it is. Nothing is written in place.

    Args:
        q, k: `[batch, heads, length, key size]`, vectors of norm 1
        v: `[batch, heads, length, value size]`
        g, beta: `[batch, heads, length]`; g <= 0 is the logarithm of the decay
        state: `[batch, heads, key size, value size]`, transposed relative to the pools

    Within a block the corrections v_i - S^T k_i depend on each other by a triangular system (2412.06464, section 3.3):
    (I + L) u = beta (v - exp(c) k S), where c sums g and L_ij = beta_i exp(c_i - c_j) k_i k_j below the diagonal.
    """
    length, q = q.shape[2], q * q.shape[3] ** -0.5
    outs, begins = [], []
    for start in range(0, length, BLOCK):
        part = slice(start, min(start + BLOCK, length))
        begins.append(state)
        k_part, step = k[:, :, part], beta[:, :, part, None]
        total = g[:, :, part].double().cumsum(-1)  # fp32 would lose small differences of large sums
        later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=q.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp().to(g.dtype)
        system = step * (k_part @ k_part.mT) * decay  # the solver takes the diagonal as 1
        grown = total.exp()[..., None].to(g.dtype)
        wanted = step * (v[:, :, part] - (k_part * grown) @ state)
        new = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        q_part = q[:, :, part]
        outs.append((q_part * grown) @ state + ((q_part @ k_part.mT) * decay) @ new)
        rest = (total[..., -1:] - total).exp()[..., None].to(g.dtype)
        state = state * grown[:, :, -1:] + (k_part * rest).mT @ new
    return torch.cat(outs, dim=2), state, begins


def unit(x: torch.Tensor) -> torch.Tensor:
    """Normalises vectors along the last dimension to norm 1, as the kernels do with queries and keys."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta, `[1, tokens, heads]` fp32, from the projections `a` and `b` `[tokens, heads]`; beta is rounded to the
    dtype of `b`."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid().to(b.dtype).float()[None]


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    inplace_update: bool = True,
    **_flags: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The delta rule over several sequences, each from its state in the pool.

    Args:
        q, k: `[1, tokens, key heads, key size]`; `v` `[1, tokens, value heads, value size]`
        cu_seqlens: `[sequences + 1]`, where each sequence begins, and where the last ends

    Returns:
        Outputs `[1, tokens, value heads, value size]`, nothing, and the states at the beginning of each block of each
        sequence, `[1, blocks, value heads, value size, key size]`.
    """
    groups = v.shape[2] // k.shape[2]
    q, k = (unit(x.float()).repeat_interleave(groups, dim=2).transpose(1, 2) for x in (q, k))
    values, g, beta = v.float().transpose(1, 2), g.float().transpose(1, 2), beta.float().transpose(1, 2)
    out, begins = torch.zeros_like(v), []
    borders = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), borders, borders[1:], strict=False):
        if end == start:
            continue
        part = (slice(None), slice(None), slice(start, end))
        state = _copy_of(initial_state, slot)
        found, state, blocks = delta_rule(q[part], k[part], values[part], g[part], beta[part], state)
        out[:, start:end] = found.transpose(1, 2).to(out.dtype)
        begins += [block[0].mT for block in blocks]
        if inplace_update and slot >= 0:
            initial_state[slot] = state[0].mT.to(initial_state.dtype)
    return out, None, torch.stack(begins)[None].to(v.dtype)


def _copy_of(pool: torch.Tensor, slot: int) -> torch.Tensor:
    """A copy of the state in a slot, fp32, in the shape of `delta_rule`; zeros if there is no slot."""
    state = pool[max(slot, 0)].to(torch.float32, copy=True)
    return (state if slot >= 0 else state.zero_()).mT[None]


def decode(
    *,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    **_flags: Any,
) -> None:
    """The delta rule for one token of each sequence; writes outputs to `out` `[batch, 1, value heads, value size]`.

    Args:
        mixed_qkv: `[batch, channels]`, queries, keys and values after the convolution
        a, b: `[batch, value heads]`
    """
    heads, value_size, key_size = initial_state.shape[1:]
    width = heads * value_size
    q, k, v = mixed_qkv.float().split([(mixed_qkv.shape[1] - width) // 2] * 2 + [width], dim=1)
    groups = heads * key_size // q.shape[1]
    q, k = (unit(x.unflatten(1, (-1, key_size))).repeat_interleave(groups, dim=1) for x in (q, k))
    g, beta = (x[0] for x in gates(A_log, a, b, dt_bias))
    slots = ssm_state_indices.long()
    state = initial_state[slots.clamp(min=0)].float() * g[..., None, None].exp()
    wrong = v.unflatten(1, (heads, value_size)) - (state @ k[..., None])[..., 0]
    state = state + (beta[..., None] * wrong)[..., None] * k[..., None, :]
    answered = (state @ (q * scale)[..., None])[..., 0]
    used = slots >= 0
    out[:, 0] = torch.where(used[:, None, None], answered, torch.zeros_like(answered)).to(out.dtype)
    initial_state[slots[used]] = state[used].to(initial_state.dtype)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_flags: Any,
) -> torch.Tensor:
    """Causal convolution and SiLU of several concatenated sequences, `[channels, tokens]`; updates their pool slots.

    Args:
        weight: `[channels, kernel]`
        has_initial_state: `[sequences]`, whether a sequence continues from the state in its slot
    """
    out, start = torch.zeros_like(x), 0
    for slot, length, continues in zip(cache_indices.tolist(), seq_lens_cpu, has_initial_state.tolist(), strict=False):
        part = slice(start, start + length)
        start += length
        if slot < 0 or not length:
            continue
        before = conv_states[slot] if continues else torch.zeros_like(conv_states[slot])
        window = torch.cat([before.to(x.dtype), x[:, part]], dim=1)
        found = F.conv1d(window[None].float(), weight[:, None].float(), _float(bias), groups=len(weight))[0]
        out[:, part] = F.silu(found).to(x.dtype)
        conv_states[slot] = window[:, -conv_states.shape[2] :]
    return out


def convolve_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_flags: Any,
) -> torch.Tensor:
    """Like `convolve`, for one token of each sequence, `[batch, channels]`."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_state[slots.clamp(min=0)].to(x.dtype), x[:, :, None]], dim=2)
    used = slots >= 0
    conv_state[slots[used]] = window[used][:, :, 1:].to(conv_state.dtype)
    found = (window.float() * weight.float()).sum(2)
    return F.silu(found if bias is None else found + bias.float()).to(x.dtype)


def _float(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float()


def keep_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copies the states of the sequences in the mask to other slots, in pools of one layer or of all layers."""
    kept = mamba_track_mask[:batch_size].nonzero()[:, 0]
    sources, targets = cache_indices[kept].long(), mamba_track_indices[kept].long()
    if check_freed_slots:
        used = (sources >= 0) & (targets >= 0)
        sources, targets = sources[used], targets[used]
    slots = 0 if ssm_states.dim() == 4 else 1
    for pool in (conv_states, ssm_states):
        pool.index_copy_(slots, targets, pool.index_select(slots, sources))


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    z: torch.Tensor,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = True,
    activation: str = "swish",
) -> torch.Tensor:
    """`rms_norm(x) * weight * silu(z)` over the last dimension; sigmoid instead of SiLU for other `activation`s."""
    assert (bias, group_size, norm_before_gate, is_rms_norm) == (None, None, True, True), "a norm of another kind"
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    gate = F.silu(z.float()) if activation in ("swish", "silu") else z.float().sigmoid()
    return (normed * gate).to(x.dtype)


def normed_and_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Like `gated_norm`, with the arguments of Qwen3-Next's norm."""
    assert (residual, prenorm) == (None, False), "a norm of another kind"
    return gated_norm(x, weight, bias, z=g, eps=eps, activation=activation)


def split_projections_by_head(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[torch.Tensor, ...]:
    """Like `split_projections`, for rows in which q, k, v and z of each key head stand together (Qwen3-Next)."""
    group = num_heads_v // num_heads_qk
    sizes = [head_qk, head_qk, group * head_v, group * head_v]
    q, k, v, z = (part.flatten(1) for part in mixed_qkvz.unflatten(1, (num_heads_qk, -1)).split(sizes, dim=2))
    b, a = (part.flatten(1) for part in mixed_ba.unflatten(1, (num_heads_qk, -1)).split(group, dim=2))
    return torch.cat([q, k, v], dim=1), z.unflatten(1, (num_heads_v, head_v)), b, a


def split_projections(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[torch.Tensor, ...]:
    """Splits rows into `[tokens, qkv]`, z `[tokens, value heads, value size]`, and b and a `[tokens, value heads]`."""
    width = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    b, a = mixed_ba.split(num_heads_v, dim=1)
    z = mixed_qkvz[:, width:].unflatten(1, (num_heads_v, head_v))
    return mixed_qkvz[:, :width].contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


def sigmoid_gated(attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """`attn_output * sigmoid(gate)`; the gate may have a dimension of heads."""
    gated = (attn_output.float() * gate.float().sigmoid().reshape(attn_output.shape)).to(attn_output.dtype)
    return attn_output.copy_(gated) if inplace else gated
