"""Runs of the embedded model with values by continuations, from the choices of conf/objective."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_sweeps.config import to_mapping
from grpo_sweeps.config.checks import check
from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.tracking.local import read_groups, read_metrics
from tests.composing import run_config

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", ["vine", "oracle"])
def test_a_run_from_the_choice(name: str, tmp_path: Path) -> None:
    """One group a step: its rows add up to the gradient whose norm the step logs."""
    changes = [f"objective={name}", "R=2", "reward=random", "objective.continuations=3", "objective.inner_updates=1"]
    changes += ["tracking=local", f"runs_dir={tmp_path}", "trainer.device=cpu"]
    changes += [f"trainer.{key}" for key in ("steps=2", "prompts=1", "eval_every=0", "lr=1e-3")]
    config = run_config(*changes)
    check(config)
    assert execute(to_mapping(config), tmp_path / "run", name=name).ok
    metrics, groups = read_metrics(tmp_path / "run"), list(read_groups(tmp_path / "run"))
    assert len(groups) == len(metrics) == 2 and {g.rows for g in groups} == {"loss"}
    assert any(g.gram is not None for g in groups)
    for group, row in zip(groups, metrics.to_dict("records"), strict=True):
        total = 0.0 if group.gram is None else float(np.sum(group.gram))
        assert np.sqrt(max(total, 0.0)) == pytest.approx(row["grad_norm"], rel=1e-3, abs=1e-8)
        assert row["value/continuations"] == 3 * row["value/prefixes"]
        assert row["value/prefixes"] == 1 if name == "oracle" else row["value/prefixes"] > 2
        if name == "oracle":
            thirds = 3 * (np.array(group.rewards) - np.array(group.advantages))
            assert thirds == pytest.approx([round(thirds[0])] * 2), "one V(x) of three rewards for both"
    assert metrics["rollouts"].tolist() == [0, 2 + metrics["value/continuations"].iloc[0]]
