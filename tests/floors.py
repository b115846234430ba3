"""The interval of a rank straight from a Gram, its weights and its floor, as the report forms it step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from grpo_sweeps.spectra import checked, effective_rank, eigenvalues, graded_error, weighted_gram
from grpo_sweeps.spectra.floor import interval_of
from grpo_sweeps.types import Array


def floor_interval(
    gram_RR: ArrayLike,
    weights_R: ArrayLike | None = None,
    floor: ArrayLike = 0.0,
    quantity: Callable[[ArrayLike], Any] = effective_rank,
) -> tuple[Array, Array]:
    """`interval_of` the eigenvalues of diag(w) K diag(w)."""
    gram = weighted_gram(checked(gram_RR), weights_R)
    R = gram.shape[-1]
    eigenvalues_R = eigenvalues(gram)
    weights = np.ones(R) if weights_R is None else np.asarray(weights_R, dtype=np.float64)
    return interval_of(eigenvalues_R, graded_error(eigenvalues_R, gram, floor), (weights != 0).sum(axis=-1), quantity)
