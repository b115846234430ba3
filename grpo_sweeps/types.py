"""Frozen records that every part of the package exchanges.

Shape letters used in names and docstrings throughout the package:

    G  groups (prompts) per step           R  rollouts per group
    B  rows (rollouts) in a micro-batch    T  tokens of a row
    V  vocabulary                          D  trainable parameters
    H  hidden width

`rewards_GR` is a (G, R) array, `gram_RR` an (R, R) one. This module needs neither torch nor Hydra nor MLflow, so that
`status`, `report` and `--help` start at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RowKind = Literal["scores", "loss"]


@dataclass(frozen=True, slots=True)
class Within:
    """The range of a number, both ends in it, declared in a function's signature: `p: Annotated[float, Within(0, 1)]`.

    The configuration of a run is checked by it before anything starts.
    """

    low: float
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}" if math.isfinite(self.high) else f"{self.low:g} or more"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a task. `answer` is the reference answer alone ("18"), `solution` the worked text that ends in
    it, `columns` what the data says of it beside these, for rewards to read."""

    id: str
    question: str
    answer: str
    solution: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class TaskData:
    """What a task function returns: problems to train on and held-out problems, disjoint."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a completion is right, by the strict and the flexible reading of its answer, whatever the reward is.

    What the two are is defined by the kind of verdict, in `rewards/verdicts.py`. `parsed` is False when neither finds
    an answer.
    """

    strict: bool
    flexible: bool
    parsed: bool


class EstimatorFunction(Protocol):
    """An estimator as a step calls it, made by `functions.load_estimator`: a pure function of float64 arrays.

    The function behind it takes `rewards_GR` alone, or names a parameter `lengths_GR` ((G, R), tokens) as well. It may
    be a user's own: what it returns is checked by the step.
    """

    def __call__(self, rewards_GR: Array, lengths_GR: Array) -> Any: ...


TaskFunction = Callable[..., TaskData]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled rollout as it is kept on disk."""

    step: int
    prompt_id: str
    rollout: int
    prompt: str
    text: str
    reward: float
    advantage: float
    strict: bool
    flexible: bool
    length: int
    truncated: bool
    group: int = 0  # position of the group within its step: a prompt sampled twice in one step stays two groups


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Everything that later analysis needs about one group of R rollouts at one step.

    The gradient matrix of the paper is diag(weights) Psi, Psi the R x D matrix of scores; its Gram is
    diag(w) K diag(w) with K = `gram`. `gram` is None for a group that was not measured (all rewards equal, or a step
    without measurement). `floor` says how exactly K is the Gram of the gradients that were applied: entry K_ij is known
    to +-floor * sqrt(K_ii K_jj). `same_as` names for each rollout the first of the group with the same tokens. Records
    without it are older, and their `floor` is another number: the training dtype against a wider copy of the model.
    `cut` says which rollouts reached the limit of tokens (empty in older records); with rollout.cut=mask these have
    weight 0. Lists are of length R. `logprob_sums`: sum over the rollout's tokens of log pi under the policy that is
    differentiated.
    """

    step: int
    prompt_id: str
    R: int
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    lengths: tuple[int, ...]
    logprob_sums: tuple[float, ...]
    strict: tuple[bool, ...]
    flexible: tuple[bool, ...]
    rows: RowKind = "scores"
    gram: np.ndarray | None = None
    floor: float = 0.0
    gram_by: dict[str, np.ndarray] = field(default_factory=dict)
    group: int = 0  # position of the group within its step: a prompt sampled twice in one step stays two groups
    same_as: tuple[int, ...] = ()
    cut: tuple[bool, ...] = ()

    @property
    def mixed(self) -> bool:
        """True when the group's rewards differ: only such a group has a gradient under a group baseline."""
        return max(self.rewards) > min(self.rewards)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One held-out problem at one evaluation: correct answers among `samples` drawn as in training, the greedy verdict,
    and the run's own reward: its mean over the samples and that of the greedy completion.

    Of a task without verdicts the answers count as wrong; records from before rewards were kept have NaN there.
    """

    step: int
    problem_id: str
    samples: int
    strict: int
    flexible: int
    greedy_strict: bool
    greedy_flexible: bool
    reward: float = math.nan
    greedy_reward: float = math.nan


class ConfigError(ValueError):
    """A bad command or configuration: one sentence with the key, the value and what is allowed. Exit code 2."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """What the update of one step did to one trainable parameter.

    The change is that of the optimiser's weights, float32 or float64. `changed` counts the weights that differ in the
    training dtype, `changed_float32` those that differ in the optimiser's. `sparsity` is Hoyer's, of the change. The
    ranks are of the change as a matrix; NaN where it is not a matrix, is 0, or is too large.
    """

    step: int
    name: str
    layer: str
    shape: tuple[int, ...]
    sq_norm: float
    l1: float
    sparsity: float
    changed: int
    changed_float32: int
    stable_rank: float
    effective_rank: float
