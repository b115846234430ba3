"""The groups of a step: prompts, rollouts and rewards; drawn anew where only groups of different rewards are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from grpo_sweeps.engine.rollouts import Rollout, row_seed
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.rewards.parsing import verdict
from grpo_sweeps.types import ConfigError, Problem, Verdict

LARGEST_REWARD = 1e100  # squares of larger ones overflow, and a group's spread with them


@dataclass(frozen=True)
class Group:
    """One prompt's rollouts with their rewards."""

    problem: Problem
    rollouts: list[Rollout]
    verdicts: list[Verdict]
    rewards: list[float]

    @property
    def mixed(self) -> bool:
        return max(self.rewards) > min(self.rewards)


@dataclass(frozen=True)
class Drawn:
    """The step's groups, and what it says of how they were found."""

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


def draw(setup: Setup, step: int) -> Drawn:
    """A group for each of the step's prompts.

    With objective.resample (DAPO's dynamic sampling, arXiv 2503.14476): as many fresh prompts again and again, until
    there are enough groups whose rewards differ, for `resample_rounds` times at most or until every training problem
    was drawn; what is lacking then is filled up with the first groups of equal rewards. The rest is discarded.
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
    discarded = (len(groups) - len(kept)) * setup.config.R
    return Drawn(kept, {"resample/rounds": float(rounds), "resample/discarded_rollouts": float(discarded)})


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
    verdicts = [verdict(o.text, p.answer) for o, p in zip(rollouts, owners, strict=True)]
    rewards = [reward_of(setup, o.text, p, key) for o, p, key in zip(rollouts, owners, keys, strict=True)]
    cuts = [slice(start, start + R) for start in range(0, len(rollouts), R)]
    return [Group(p, rollouts[c], verdicts[c], rewards[c]) for p, c in zip(problems, cuts, strict=True)]


def reward_of(setup: Setup, text: str, problem: Problem, key: Sequence[int | str]) -> float:
    """The run's reward of a completion; `key` is what its random numbers belong to.

    Rewards may be a user's own: what they return is checked where it arrives. Raises ConfigError where that is no
    finite number.
    """
    reward = setup.reward(text, problem, row_seed("reward", *key))
    if not isinstance(reward, int | float | np.number) or not abs(reward) <= LARGEST_REWARD:
        allowed = f"a finite number is needed, of {LARGEST_REWARD:g} at most"
        raise ConfigError(f"reward {setup.config.reward.target} gave {reward!r}: {allowed}")
    return float(reward)
