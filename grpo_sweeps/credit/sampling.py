"""Completions of a trained policy and the values of their prefixes, from fresh continuations.

How a continuation is sampled is in `loop.continuations`. Seeds belong to (seed, problem, prefix, continuation), so that
two runs of one task are compared on the same random numbers, and the batches change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_sweeps.credit.shares import Starts, Values, mean_and_noise
from grpo_sweeps.engine.rollouts import Rollout, row_seed
from grpo_sweeps.loop.continuations import Prefix, continued, edges_of
from grpo_sweeps.loop.rollouts import rewards_of
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.types import Array, Problem


@dataclass(frozen=True)
class Plan:
    """What to draw: rollouts per problem, continuations per prefix, tokens between edges, the seed."""

    rollouts: int
    continuations: int
    every: int
    seed: int


@dataclass(frozen=True, eq=False)
class Sampled:
    """Rollouts, problem after problem, and the values that were drawn at the edges of their segments.

    drawn: continuations in all; prefixes: how many different ones they start from.
    """

    problems: list[Problem]
    rollouts: list[Rollout]
    values: Values
    starts: Starts
    prefixes: int
    drawn: int

    def edges(self, i: int) -> list[int]:
        """The edges of rollout i, without padding."""
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
    rollouts = setup.sampler.sample(
        [prompts[p] for p in owners], [row_seed(*key) for key in keys], setup.config.rollout,
        setup.config.task.stop, share_prompts=True,
    )  # fmt: skip
    rewards = rewards_of(setup, [o.text for o in rollouts], [problems[p] for p in owners], keys, plan.rollouts).values
    edges = [edges_of(o.length, plan.every) for o in rollouts]
    prefixes = {
        (p, o.completion_ids[:edge])
        for o, p, edges_E in zip(rollouts, owners, edges, strict=True)
        for edge in edges_E[:-1]
    }
    found = continued(setup, problems, prompts, prefixes, plan.continuations, (plan.seed, "credit value"))
    starts = [found[p, ()] for p in range(len(problems))]
    return Sampled(
        problems=list(problems),
        rollouts=rollouts,
        values=_values(owners, rollouts, edges, rewards, {prefix: r_M for prefix, (r_M, _) in found.items()}),
        starts=Starts(np.stack([r for r, _ in starts]), -(-np.stack([t for _, t in starts]) // plan.every)),
        prefixes=len(prefixes),
        drawn=len(prefixes) * plan.continuations,
    )


def _values(
    owners: Sequence[int],
    rollouts: Sequence[Rollout],
    edges: Sequence[Sequence[int]],
    rewards: Sequence[float],
    found: dict[Prefix, Array],
) -> Values:
    """Values at the edges of each rollout; the last is repeated up to the length of the longest."""
    N, E = len(rollouts), max(len(edges_E) for edges_E in edges)
    edges_NE, values_NE, noise_NE = np.zeros((N, E), dtype=np.int64), np.zeros((N, E)), np.zeros((N, E))
    for i, (p, rollout, edges_E, reward) in enumerate(zip(owners, rollouts, edges, rewards, strict=True)):
        last = len(edges_E) - 1
        rewards_KM = np.stack([found[p, rollout.completion_ids[:edge]] for edge in edges_E[:-1]])
        values_NE[i, :last], noise_NE[i, :last] = mean_and_noise(rewards_KM)
        values_NE[i, last:], edges_NE[i, :last], edges_NE[i, last:] = reward, edges_E[:-1], edges_E[-1]
    return Values(np.array(owners), edges_NE, values_NE, noise_NE)
