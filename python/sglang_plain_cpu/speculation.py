"""Speculative decoding in plain torch: what SGLang has for accelerators, or for a CPU with its own kernels, only.

Verbs: `install` (once per process that speculates, before its worker is made), `keep_overlap` (before flags are
resolved). SGLang's branches for a CPU are switched on, and these functions stand in the place of the kernels that they
call; shapes and names are SGLang's. `bs` is the number of requests and `n` that of the tokens of a draft tree, whose
first is the last token that stands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3")
_RECONSTRUCT = "sglang.kernels.ops.speculative.reconstruct_tree"


def keep_overlap() -> None:
    """SGLang's CPU engine does not speculate with the overlap schedule; in plain torch it runs as on a GPU."""
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda _server_args: None


def install() -> None:
    """Makes drafting, verification and its sampling run on the attention backend `torch_native`."""
    os.environ["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"  # accepted KV is moved by torch, so no kernel is warmed up for it
    reconstruct = ModuleType(_RECONSTRUCT)  # SGLang's cannot be imported without a GPU
    vars(reconstruct)["reconstruct_indices_from_tree_mask_func"] = reconstruct_tree
    sys.modules[_RECONSTRUCT] = reconstruct
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache import allocation, memory_pool
    from sglang.srt.speculative import draft_utils, eagle_utils, eagle_worker_common, ngram_worker

    from sglang_plain_cpu import speculative_attention as attention

    for module in (cache_locs, eagle, spec_tree, allocation, eagle_worker_common, ngram_worker):
        module._is_cpu = True
    for module, kernels in (
        (cache_locs, (assign_extend_cache_locs_cpu, assign_draft_cache_locs_contiguous_cpu)),
        (overlap_utils, (gather_spec_extras,)),
        (allocation, (assign_req_to_token_pool_cpu,)),
        (eagle, (fill_bonus_tokens_cpu, fill_accept_out_cache_loc_cpu)),
        (eagle_utils, (default_tree_mask_mode, tree_speculative_sampling_target_only)),
        (eagle_utils, (top_k_renorm_prob, top_p_renorm_prob)),
    ):
        for kernel in kernels:
            setattr(module, kernel.__name__, kernel)
    memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: setattr(pool, "_kv_copy_config", None)
    spec_tree.sgl_build_tree_kernel_efficient_cpu = build_tree
    spec_tree.sgl_verify_tree_greedy_cpu = verify_tree_greedy
    register_attention_backend("torch_native")(attention.TreeAttention)
    factory = draft_utils.DraftBackendFactory
    factory.create_decode_backend = attention.draft_decode_backend
    factory.create_draft_extend_backend = lambda _self: None  # the runner's own serves


def default_tree_mask_mode() -> Any:
    """Masks of the tree alone, `[bs, n, n]`; all of the prefix is seen."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    return TreeMaskMode.QLEN_ONLY


# Slots.


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor, out: torch.Tensor, _: int
) -> None:
    """`out` becomes the slots [start, end) of each request, one behind the other."""
    ranges = zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, first:last] for row, first, last in ranges])
    out[: len(slots)] = slots


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    _: int,
    topk: int,
    num_cols: int,
) -> None:
    """`out` becomes the `topk * num_cols` slots behind each request."""
    places = seq_lens[:, None] + torch.arange(topk * num_cols)
    out.copy_(req_to_token[rows.long()].gather(1, places.long()).view(-1))


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor, slots: torch.Tensor, _: int
) -> None:
    """Positions [start, end) of each request get `slots`, in order."""
    begin = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = slots[begin : begin + last - first]
        begin += last - first


def gather_spec_extras(indices: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Rows of what the last step left for the next draft; None where it left nothing."""
    return tuple(None if buffer is None else buffer[indices.long()] for buffer in buffers)


# What was accepted.


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """`bonus_tokens` `[bs]` becomes the last accepted token of each request."""
    last = accept_tokens.view(-1, stride).gather(1, accept_lens.long()[:, None] - 1)
    bonus_tokens.copy_(last[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """`accept_out_cache_loc` begins with the slots of what was accepted, in order."""
    accepted = accept_index.view(-1)
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


# Trees.


def reconstruct_tree(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    num_nodes: int,
) -> None:
    """Positions and links of draft trees, of which `tree_mask` `[bs * n * n]` tells what each node sees."""
    seen = tree_mask.view(batch_size, num_nodes, num_nodes).tril(-1)
    order = torch.arange(num_nodes)
    parents = torch.where(seen, order, -1).amax(-1)
    positions.copy_((seen.sum(-1) + seq_lens[:, None]).view(-1))
    _link(parents.tolist(), retrieve_index, retrieve_next_token, retrieve_next_sibling)


def build_tree(
    parent_list: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    _depth: int,
    num_nodes: int,
    _mode: int,
) -> None:
    """Masks, positions and links of the candidates that were `selected` `[bs, n - 1]`.

    Args:
        parent_list: `[bs, ...]` which candidate each group of `topk` candidates follows.
    """
    all_parents = []
    for groups, chosen in zip(parent_list.tolist(), selected.tolist(), strict=True):
        nodes = {candidate: node for node, candidate in enumerate(chosen, start=1)}
        all_parents.append([-1, *(nodes[groups[one // topk]] if one >= topk else 0 for one in chosen)])
    masks = torch.eye(num_nodes, dtype=torch.bool).repeat(len(all_parents), 1, 1)
    for mask, parents in zip(masks, all_parents, strict=True):
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
    tree_mask.copy_(masks.view(-1))
    positions.copy_((masks.sum(-1) - 1 + seq_lens[:, None]).view(-1))
    _link(all_parents, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def _link(
    all_parents: Sequence[Sequence[int]], index: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor
) -> None:
    """The first child and the next sibling of each node, or -1; `index` numbers the nodes of the batch."""
    children, siblings = [], []
    for parents in all_parents:
        first, after = [-1] * len(parents), [-1] * len(parents)
        for node in range(len(parents) - 1, 0, -1):
            first[parents[node]], after[node] = node, first[parents[node]]
        children.append(first)
        siblings.append(after)
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.tensor(children))
    next_sibling.copy_(torch.tensor(siblings))


# Verification.


def verify_tree_greedy(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accepts from the root on what the target itself says, and its next token behind that.

    Args:
        predicts: `[bs * n]` gets the tokens that stand, each at the node in front of it.
        accept_index: `[bs, depth]` gets the nodes of the batch; -1 behind them.
        accept_token_num: `[bs]` gets how many drafts were right.
        candidates, target_predict: `[bs, n]` drafts, and what the target says behind each.
    """
    num_nodes = candidates.shape[1]
    for i in range(len(candidates)):
        drafts, says = candidates[i].tolist(), target_predict[i].tolist()
        links = retrive_next_token[i].tolist(), retrive_next_sibling[i].tolist()
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = next((one for one in _behind(links, path[-1]) if drafts[one] == says[path[-1]]), None)
            if node is None:
                break
            path.append(node)
        _stand(i, path, [says[node] for node in path], num_nodes, predicts, accept_index, accept_token_num)


def _behind(links: tuple[list[int], list[int]], node: int) -> Iterator[int]:
    """The drafts of the token behind a node; `links` are first children and next siblings, or -1."""
    children, siblings = links
    one = children[node]
    while one >= 0:
        yield one
        one = siblings[one]


def _stand(
    i: int,
    path: list[int],
    tokens: list[int],
    num_nodes: int,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> None:
    nodes = torch.tensor(path) + i * num_nodes
    predicts[nodes] = torch.tensor(tokens, dtype=predicts.dtype)
    accept_index[i, : len(path)] = nodes.to(accept_index.dtype)
    accept_token_num[i] = len(path) - 1


def tree_speculative_sampling_target_only(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Draws each token from the target's distribution; where it is a draft, that draft is accepted.

    Args:
        uniform_samples: `[bs, n]` the coin thrown at each node; the others as in `verify_tree_greedy`.
        uniform_samples_for_final_sampling: `[bs]` the coin of the token behind the accepted ones.
        target_probs: `[bs, n, vocabulary]`.
    """
    num_nodes = candidates.shape[1]
    for i in range(len(candidates)):
        drafts = candidates[i].tolist()
        links = retrive_next_token[i].tolist(), retrive_next_sibling[i].tolist()
        path = [0]
        while len(path) < accept_index.shape[1]:
            probs, coin, passed = target_probs[i, path[-1]], float(uniform_samples[i, path[-1]]), 0.0
            for node in _behind(links, path[-1]):
                one = float(probs[drafts[node]])
                passed += one
                if coin <= passed / threshold_acc or one >= threshold_single:
                    path.append(node)
                    break
            else:
                break
        left = target_probs[i, path[-1]].clone()
        if len(path) < accept_index.shape[1]:
            for node in _behind(links, path[-1]):  # rejected: what they stood for is used up
                left[drafts[node]] = 0
        sums = left.cumsum(0)
        last = int(torch.searchsorted(sums, uniform_samples_for_final_sampling[i] * sums[-1], right=True))
        tokens = [*(drafts[node] for node in path[1:]), min(last, len(left) - 1)]
        _stand(i, path, tokens, num_nodes, predicts, accept_index, accept_token_num)


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """`[num_rows, vocabulary]` with all but the k most probable of each row at 0, and sums of 1."""
    ranks = probs.argsort(-1, descending=True).argsort(-1)
    kept = probs.masked_fill(ranks >= top_ks.view(-1, 1), 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """As `top_k_renorm_prob`, with as few of the most probable as together reach p."""
    ordered, order = probs.sort(-1, descending=True)
    in_front = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(in_front >= top_ps.view(-1, 1), 0)
    kept = torch.zeros_like(probs).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)
