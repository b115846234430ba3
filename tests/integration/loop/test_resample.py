"""Dynamic sampling, and whole runs of every objective: interrupted ones equal those that were not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.config import ObjectiveConfig, RunConfig
from grpo_sweeps.loop.inner import take_step
from grpo_sweeps.loop.rollouts import draw
from grpo_sweeps.loop.setup import prepare
from grpo_sweeps.loop.train import train
from grpo_sweeps.tracking.local import read_evals, read_groups, read_metrics
from tests.unit.loop.cut_runs import train_until, without_clock

pytestmark = pytest.mark.integration

MakeConfig = Callable[..., RunConfig]
RESAMPLE = ObjectiveConfig(resample=True)


def test_every_group_is_mixed_and_no_prompt_comes_twice(make_config: MakeConfig) -> None:
    setup = prepare(make_config(objective=RESAMPLE))
    plain = prepare(make_config())
    rounds = 0
    for step in range(4):
        first, drawn = draw(plain, step), draw(setup, step)
        rounds += int(drawn.metrics["resample/rounds"])
        assert len(drawn.groups) == 4 and all(group.mixed for group in drawn.groups)
        ids = [group.problem.id for group in drawn.groups]
        assert len(set(ids)) == 4
        kept = [group.problem.id for group in first.groups if group.mixed]
        assert ids[: len(kept)] == kept, "the step's own mixed groups come first"
        expected = (1 + int(drawn.metrics["resample/rounds"])) * 16 - 16
        assert drawn.metrics["resample/discarded_rollouts"] == expected
        again = draw(prepare(make_config(objective=RESAMPLE)), step)
        assert [g.problem.id for g in again.groups] == ids and again.metrics == drawn.metrics
    assert rounds > 0, "nothing was drawn anew: the case says little"


@pytest.mark.parametrize(("most", "rounds"), [(2, 2), (10, 7)])  # 30 problems: the first 4, then 26 in draws of 4
def test_where_nothing_is_mixed_the_step_keeps_its_size(make_config: MakeConfig, most: int, rounds: int) -> None:
    setup = prepare(make_config(reward="always", objective=ObjectiveConfig(resample=True, resample_rounds=most)))
    drawn = draw(setup, 0)
    assert [group.problem for group in drawn.groups] == setup.problems(0)
    assert drawn.metrics["resample/rounds"] == rounds
    assert drawn.metrics["resample/discarded_rollouts"] == min(4 * rounds, 26) * 4
    metrics = take_step(setup, 0).metrics
    assert metrics["frac_reward_zero_std"] == 1.0 and metrics["grad_norm"] == 0.0


def test_discarded_rollouts_count_as_used(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(objective=RESAMPLE), tmp_path)
    metrics = read_metrics(tmp_path).set_index("step")
    discarded = metrics["resample/discarded_rollouts"].iloc[:4]
    assert discarded.sum() > 0
    assert metrics["rollouts"].iloc[:4].tolist() == [16 * s + discarded.iloc[:s].sum() for s in range(4)]
    assert {g.rows for g in read_groups(tmp_path)} == {"scores"}


OBJECTIVES = {
    "ppo": ObjectiveConfig(ratio="token", inner_updates=2, minibatches=2, kl_beta=0.1, resample=True),
    "gspo": ObjectiveConfig(ratio="sequence", clip_low=1e-2, clip_high=1e-2, minibatches=4),
    "critic": ObjectiveConfig(ratio="token", inner_updates=2, critic=True),
    "vine": ObjectiveConfig(
        ratio="token", inner_updates=2, minibatches=2, continuations=3, value_every=3, resample=True
    ),
    "oracle": ObjectiveConfig(continuations=2),
    "reward": ObjectiveConfig(kl_beta=0.1, kl_place="reward", kl_estimator="k1", resample=True),
}


def record(folder: Path) -> dict[str, Any]:
    """What a run leaves, without the clock."""
    return {
        "metrics": without_clock(read_metrics(folder)).to_csv(index=False),
        "groups": [
            (dataclasses.replace(g, gram=None), None if g.gram is None else g.gram.tobytes())
            for g in read_groups(folder)
        ],
        "evals": read_evals(folder),
    }


@pytest.mark.parametrize("stop_after", [1, 3])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_equals_the_uninterrupted_one(
    make_config: MakeConfig, tmp_path: Path, name: str, stop_after: int
) -> None:
    values = OBJECTIVES[name].critic or OBJECTIVES[name].continuations
    estimator = "grpo_sweeps.estimators." + ("reinforce.reinforce" if values else "group.grpo")
    config = make_config("dice", estimator, objective=OBJECTIVES[name], trainer={"checkpoint_every": 1})
    train(config, tmp_path / "whole")

    train_until(config, tmp_path / "cut", stop_after)
    train(config, tmp_path / "cut")
    assert record(tmp_path / "cut") == record(tmp_path / "whole")
    metrics = read_metrics(tmp_path / "whole")
    if OBJECTIVES[name].continuations:
        drawn = metrics["value/continuations"] + metrics.get("resample/discarded_rollouts", 0)
        assert metrics["rollouts"].tolist() == [16 * s + drawn.iloc[:s].sum() for s in range(5)]
    if OBJECTIVES[name].kl_beta:
        assert metrics["kl"].iloc[3] != 0.0 and metrics["kl"].notna().sum() == 4


def test_a_step_s_groups_are_those_of_its_budget(make_config: MakeConfig) -> None:
    """At equal rollouts a step of R=4 has 2 groups where R=2 has 4: so many are wanted mixed, and cut."""
    objective = ObjectiveConfig(resample=True, ratio="token", minibatches=2)
    config = make_config(objective=objective, budget="rollouts", budget_R=2)
    assert config.groups == 2
    setup = prepare(config)
    drawn = draw(setup, 0)
    assert len(drawn.groups) == 2 and all(group.mixed for group in drawn.groups)
    assert len(take_step(setup, 0).groups) == 2
