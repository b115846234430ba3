"""The rollouts of a step: drawn and rewarded, again where only groups of different rewards are wanted; their advantages
and row weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.engine.rollouts import Rollout, row_seed
from grpo_sweeps.estimators import row_weights
from grpo_sweeps.loop.rewarding import Batch, Key, Rewards, reward_metrics
from grpo_sweeps.loop.scoring import scored
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.maths.objective import kl, kl_in_reward
from grpo_sweeps.types import Problem, Verdict


@dataclass(frozen=True)
class Group:
    """One prompt's rollouts with their rewards: what the run's functions gave, less what length takes off."""

    problem: Problem
    rollouts: list[Rollout]
    verdicts: list[Verdict]
    rewards: list[float]
    given: Rewards

    @property
    def mixed(self) -> bool:
        return max(self.rewards) > min(self.rewards)


@dataclass(frozen=True)
class Drawn:
    """The step's groups, and what it says of how they were found."""

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rated:
    """A step's rollouts with what was made of them, before the backward. Lists of length G R, group after group.

    counts_GR: 1 for a rollout that the loss has, 0 for one that is masked (rollout.cut=mask).
    metrics: what the step says of how they were drawn and rewarded, where that is not the plain way.
    """

    problems: list[Problem]
    rollouts: list[Rollout]
    verdicts: list[Verdict]
    rewards_GR: Tensor
    advantages_GR: Tensor
    weights_GR: Tensor
    counts_GR: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def rows(self, g: int) -> slice:
        R = self.rewards_GR.shape[1]
        return slice(g * R, (g + 1) * R)

    def rollouts_of(self, groups: list[int]) -> list[Rollout]:
        return [o for g in groups for o in self.rollouts[self.rows(g)]]


def rollouts_with_advantages(setup: Setup, step: int) -> Rated:
    """R rollouts for each of the step's prompts, their rewards, advantages and row weights."""
    config = setup.config
    drawn = draw(setup, step)
    groups = drawn.groups
    rollouts = [o for group in groups for o in group.rollouts]
    rewards_GR = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    lengths_GR = torch.tensor([o.length for o in rollouts]).view_as(rewards_GR)
    rewards_GR, metrics = _less_kl(setup, rollouts, rewards_GR)
    metrics |= _of_rewards(setup, groups)
    counts_GR = torch.tensor([not (config.rollout.cut == "mask" and o.truncated) for o in rollouts]).view_as(rewards_GR)
    advantages = _checked(setup.estimator(rewards_GR.numpy(), lengths_GR.numpy()), rewards_GR, config.estimator.target)
    weights = row_weights(advantages, lengths_GR.numpy(), config.aggregation, config.rollout.max_new_tokens)
    return Rated(
        [group.problem for group in groups],
        rollouts,
        [v for group in groups for v in group.verdicts],
        rewards_GR,
        torch.from_numpy(advantages),
        torch.from_numpy(weights) * counts_GR,
        counts_GR.double(),
        drawn.metrics | metrics,
    )


def _of_rewards(setup: Setup, groups: list[Group]) -> dict[str, float]:
    """What the step says of the rewards that its functions gave."""
    config, given = setup.config, [group.given for group in groups]
    metrics = reward_metrics(given, config.reward_on_failure == "zero") | setup.judge.metrics()
    if config.rollout.cut_penalty or config.objective.kl_in_reward:
        metrics["reward/task"] = float(np.mean([one.values for one in given]))
    return metrics


def draw(setup: Setup, step: int) -> Drawn:
    """A group for each of the step's prompts.

    With objective.resample (DAPO's dynamic sampling, arXiv 2503.14476): as many fresh prompts again and again, until
    there are enough groups whose rewards differ, for `resample_rounds` times at most or until every training problem
    was drawn; the first groups of equal rewards fill up what is missing then. The rest is discarded.
    """
    objective, wanted = setup.config.objective, setup.config.groups
    groups = _groups(setup, step, setup.problems(step))
    if not objective.resample:
        return Drawn(groups)
    fresh, rounds = _fresh(setup, step, (group.problem for group in groups)), 0
    while sum(group.mixed for group in groups) < wanted and rounds < objective.resample_rounds:
        problems = list(islice(fresh, wanted))
        if not problems:
            break
        groups += _groups(setup, step, problems)
        rounds += 1
    kept = [group for group in groups if group.mixed][:wanted]
    kept += [group for group in groups if not group.mixed][: wanted - len(kept)]
    all_tokens, tokens = (sum(o.length for group in some for o in group.rollouts) for some in (groups, kept))
    counts = {"rounds": rounds, "discarded_rollouts": (len(groups) - len(kept)) * setup.config.R,
              "discarded_tokens": all_tokens - tokens}  # fmt: skip
    return Drawn(kept, {f"resample/{name}": float(number) for name, number in counts.items()})


