"""Which group's completions a step keeps to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from grpo_sweeps.config import RunConfig
from grpo_sweeps.loop.results import completions
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.setup import prepare
from grpo_sweeps.loop.step import training_step

MakeConfig = Callable[..., RunConfig]
MIXED, RIGHT, WRONG = (1.0, 0.0, 1.0, 0.0), (1.0,) * 4, (0.0,) * 4


@pytest.mark.parametrize(
    ("rewards", "baseline", "kept"),
    [
        ((WRONG, RIGHT, MIXED, MIXED), True, 2),  # the first mixed one
        ((MIXED, WRONG, MIXED, RIGHT), True, 0),
        ((WRONG, RIGHT, WRONG, RIGHT), True, 0),  # none teaches: the first
        ((WRONG, RIGHT, MIXED, RIGHT), False, 2),  # without a baseline right ones teach too
        ((WRONG, WRONG, RIGHT, RIGHT), False, 2),
    ],
)
def test_the_first_group_that_teaches_and_is_mixed(
    make_config: MakeConfig, rewards: tuple[tuple[float, ...], ...], baseline: bool, kept: int
) -> None:
    setup = prepare(make_config())
    rated = rollouts_with_advantages(setup, 0)
    rewards_GR = torch.tensor(rewards, dtype=torch.float64)
    advantages_GR = rewards_GR - rewards_GR.mean(dim=1, keepdim=True) if baseline else rewards_GR
    rated = dataclasses.replace(rated, rewards_GR=rewards_GR, advantages_GR=advantages_GR)
    found = completions(setup, rated, 0)
    assert [c.group for c in found] == [kept] * 4 and [c.rollout for c in found] == [0, 1, 2, 3]
    assert [c.text for c in found] == [o.text for o in rated.rollouts[rated.rows(kept)]]
    assert [c.reward for c in found] == list(rewards[kept])
    assert [c.advantage for c in found] == advantages_GR[kept].tolist()
    assert {c.prompt_id for c in found} == {rated.problems[kept].id}
    verdicts = rated.verdicts[rated.rows(kept)]
    assert [(c.strict, c.flexible) for c in found] == [(v.strict, v.flexible) for v in verdicts]


def test_only_so_many_steps_and_they_are_the_groups_own_records(make_config: MakeConfig) -> None:
    setup = prepare(make_config(analysis={"keep_completions_every": 2}, trainer={"prompts": 8}))
    results = [training_step(setup, step) for step in range(3)]
    assert not results[1].completions and not results[2].groups[0].mixed, "of another group than the first"
    for result in (results[0], results[2]):
        group = result.groups[result.completions[0].group]
        first = next((g.group for g in result.groups if g.mixed), 0)
        assert group.group == first and group.prompt_id == result.completions[0].prompt_id
        assert tuple(c.reward for c in result.completions) == group.rewards
        assert tuple(c.length for c in result.completions) == group.lengths
