"""What holds for each estimator, declared in one table to which the tests hold the functions. Every list of estimators
elsewhere in the package is a choice from this table by its properties.

psi_i is the score of rollout i, J a prompt's expected reward, k the number of correct rollouts of a group when rewards
are 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from grpo_sweeps.estimators.batch import batch_mean, bnpo, reinforce_plus_plus, reinforce_plus_plus_baseline
from grpo_sweeps.estimators.foreign import on_arrays, takes_lengths
from grpo_sweeps.estimators.from_gram import salt, score_norm
from grpo_sweeps.estimators.group import dapo, dr_grpo, grpo, grpo_std, opo, rloo
from grpo_sweeps.estimators.reinforce import reinforce
from grpo_sweeps.types import Array

Kind = Literal[
    "none", "group mean", "leave-one-out", "std", "group mean by length", "step mean", "step mean and std",
    "std of the step", "Beta density", "leave-one-out by score norm", "std and projector",
]  # fmt: skip
"""What is subtracted from the rewards, and by what they are divided."""


class Factor(Protocol):
    """c with E[sum_i A_i psi_i / R] = c grad J for R i.i.d. rollouts of a prompt, in a step of G prompts."""

    def __call__(self, R: int, G: int = 1) -> float: ...


@dataclass(frozen=True)
class Declaration:
    """The properties of one estimator. Each holds for all rewards that it takes, or is not declared."""

    function: Callable[..., Array]
    kind: Kind
    source: str
    factor: Factor | None  # None: biased in direction, so that no factor exists for every reward
    advantages_of: str = ""  # the estimator of the same advantages (but for the default eps), of another aggregation
    zero_sum_group: bool = False  # sum of A over each group is 0
    zero_sum_step: bool = False  # sum of A over the step is 0
    zero_when_equal: bool = False  # a group of equal rewards has A of exactly 0
    shift_invariant: bool = False  # A(r + b) = A(r), one b for the step
    scale_invariant: bool = False  # A(a r) = A(r) for a > 0, exact for eps = 0; otherwise A(a r) = a A(r)
    batch_dependent: bool = False  # a group's A depends on the step's other groups
    needs_lengths: bool = False
    needs_gram: bool = False  # of the group's scores: for stored groups alone, no choice of the configuration
    unit_rewards: bool = False  # takes rewards from 0 to 1 alone; nothing is declared of a scale
    least_R: int = 2  # rollouts in a group
    least_N: int = 1  # rollouts in a step, where that asks for more
    ddof: int | None = None  # defaults of the function; None where it divides by no standard deviation
    eps: float | None = None

    @property
    def name(self) -> str:
        """The function's name, which is also the choice of the configuration group."""
        return self.function.__name__

    @property
    def path(self) -> str:
        """The dotted path, as conf/estimator/NAME.yaml gives it."""
        return f"{self.function.__module__}.{self.name}"

    @property
    def by_group(self) -> bool:
        """Do the rewards of its own group alone decide an advantage?"""
        return not (self.batch_dependent or self.needs_lengths or self.needs_gram)


def _unbiased(R: int, G: int = 1) -> float:
    return 1.0


def _own_group(R: int, G: int = 1) -> float:
    """The baseline holds the rollout's own reward with weight 1/R; all others are independent of its score."""
    return (R - 1) / R


def _own_step(R: int, G: int = 1) -> float:
    return (G * R - 1) / (G * R)


_TABLE = (
    Declaration(
        grpo, "group mean", "arXiv 2606.29238, Eq 15", _own_group,
        zero_sum_group=True, zero_sum_step=True, zero_when_equal=True, shift_invariant=True,
    ),
    Declaration(
        dr_grpo, "group mean", "arXiv 2503.20783", _own_group, advantages_of="grpo",
        zero_sum_group=True, zero_sum_step=True, zero_when_equal=True, shift_invariant=True,
    ),
    Declaration(
        rloo, "leave-one-out", "Kool et al. 2019; arXiv 2402.14740", _unbiased,
        zero_sum_group=True, zero_sum_step=True, zero_when_equal=True, shift_invariant=True,
    ),
    Declaration(
        grpo_std, "std", "arXiv 2402.03300", None, ddof=1, eps=1e-4,
        zero_sum_group=True, zero_sum_step=True, zero_when_equal=True, shift_invariant=True, scale_invariant=True,
    ),
    Declaration(
        dapo, "std", "arXiv 2503.14476", None, advantages_of="grpo_std", ddof=1, eps=1e-6,
        zero_sum_group=True, zero_sum_step=True, zero_when_equal=True, shift_invariant=True, scale_invariant=True,
    ),
    Declaration(
        opo, "group mean by length", "arXiv 2505.23585", None,
        zero_when_equal=True, shift_invariant=True, needs_lengths=True,
    ),
    Declaration(reinforce, "none", "Williams 1992", _unbiased, least_R=1),
    Declaration(
        batch_mean, "step mean", "Williams 1992", _own_step, least_R=1, least_N=2,
        zero_sum_step=True, shift_invariant=True, batch_dependent=True,
    ),
    Declaration(
        reinforce_plus_plus, "step mean and std", "arXiv 2501.03262", None, least_R=1, least_N=2, ddof=0, eps=1e-8,
        zero_sum_step=True, shift_invariant=True, scale_invariant=True, batch_dependent=True,
    ),
    Declaration(
        reinforce_plus_plus_baseline, "std of the step", "arXiv 2501.03262", None, ddof=0, eps=1e-8,
        batch_dependent=True,
        zero_sum_group=True, zero_sum_step=True, zero_when_equal=True, shift_invariant=True, scale_invariant=True,
    ),
    Declaration(
        bnpo, "Beta density", "arXiv 2506.02864", None, batch_dependent=True, unit_rewards=True,
        zero_sum_group=True, zero_sum_step=True, zero_when_equal=True,
    ),
)  # fmt: skip
DECLARATIONS: Mapping[str, Declaration] = {one.name: one for one in _TABLE}
FROM_GRAM = (
    Declaration(
        score_norm, "leave-one-out by score norm", "Weaver & Tao 2001; Greensmith et al. 2004", _unbiased,
        zero_when_equal=True, shift_invariant=True, needs_gram=True,
    ),
    Declaration(
        salt, "std and projector", "arXiv 2606.05800", None, ddof=1, eps=1e-4,
        zero_when_equal=True, shift_invariant=True, scale_invariant=True, needs_gram=True,
    ),
)  # fmt: skip
"""Those that need the Gram of a group's scores. They are told apart from `DECLARATIONS`, which can be trained with."""
DISTINCT = tuple(one for one in _TABLE if not one.advantages_of)
"""Those whose advantages are no other's."""


