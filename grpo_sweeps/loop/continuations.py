"""Values of prefixes from fresh continuations, and the credit of a step's tokens that they give.

A continuation is sampled as the rest of its rollout would have been: prompt and prefix in front, at the run's own
temperature, with the tokens that the limit leaves, ended by the same tokens and stop strings. A stop string may begin
in the prefix: the whole text is cut there. Its reward is the run's own, of prefix and continuation together.

Prefixes that several rollouts share are valued once: their errors are then the same, and still independent of the
rollouts and of the errors one edge further. Seeds belong to (what the caller gives, problem, prefix, continuation), so
that the batches change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.rollouts import Rollout, completion_text, row_seed
from grpo_sweeps.loop.rollouts import rewards_of
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.types import Array, Problem

Prefix = tuple[int, tuple[int, ...]]
"""Number of the problem, and the tokens of the completion so far."""


@dataclass(frozen=True)
class Credit:
    """Each rollout's advantages by token, (its length,) float64, and what the step says of the values behind them."""

    by_token: list[Tensor] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def step_credit(
    setup: Setup, problems: Sequence[Problem], rollouts: Sequence[Rollout], rewards: Tensor, step: int
) -> Credit:
    """VinePPO's advantages (arXiv 2410.01679): all tokens of segment k get V_{k+1} - V_k, with V_k the mean reward of
    `objective.continuations` fresh continuations of the prefix before it, and the rollout's own reward at its end.

    A segment has `objective.value_every` tokens; with 0 a rollout is one, and its tokens get r - V(x). The values are
    of other rollouts than the one that is credited, so that the gradient is unbiased however few there are.

    Args:
        problems: one a group; rollouts, rewards: group after group, as many of each.

    Returns:
        Nothing where there are no continuations.
    """
    objective = setup.config.objective
    if not objective.continuations:
        return Credit()
    R = len(rollouts) // len(problems)
    edges = [edges_of(o.length, objective.value_every or o.length) for o in rollouts]
    prefixes = {(i // R, o.completion_ids[:edge]) for i, o in enumerate(rollouts) for edge in edges[i][:-1]}
    prompts = [o.prompt_ids for o in rollouts[::R]]
    key = (setup.config.seed, "train value", step)
    found = continued(setup, problems, prompts, prefixes, objective.continuations, key)
    by_token = []
    for i, (o, edges_E, reward) in enumerate(zip(rollouts, edges, rewards.tolist(), strict=True)):
        values = [float(found[i // R, o.completion_ids[:edge]][0].mean()) for edge in edges_E[:-1]]
        by_token.append(by_segment(values, edges_E, reward))
    tokens = sum(int(lengths_M.sum()) - len(ids) * len(lengths_M) for (_, ids), (_, lengths_M) in found.items())
    metrics = {
        "value/prefixes": len(prefixes),
        "value/continuations": len(prefixes) * objective.continuations,
        "value/tokens": tokens,
    }
    return Credit(by_token, {name: float(count) for name, count in metrics.items()})


def edges_of(length: int, every: int) -> list[int]:
    """The edges of a rollout of `length` tokens: 0, every `every` tokens, the end.

    Whether a segment ends is seen from the tokens before, so that credits stay martingale differences.

    >>> edges_of(5, 2)
    [0, 2, 4, 5]
    """
    return [*range(0, length, every), length]


def by_segment(values: Sequence[float], edges: Sequence[int], reward: float) -> Tensor:
    """(T,) float64: each token of segment k gets V_{k+1} - V_k, with the reward after the last.

    Args:
        values: V at every edge but the last. edges: tokens before each edge, 0 first and T last.

    >>> by_segment([0.5, 0.25], [0, 2, 3], 1.0).tolist()
    [-0.25, -0.25, 0.75]
    """
    A_K = np.diff([*values, reward])
    return torch.from_numpy(np.repeat(A_K, np.diff(edges)))


def continued(
    setup: Setup,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    prefixes: set[Prefix],
    M: int,
    key: tuple[int | str, ...],
) -> dict[Prefix, tuple[Array, np.ndarray]]:
    """For each prefix the rewards of its M continuations (M,), and the tokens of prefix and continuation together (M,).

    Short prefixes first, `rollout.batch` rows at a time: the rows of a batch then have nearly the same tokens left. All
    get as many as the shortest prefix leaves, and what goes beyond a row's own limit is cut: the tokens before it are
    those that the smaller limit would have given.

    Args:
        prompts: token ids of each problem's prompt. key: what the seeds belong to beside problem, prefix, continuation.

    Raises:
        ConfigError: where the reward gives no finite number.
    """
    rollout, stop = setup.config.rollout, setup.config.task.stop
    ordered = sorted(prefixes, key=lambda prefix: (len(prefix[1]), prefix))
    rows = [(prefix, c) for prefix in ordered for c in range(M)]
    rewards, lengths = list[float](), list[int]()
    for start in range(0, len(rows), rollout.batch):
        part = rows[start : start + rollout.batch]
        left = rollout.max_new_tokens - len(part[0][0][1])
        keys: list[tuple[int | str, ...]] = [(*key, problems[p].id, *ids, c) for (p, ids), c in part]
        drawn = setup.sampler.sample(
            [(*prompts[p], *ids) for (p, ids), _ in part], [row_seed(*key) for key in keys],
            dataclasses.replace(rollout, max_new_tokens=left), stop, share_prompts=True,
        )  # fmt: skip
        wholes = [
            (*ids, *one.completion_ids)[: rollout.max_new_tokens]
            for ((_, ids), _), one in zip(part, drawn, strict=True)
        ]
        texts = [completion_text(setup.policy.tokenizer, whole, stop) for whole in wholes]
        rewards += rewards_of(setup, texts, [problems[p] for (p, _), _ in part], keys).values
        lengths += [len(whole) for whole in wholes]
    shape = len(ordered), M
    return dict(zip(ordered, zip(np.reshape(rewards, shape), np.reshape(lengths, shape), strict=True), strict=True))
