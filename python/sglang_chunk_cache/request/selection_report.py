"""SelectionReport: what the reply tells a researcher about one request's selection (`"explain": true`).

Verbs: `record_*` (during the forward; tensors begin their way to the host), `complete` (once SGLang has the result of
the forward, so that they are there).
"""

from __future__ import annotations

from typing import Any

import torch

from chunk_cache.methods import METHODS
from chunk_cache.methods.scored import LayerMethod
from chunk_cache.plan.recompute_plan import RecomputePlan
from sgl_kernel_ext.transfer import Download


class SelectionReport:
    """Filled during one forward."""

    def __init__(self, plan: RecomputePlan, num_layers: int) -> None:
        self._plan = plan
        self._num_layers = num_layers
        self._selected: Download | None = None
        self._unselected: list[tuple[int, Download]] = []
        self._left: list[tuple[int, Download]] = []
        self._scores: tuple[Download, ...] | None = None
        self._scored_at: int | None = None
        self._focus: Download | None = None
        self._settled_at: int | None = None
        self.seconds = 0.0

    def record_scores(
        self, scores: torch.Tensor, is_left: torch.Tensor, layer_id: int | None, ignore: torch.Tensor | None = None
    ) -> None:
        """Scores of the first choice, tensors `[n]`; `layer_id` None = several layers; `ignore`: tokens not reused."""
        counted = torch.ones_like(is_left) if ignore is None else ignore.logical_not()
        self._scored_at = layer_id
        self._scores = (Download(scores), Download(is_left), Download(counted))

    def record_selected(self, positions: torch.Tensor) -> None:
        """All rows once the first choice is made."""
        self._selected = Download(positions)

    def record_left(self, layer_id: int, positions: torch.Tensor) -> None:
        """All rows that are left from the attention of this layer on."""
        if self._selected is None:
            self._unselected.append((layer_id, Download(positions)))  # early termination came before the first choice
        else:
            self._left.append((layer_id, Download(positions)))

    def record_focus(self, is_focused: torch.Tensor) -> None:
        """The newest focused set."""
        self._focus = Download(is_focused)

    def record_settled(self, layer_id: int) -> None:
        """The focused set has settled at this layer."""
        self._settled_at = layer_id

    def complete(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The object `selection` of the reply, and fields for each chunk of it; plain JSON values."""
        selection = self._plan.selection
        assert selection is not None
        if self._selected is None:
            # Early termination left fewer rows than the budget, so all that are left at the check layer stay.
            method = METHODS[selection.method]
            assert isinstance(method, LayerMethod)
            check_layer = method.check_layer(selection.options)
            self._left = [step for step in self._unselected if step[0] > check_layer]
            self._unselected = [step for step in self._unselected if step[0] <= check_layer]
            self._selected = self._unselected[-1][1]
        focus: dict[str, Any] | None = None
        if selection.focus_window:
            is_settled = self._settled_at is not None
            chunks = self._focus.read().nonzero().flatten().tolist() if is_settled and self._focus is not None else None
            focus = {"settled_at_layer": self._settled_at, "chunks": chunks}
        summary = {
            "stage": selection.stage.value,
            "rows_per_layer": self._rows_per_layer(),
            "scores": self._summarize_scores(),
            "focus": focus,
            "seconds": self.seconds,
        }
        return summary, self._per_chunk()

    def _summarize_scores(self) -> dict[str, Any] | None:
        if self._scores is None:
            return None
        scores, is_left, counted = (download.read() for download in self._scores)
        reused, chosen = scores[counted].double(), scores[counted & is_left].double()
        return {
            "layer": self._scored_at,
            "min": reused.min().item(),
            "median": reused.median().item(),
            "mean": reused.mean().item(),
            "max": reused.max().item(),
            "sum": reused.sum().item(),
            "selected_min": chosen.min().item(),
            "selected_sum": chosen.sum().item(),
        }

    def _rows_per_layer(self) -> list[int]:
        """Recomputed rows that attended, by layer; all reused tokens at layers of the forward that asks first."""
        rows, num = [], self._plan.num_recomputed
        left = {layer: self._count_reused(positions) for layer, positions in (*self._unselected, *self._left)}
        assert self._plan.selection is not None
        num_asked = self._plan.selection.last_asked_layer or 0  # layers of the forward in front
        if self._scored_at is not None and self._selected is not None and not self._plan.selection.asks_first:
            left = {self._scored_at: self._count_reused(self._selected)} | left
        for layer in range(self._num_layers):
            num = left.get(layer, num)
            rows.append(num)
        return [self._plan.num_reused] * num_asked + rows[num_asked:]

    def _count_reused(self, positions: Download) -> int:
        found = positions.read().tolist()
        return sum(any(c.dst_start <= p < c.dst_end for c in self._plan.chunks if c.num_reused) for p in found)

    def _per_chunk(self) -> list[dict[str, Any]]:
        assert self._selected is not None
        selected = previous = self._selected.read().tolist()
        steps = []
        for layer, positions in self._left:
            left = positions.read().tolist()
            steps.append((layer, sorted(set(previous) - set(left))))
            previous = left
        fields = []
        for chunk in self._plan.chunks:
            inside = range(chunk.dst_start, chunk.dst_end) if chunk.num_reused else range(0)
            dropped = [{"layer": layer, "positions": [p for p in gone if p in inside]} for layer, gone in steps]
            fields.append(
                {
                    "recomputed_positions": [p for p in selected if p in inside],
                    "dropped": [drop for drop in dropped if drop["positions"]],
                }
            )
        return fields
