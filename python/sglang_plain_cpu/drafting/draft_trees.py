"""Trees of drafted tokens: their masks, positions and links, with the names and shapes of SGLang's kernels.

`bs` is the number of requests, `n` the number of tokens (nodes) of a tree; the root is the last token accepted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def default_tree_mask_mode() -> Any:
    """The mode with masks of the tree alone, `[bs, n, n]`; each node sees the whole prefix."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    return TreeMaskMode.QLEN_ONLY


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
    """Fills in positions and links of draft trees; `tree_mask` `[bs * n * n]` tells which nodes each node sees."""
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
    """Fills in masks, positions and links of the trees of the candidates that were `selected` `[bs, n - 1]`.

    Args:
        parent_list: `[bs, ...]` the candidate that each group of `topk` candidates follows.
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
    """Fills in the first child and the next sibling of each node, or -1; `index` gets the numbers of all nodes."""
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
