"""Acceptance of drafted tokens: greedy verification, sampling, and renormalised probabilities.

Each function replaces a kernel of SGLang and has its shapes. `bs` is the number of requests, `n` the number of tokens
(nodes) of a tree; the root is the last token accepted before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


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
    """Accepts, from the root on, the drafts that equal the target's own tokens, and the target's next token.

    Args:
        predicts: `[bs * n]` gets the accepted tokens, each at the node before it.
        accept_index: `[bs, depth]` gets the accepted nodes, as numbers in the batch; the rest stays as it is (-1).
        accept_token_num: `[bs]` gets the number of accepted drafts.
        candidates, target_predict: `[bs, n]` drafts, and the target's token behind each.
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
    """The children of a node; `links` are the first child and the next sibling of each node, or -1."""
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
    """Samples each token from the target's distribution; if a draft is that token, it is accepted.

    Args:
        uniform_samples: `[bs, n]` random number of each node.
        uniform_samples_for_final_sampling: `[bs]` random number for the token behind the accepted ones.
        target_probs: `[bs, n, vocabulary]`; the other arguments are those of `verify_tree_greedy`.
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
            for node in _behind(links, path[-1]):  # these drafts were rejected, so they are not drawn again
                left[drafts[node]] = 0
        sums = left.cumsum(0)
        last = int(torch.searchsorted(sums, uniform_samples_for_final_sampling[i] * sums[-1], right=True))
        tokens = [*(drafts[node] for node in path[1:]), min(last, len(left) - 1)]
        _stand(i, path, tokens, num_nodes, predicts, accept_index, accept_token_num)


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """`[num_rows, vocabulary]` probabilities of the k most probable tokens, renormalised; those of all others are 0."""
    ranks = probs.argsort(-1, descending=True).argsort(-1)
    kept = probs.masked_fill(ranks >= top_ks.view(-1, 1), 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Probabilities of the most probable tokens that together reach p, renormalised; those of all others are 0."""
    ordered, order = probs.sort(-1, descending=True)
    in_front = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(in_front >= top_ps.view(-1, 1), 0)
    kept = torch.zeros_like(probs).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)