def paths(holds: Callable[[Declaration], bool]) -> tuple[str, ...]:
    """The dotted paths of the estimators of which something holds, in the order of the table."""
    return tuple(one.path for one in _TABLE if holds(one))


def kinds(holds: Callable[[Declaration], bool]) -> tuple[str, ...]:
    """The kinds, each once, of the estimators of which something holds, in the order of the table."""
    return tuple(dict.fromkeys(one.kind for one in _TABLE if holds(one)))


def weight_on(estimator: Callable[..., Any], p: float, R: int) -> float:
    """The weight c(p) that an estimator puts on a prompt of success rate p: E[sum_i A_i psi_i / R] = c(p) grad p.

    For rewards of 0 and 1, so that J = p. Let A+(k) and A-(k) be the advantages of a right and a wrong rollout in a
    group of k right ones. With E[psi given right] = grad p / p and E[psi given wrong] = -grad p / q, q = 1 - p,

        c(p) = sum_{m=0}^{R-1} Binomial(m; R - 1, p) (A+(m + 1) - A-(m)):

    what a rollout gains by being right, given m right ones among the others. Nothing is divided by p or q, so that p =
    0 and p = 1 give the limits. The group mean has (R - 1)/R, RLOO and REINFORCE have 1, std scaling has
    sum_k Binomial(k; R, p) s2(k) / (std(k) + eps) / (p q) with s2 = k (R - k)/R^2. One prompt's direction is exact for
    every such estimator; how prompts are weighed against each other is what differs. For rewards of more than two
    values see `Declaration.factor`.

    Args:
        estimator: function of rewards (G, R) alone, of arrays or tensors (see `foreign`); bind other arguments by
            `functools.partial`.
        p: success rate, 0 <= p <= 1.
        R: rollouts in a group, >= 1.

    Returns:
        c(p): without unit, or per unit of reward for an estimator that divides by a standard deviation.

    Raises:
        ValueError: for p or R out of range, an estimator that needs lengths, depends on the step's other groups, or
            tells rollouts of equal reward apart.
    """
    if not 0 <= p <= 1 or R < 1:
        raise ValueError(f"p={p}, R={R}: allowed are 0 <= p <= 1 and R >= 1")
    name = getattr(getattr(estimator, "func", estimator), "__name__", repr(estimator))
    if takes_lengths(estimator):
        raise ValueError(f"{name}: its weight depends on the lengths too, not on the success rate alone")
    estimator = on_arrays(estimator)
    rewards_KR = np.tril(np.ones((R + 1, R)), -1)  # one group for each k, the right ones first
    advantages_KR = np.concatenate([estimator(rewards_R[None]) for rewards_R in rewards_KR])
    if not np.allclose(estimator(rewards_KR), advantages_KR, rtol=1e-9, atol=1e-12):
        raise ValueError(f"{name}: its weight depends on the other prompts of the step, not on the success rate alone")
    by_verdict_KR = np.where(rewards_KR == 1, advantages_KR[:, :1], advantages_KR[:, -1:])
    if not np.allclose(by_verdict_KR, advantages_KR, rtol=1e-9, atol=1e-12):
        raise ValueError(f"{name}: gives rollouts of equal reward different advantages, so it has no weight by k alone")
    gains_R = (advantages_KR[1:, 0] - advantages_KR[:-1, -1]).tolist()
    return math.fsum(probability * gain for probability, gain in zip(_binomial(R - 1, p), gains_R, strict=True))


def _binomial(n: int, p: float) -> list[float]:
    """P(0), ..., P(n) of Binomial(n, p), trial by trial: only positive terms are added, and no large n overflows."""
    probabilities = [1.0]
    for _ in range(n):
        pairs = zip([*probabilities, 0.0], [0.0, *probabilities], strict=True)
        probabilities = [(1 - p) * fails + p * succeeds for fails, succeeds in pairs]
    return probabilities