def _fresh(setup: Setup, step: int, seen: Iterable[Problem]) -> Iterator[Problem]:
    """The other training problems in an order of the step's own: a function of (seed, step), as the step's prompts
    are."""
    ids = {problem.id for problem in seen}
    train = setup.data.train
    order = np.random.Generator(np.random.Philox(row_seed(setup.config.seed, "resample", step))).permutation(len(train))
    return (train[i] for i in order if train[i].id not in ids)


def _groups(setup: Setup, step: int, problems: list[Problem]) -> list[Group]:
    """R rollouts for each problem, and their rewards."""
    config, R = setup.config, setup.config.R
    keys = [(config.seed, "train", step, p.id, r) for p in problems for r in range(R)]
    prompts = [ids for ids in setup.policy.encode([setup.prompt(p) for p in problems]) for _ in range(R)]
    rollouts = setup.sampler.sample(prompts, [row_seed(*key) for key in keys], config.rollout, config.task.stop)
    owners = [p for p in problems for _ in range(R)]
    texts = [o.text for o in rollouts]
    verdicts = setup.judge.all(texts, owners)
    given = rewards_of(setup, texts, owners, keys, R)
    rewards = [value - length_penalty(o, config.rollout) for value, o in zip(given.values, rollouts, strict=True)]
    cuts = [slice(start, start + R) for start in range(0, len(rollouts), R)]
    return [Group(p, rollouts[c], verdicts[c], rewards[c], given.rows(c)) for p, c in zip(problems, cuts, strict=True)]


def length_penalty(rollout: Rollout, config: RolloutConfig) -> float:
    """What a rollout's length takes off its reward: `cut_penalty` where it was cut.

    With `cut_buffer` = N the penalty grows over the last N of `max_new_tokens` tokens, of a rollout that ended there by
    itself too: cut_penalty (T - (max_new_tokens - N)) / N for a rollout of T tokens, 0 for a shorter one. That is
    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) with L_max = max_new_tokens and L_cache = N.
    """
    if not config.cut_buffer:
        return config.cut_penalty * rollout.truncated
    beyond = rollout.length - (config.max_new_tokens - config.cut_buffer)
    return config.cut_penalty * max(0, beyond) / config.cut_buffer


def rewards_of(
    setup: Setup, texts: Sequence[str], problems: Sequence[Problem], keys: Sequence[Key], size: int = 1
) -> Rewards:
    """The run's rewards of completions, `size` after one another from one group; each key is what a completion's random
    numbers belong to. Raises as `Rewarder`."""
    return setup.reward(Batch(texts, problems, keys, size, setup.asked))


def _less_kl(setup: Setup, rollouts: list[Rollout], rewards_GR: Tensor) -> tuple[Tensor, dict[str, float]]:
    """(G, R) rewards less beta times each sequence's KL estimate, and the metrics that say how much that was.

    Without KL in the reward the rewards as they are.
    """
    objective = setup.config.objective
    if not objective.kl_in_reward:
        return rewards_GR, {}
    assert setup.reference is not None
    own = scored(setup, rollouts)
    with setup.reference.opened() as model:
        reference = scored(setup, rollouts, model)
    rewards, k = list[Tensor](), list[Tensor]()
    for reward, own_T, reference_T in zip(rewards_GR.flatten(), own, reference, strict=True):
        row = own_T.cpu()[None], reference_T.cpu()[None], torch.ones(1, len(own_T), dtype=torch.bool)
        rewards.append(kl_in_reward(reward[None], *row, objective.kl_estimator, objective.kl_beta))
        k.append(kl(*row, objective.kl_estimator).flatten())
    return torch.cat(rewards).view_as(rewards_GR), {"kl": float(torch.cat(k).mean())}


def _checked(values: object, rewards_GR: Tensor, estimator: str) -> np.ndarray:
    """The advantages. Estimators may be a user's own: what they return is checked where it arrives."""
    shape = tuple(rewards_GR.shape)
    if not isinstance(values, np.ndarray) or values.shape != shape:
        found = values.shape if isinstance(values, np.ndarray) else type(values).__name__
        raise ValueError(f"estimator {estimator} gave {found}: an array or tensor of shape {shape} is needed")
    if not np.isfinite(values).all():
        raise ValueError(f"estimator {estimator} gave {values[~np.isfinite(values)][0]}: finite numbers are needed")
    return values
