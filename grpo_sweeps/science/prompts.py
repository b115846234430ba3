"""One prompt of an exact policy as NumPy arrays, with what claims about groups of rollouts ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_sweeps.exact import Enumeration


@dataclass(frozen=True, eq=False)
class Prompt:
    """`e`: every sequence. N sequences, D parameters."""

    e: Enumeration

    @cached_property
    def p_N(self) -> np.ndarray:
        return self.e.p_N.numpy()

    @cached_property
    def r_N(self) -> np.ndarray:
        return self.e.rewards_N.numpy()

    @cached_property
    def psi_ND(self) -> np.ndarray:
        return self.e.psi_ND.numpy()

    @cached_property
    def gram_NN(self) -> np.ndarray:
        return self.e.gram_NN.numpy()

    @cached_property
    def norms_N(self) -> np.ndarray:
        """Squared norms of the scores."""
        return self.gram_NN.diagonal()

    @cached_property
    def grad_J_D(self) -> np.ndarray:
        return self.e.grad_J_D.numpy()

    @property
    def signal(self) -> float:
        """||grad J||^2."""
        return float(self.grad_J_D @ self.grad_J_D)

    def group(self, right: bool) -> tuple[float, np.ndarray, float]:
        """Of the right or the wrong sequences (binary rewards): their probability, mean score (D,) and variance
        (trace)."""
        c = self.e.reward_classes
        one = int(right)
        if c.rewards_C.tolist() != [0.0, 1.0]:
            raise ValueError(f"rewards {c.rewards_C.tolist()}: 0 and 1 are needed, and both must occur")
        return float(c.p_C[one]), c.mean_CD[one].numpy(), float(c.variance_C[one])

    def draw(self, groups: int, R: int, rng: np.random.Generator) -> np.ndarray:
        """(groups, R) indices of independent rollouts."""
        return rng.choice(len(self.p_N), size=(groups, R), p=self.p_N / self.p_N.sum())
