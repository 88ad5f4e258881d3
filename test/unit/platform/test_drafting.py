"""Draft trees in plain torch: links, masks and verification against definitions written out."""

from __future__ import annotations

import pytest
import torch

from sglang_plain_cpu.drafting import acceptance, draft_trees, slots

#    0
#   / \
#  1   2
#  |  / \
#  3 4   5
PARENTS = [-1, 0, 0, 1, 2, 2]
CHILDREN, SIBLINGS = [1, 3, 4, -1, -1, -1], [-1, 2, -1, -1, 5, -1]
DEPTHS = [0, 1, 1, 2, 2, 2]
NUM = len(PARENTS)


def seen() -> torch.Tensor:
    mask = torch.eye(NUM, dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        mask[node] |= mask[parent]
    return mask


def empty() -> list[torch.Tensor]:
    """Positions, numbers, children and siblings of two requests."""
    return [torch.empty(2 * NUM, dtype=torch.int64), *(torch.full((2, NUM), -1) for _ in range(3))]


def assert_links(positions: torch.Tensor, index: torch.Tensor, children: torch.Tensor, siblings: torch.Tensor) -> None:
    assert positions.view(2, NUM).tolist() == [[start + depth for depth in DEPTHS] for start in (7, 30)]
    assert index.tolist() == [list(range(NUM)), list(range(NUM, 2 * NUM))]
    assert children.tolist() == [CHILDREN] * 2
    assert siblings.tolist() == [SIBLINGS] * 2


def test_a_tree_from_its_mask() -> None:
    out = empty()
    draft_trees.reconstruct_tree(seen().repeat(2, 1).view(-1), torch.tensor([7, 30]), *out, 2, NUM)
    assert_links(*out)


def test_a_tree_from_its_candidates() -> None:
    """Two steps of two branches: candidates 0 and 1 follow the root, 2 to 5 follow these two, two each."""
    selected = torch.tensor([[0, 1, 2, 4, 5]] * 2)
    groups = torch.tensor([[-1, 0, 1]] * 2)  # of two candidates each: behind the root, behind 0, behind 1
    mask, out = torch.zeros(2 * NUM * NUM, dtype=torch.bool), empty()
    draft_trees.build_tree(groups, selected, torch.tensor([7, 30]), mask, *out, 2, 2, NUM, 1)
    assert_links(*out)
    assert torch.equal(mask.view(2, NUM, NUM), seen().expand(2, -1, -1))


def verify(kernel: object, drafts: list[int], **says: torch.Tensor) -> tuple[list[int], list[int]]:
    """Nodes that are accepted and tokens that stand, of the second of two requests."""
    predicts = torch.zeros(2 * NUM, dtype=torch.int32)
    accepted = torch.full((2, 3), -1, dtype=torch.int32)
    num_right = torch.zeros(2, dtype=torch.int32)
    kernel(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=num_right,
        candidates=torch.tensor([drafts] * 2),
        retrive_index=torch.arange(2 * NUM).view(2, NUM),
        retrive_next_token=torch.tensor([CHILDREN] * 2),
        retrive_next_sibling=torch.tensor([SIBLINGS] * 2),
        **says,
    )
    path = accepted[1][accepted[1] >= 0].tolist()
    assert len(path) == num_right[1] + 1
    return [node - NUM for node in path], predicts[path].tolist()


@pytest.mark.parametrize(
    ("drafts", "path", "tokens"),
    [
        ([9, 1, 2, 3, 4, 5], [0, 2, 5], [2, 5, 8]),
        ([9, 1, 2, 3, 5, 4], [0, 2, 4], [2, 5, 7]),
        ([9, 1, 1, 3, 4, 5], [0], [2]),
        ([9, 2, 1, 6, 4, 5], [0, 1, 3], [2, 6, 5]),
    ],
)
def test_greedy_verification_follows_what_the_model_says(drafts: list[int], path: list[int], tokens: list[int]) -> None:
    says = torch.tensor([[2, 6, 5, 5, 7, 8]] * 2)
    assert verify(acceptance.verify_tree_greedy, drafts, target_predict=says) == (path, tokens)


def test_sampled_tokens_have_the_distribution_of_the_model() -> None:
    """The first token that stands is drawn from the model's distribution, whatever was drafted."""
    torch.manual_seed(0)
    probs = torch.tensor([0.1, 0.4, 0.3, 0.2])
    counts = torch.zeros(4)
    for _ in range(4000):
        _, tokens = verify(
            acceptance.tree_speculative_sampling_target_only,
            [0, 1, 2, 3, 0, 1],
            uniform_samples=torch.rand(2, NUM),
            uniform_samples_for_final_sampling=torch.rand(2),
            target_probs=probs.expand(2, NUM, 4),
            draft_probs=torch.zeros(2, NUM, 4),
        )
        counts[tokens[0]] += 1
    assert (counts / counts.sum() - probs).abs().max() < 0.03


def test_renormed_probabilities() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]])
    top_2 = acceptance.top_k_renorm_prob(probs, torch.tensor([2, 1]))
    assert torch.allclose(top_2, torch.tensor([[0, 4 / 7, 3 / 7, 0], [1, 0, 0, 0]]))
    most = acceptance.top_p_renorm_prob(probs, torch.tensor([0.8, 0.5]))
    assert torch.allclose(most, torch.tensor([[0, 4 / 9, 3 / 9, 2 / 9], [1, 0, 0, 0]]))


def test_slots() -> None:
    table = torch.arange(40).view(4, 10)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([3, 5]), torch.tensor([5, 8])
    out = torch.zeros(6, dtype=torch.int64)
    slots.assign_extend_cache_locs_cpu(rows, table, start, end, out, 10)
    assert out.tolist() == [23, 24, 5, 6, 7, 0]
    drafts = torch.zeros(8, dtype=torch.int64)
    slots.assign_draft_cache_locs_contiguous_cpu(rows, table, start, drafts, 10, 2, 2)
    assert drafts.tolist() == [23, 24, 25, 26, 5, 6, 7, 8]
    slots.assign_req_to_token_pool_cpu(rows, table, start, end, torch.arange(90, 95), 10)
    assert table[2, 3:5].tolist() == [90, 91]
    assert table[0, 4:9].tolist() == [4, 92, 93, 94, 8]


def test_what_was_accepted() -> None:
    bonus = torch.zeros(2, dtype=torch.int64)
    slots.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [7, 8]
    taken = torch.zeros(6, dtype=torch.int64)
    slots.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.arange(50, 56), taken)
    assert taken.tolist() == [50, 52, 53, 0, 0, 0]
