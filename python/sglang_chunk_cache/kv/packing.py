"""Packing: what decoding keeps of one prompt, until its row of slots holds that and no more.

Verbs, in order: `plan` (at every match), `scores_for` (while the window is computed), `choose` (with the prompt's last
forward), `note_stored` (its result was processed), `due` (it may be packed now), `complete` or `stay_whole`.
"""

from __future__ import annotations

import torch

from chunk_cache.options.kept_tokens import KeptTokens


class Packing:
    """See the head of this file; only its verbs write to it.

    Attributes:
        kept: what decoding keeps of the prompt; None = all.
        chosen: int64 `[num_layers, num_kv_heads, kept.room]`, ascending positions; None before `choose`
            and once it is packed.
        is_packed: the row of slots holds what is kept, and no longer the KV of the prompt token by token.
    """

    def __init__(self) -> None:
        self.kept: KeptTokens | None = None
        self.chosen: torch.Tensor | None = None
        self.is_packed = False
        self._scores: torch.Tensor | None = None
        self._is_stored = False

    @property
    def num_dropped(self) -> int:
        """Tokens by which the row of slots is shorter than the positions that it stands for."""
        return self.kept.num_dropped if self.is_packed and self.kept is not None else 0

    @property
    def due(self) -> tuple[KeptTokens, torch.Tensor] | None:
        """`kept` and `chosen` of a prompt that may be packed now; None if it may not."""
        if not self._is_stored or self.kept is None or self.chosen is None:
            return None
        return self.kept, self.chosen

    def plan(self, kept: KeptTokens | None) -> None:
        """Sets what is to be kept; scores and choice stay."""
        self.kept = kept

    def scores_for(self, kept: KeptTokens, num_layers: int, num_kv_heads: int, device: torch.device) -> torch.Tensor:
        """Float32 `[num_layers, num_kv_heads, kept.end - kept.begin]` to add to, zeros at first."""
        if self._scores is None:
            self._scores = torch.zeros(num_layers, num_kv_heads, kept.end - kept.begin, device=device)
        return self._scores

    def take_scores(self) -> torch.Tensor | None:
        """Hands the scores over, once; None if no layer was seen."""
        scores, self._scores = self._scores, None
        return scores

    def choose(self, chosen: torch.Tensor) -> None:
        """Notes what the prompt's last forward has chosen; see the attribute."""
        self.chosen = chosen

    def note_stored(self) -> None:
        """Notes that what was computed so far was checkpointed."""
        self._is_stored = self.chosen is not None

    def complete(self) -> None:
        """Notes that the row is packed."""
        self.chosen, self.is_packed = None, True

    def stay_whole(self) -> None:
        """Notes that nothing is dropped, as there was no room for the copy."""
        self.kept, self.chosen = None if self.kept is None else self.kept.whole, None
