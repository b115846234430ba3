"""What a step with several updates says of its ratios: how far the policy moved, what was clipped, what the KL is."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_sweeps.maths.objective import Surrogate


class RatioTally:
    """Sums over all updates of a step. Tokens are counted, or rollouts where a rollout has one ratio."""

    def __init__(self, ratio: str) -> None:
        self.ratio = ratio
        self.ratios: list[Tensor] = []
        self.low: list[Tensor] = []
        self.high: list[Tensor] = []
        self.k: list[Tensor] = []

    def add(self, found: Surrogate, mask_BT: Tensor, k_BT: Tensor | None) -> None:
        """One micro-batch of one update."""
        counted_BT = mask_BT & (mask_BT.cumsum(dim=1) == 1) if self.ratio == "sequence" else mask_BT
        self.ratios.append(found.ratio_BT[counted_BT])
        self.low.append(found.low_BT[counted_BT])
        self.high.append(found.high_BT[counted_BT])
        if k_BT is not None:
            self.k.append(k_BT[mask_BT])

    def metrics(self) -> dict[str, float]:
        """TRL's names. Nothing where no group took part; no clip ratio where nothing is ever clipped."""
        if not self.ratios:
            return {}
        ratios = torch.cat(self.ratios)
        found = {
            "importance_ratio/mean": float(ratios.mean()),
            "importance_ratio/min": float(ratios.min()),
            "importance_ratio/max": float(ratios.max()),
        }
        if self.ratio != "none":
            low, high = (torch.cat(clipped).double() for clipped in (self.low, self.high))
            found["clip_ratio/low_mean"], found["clip_ratio/high_mean"] = float(low.mean()), float(high.mean())
            found["clip_ratio/region_mean"] = float((low + high).mean())
        if self.k:
            found["kl"] = float(torch.cat(self.k).mean())
        return found
