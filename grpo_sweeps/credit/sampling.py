"""Completions of a trained policy and the values of their prefixes, from fresh continuations.

A continuation is sampled as the rest of its rollout would have been: prompt and prefix in front, at the run's own
temperature, with the tokens that the limit leaves, ended by the same tokens and stop strings. A stop string may begin
in the prefix: the whole text is cut there. Its reward is the run's own, of prefix and continuation together.

Prefixes that several rollouts share are valued once: their errors are then the same, and still independent of the
rollouts and of the errors one edge further. Seeds belong to (seed, problem, prefix, continuation), so that two runs of
one task are compared on the same random numbers, and the batches change nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_sweeps.credit.values import Starts, Values, edges_of, mean_and_noise
from grpo_sweeps.engine.sampler import Rollout, completion_text, row_seed, sample
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.spectra import Array
from grpo_sweeps.types import ConfigError, Problem

Prefix = tuple[int, tuple[int, ...]]
"""Number of the problem, and the tokens of the completion so far."""


@dataclass(frozen=True)
class Plan:
    """What to draw: rollouts of each problem, continuations of each prefix, tokens between edges, the seed."""

    rollouts: int
    continuations: int
    every: int
    seed: int


@dataclass(frozen=True, eq=False)
class Sampled:
    """Rollouts, problem after problem, `edges[i]` of each, and what was drawn from their prefixes.

    drawn: continuations in all; prefixes: how many different ones they start from.
    """

    problems: list[Problem]
    rollouts: list[Rollout]
    values: Values
    starts: Starts
    prefixes: int
    drawn: int

    def edges(self, i: int) -> list[int]:
        """The edges of rollout i, without what pads them."""
        edges = self.values.edges_NE[i].tolist()
        return edges[: edges.index(edges[-1]) + 1]


def choose(problems: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """`count` problems without repetition, in an order that the seed decides."""
    order = np.random.Generator(np.random.Philox(row_seed(seed, "credit problems"))).permutation(len(problems))
    return [problems[i] for i in order[:count]]


def draw(setup: Setup, problems: Sequence[Problem], plan: Plan) -> Sampled:
    """Sample the rollouts, then value every prefix at their edges."""
    prompts = setup.policy.encode([setup.prompt(p) for p in problems])
    owners = [p for p in range(len(problems)) for _ in range(plan.rollouts)]
    keys = [(plan.seed, "credit rollout", problems[p].id, i % plan.rollouts) for i, p in enumerate(owners)]
    rollouts = sample(
        setup.policy, [prompts[p] for p in owners], [row_seed(*key) for key in keys], setup.config.rollout,
        setup.config.task.stop, share_prompts=True,
    )  # fmt: skip
    rewards = [reward_of(setup, o.text, problems[p], key) for o, p, key in zip(rollouts, owners, keys, strict=True)]
    edges = [edges_of(o.length, plan.every) for o in rollouts]
    prefixes = {
        (p, o.completion_ids[:edge])
        for o, p, edges_E in zip(rollouts, owners, edges, strict=True)
        for edge in edges_E[:-1]
    }
    found = continued(setup, problems, prompts, prefixes, plan)
    starts = [found[p, ()] for p in range(len(problems))]
    return Sampled(
        problems=list(problems),
        rollouts=rollouts,
        values=_values(owners, rollouts, edges, rewards, {prefix: r_M for prefix, (r_M, _) in found.items()}),
        starts=Starts(np.stack([r for r, _ in starts]), -(-np.stack([t for _, t in starts]) // plan.every)),
        prefixes=len(prefixes),
        drawn=len(prefixes) * plan.continuations,
    )


def reward_of(setup: Setup, text: str, problem: Problem, key: Sequence[int | str]) -> float:
    """The run's reward of a completion. Raises ConfigError where it gives no finite number."""
    reward = setup.reward(text, problem, row_seed("reward", *key))
    if not isinstance(reward, int | float | np.number) or not math.isfinite(reward):
        raise ConfigError(f"reward {setup.config.reward.target} gave {reward!r}: a finite number is needed")
    return float(reward)


def continued(
    setup: Setup, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], prefixes: set[Prefix], plan: Plan
) -> dict[Prefix, tuple[Array, np.ndarray]]:
    """For each prefix the rewards of its continuations (M,), and the tokens of prefix and continuation together (M,).

    Short prefixes first, `rollout.batch` rows at a time: the rows of a batch then have nearly the same tokens left. All
    get as many as the shortest prefix leaves, and what goes beyond a row's own limit is cut: the tokens before it are
    those that the smaller limit would have given.
    """
    rollout, stop, M = setup.config.rollout, setup.config.task.stop, plan.continuations
    ordered = sorted(prefixes, key=lambda prefix: (len(prefix[1]), prefix))
    rows = [(prefix, c) for prefix in ordered for c in range(M)]
    rewards, lengths = list[float](), list[int]()
    for start in range(0, len(rows), rollout.batch):
        part = rows[start : start + rollout.batch]
        left = rollout.max_new_tokens - len(part[0][0][1])
        keys: list[tuple[int | str, ...]] = [
            (plan.seed, "credit value", problems[p].id, *ids, c) for (p, ids), c in part
        ]
        drawn = sample(
            setup.policy, [(*prompts[p], *ids) for (p, ids), _ in part], [row_seed(*key) for key in keys],
            dataclasses.replace(rollout, max_new_tokens=left), stop, share_prompts=True,
        )  # fmt: skip
        for ((p, ids), _), one, key in zip(part, drawn, keys, strict=True):
            whole = (*ids, *one.completion_ids)[: rollout.max_new_tokens]
            text = completion_text(setup.policy.tokenizer, whole, stop)
            rewards.append(reward_of(setup, text, problems[p], key))
            lengths.append(len(whole))
    shape = len(ordered), M
    return dict(zip(ordered, zip(np.reshape(rewards, shape), np.reshape(lengths, shape), strict=True), strict=True))


def _values(
    owners: Sequence[int],
    rollouts: Sequence[Rollout],
    edges: Sequence[Sequence[int]],
    rewards: Sequence[float],
    found: dict[Prefix, Array],
) -> Values:
    """Values at the edges of each rollout, the last repeated up to the longest."""
    N, E = len(rollouts), max(len(edges_E) for edges_E in edges)
    edges_NE, values_NE, noise_NE = np.zeros((N, E), dtype=np.int64), np.zeros((N, E)), np.zeros((N, E))
    for i, (p, rollout, edges_E, reward) in enumerate(zip(owners, rollouts, edges, rewards, strict=True)):
        last = len(edges_E) - 1
        rewards_KM = np.stack([found[p, rollout.completion_ids[:edge]] for edge in edges_E[:-1]])
        values_NE[i, :last], noise_NE[i, :last] = mean_and_noise(rewards_KM)
        values_NE[i, last:], edges_NE[i, :last], edges_NE[i, last:] = reward, edges_E[:-1], edges_E[-1]
    return Values(np.array(owners), edges_NE, values_NE, noise_NE)
