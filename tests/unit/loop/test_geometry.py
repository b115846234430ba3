"""What updates do to the weights, in a run: when it is recorded, that it changes nothing, that a resumed run has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from grpo_sweeps.config import RunConfig
from grpo_sweeps.engine.optim import MasterAdamW
from grpo_sweeps.loop import update
from grpo_sweeps.loop.setup import prepare
from grpo_sweeps.loop.step import training_step
from grpo_sweeps.loop.train import train
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.tracking.local import read_metrics, read_updates, record_tables, updates_frame
from tests.unit.loop.cut_runs import train_until

MakeConfig = Callable[..., RunConfig]
NAMES = {"update/changed_share", "update/changed_share_float32", "update/norm", "update/relative_norm", "update/hoyer",
         "gradient/hoyer"}  # fmt: skip


def test_every_so_many_steps_a_row_for_each_parameter(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(analysis={"update_every": 2}), tmp_path)
    metrics = read_metrics(tmp_path).set_index("step")
    assert set(metrics.columns) > NAMES
    measured = metrics[sorted(NAMES)].notna()
    assert measured.loc[[0, 2]].to_numpy().all() and not measured.loc[[1, 3, 4]].to_numpy().any()
    updates = read_updates(tmp_path)
    names = [name for name, _ in prepare(make_config()).policy.model.named_parameters()]
    assert [(u.step, u.name) for u in updates] == [(step, name) for step in (0, 2) for name in names]
    for step in (0, 2):
        norm = sum(u.sq_norm for u in updates if u.step == step) ** 0.5
        assert metrics.loc[step, "update/norm"] == pytest.approx(norm)
    assert not (tmp_path / "updates" / "journal.jsonl").read_text()  # compacted at the end
    assert record_tables(tmp_path)["updates"]().num_rows == len(updates) == len(updates_frame(tmp_path))


def test_off_measures_nothing_and_writes_nothing(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(update, "UpdateGeometry", never)
    train(make_config(analysis={"update_every": 0}), tmp_path)
    assert not (tmp_path / "updates").exists() and not NAMES & set(read_metrics(tmp_path).columns)
    with pytest.raises(AssertionError, match="measured"):
        train(make_config(analysis={"update_every": 1}), tmp_path / "on")


def test_a_measured_run_is_the_unmeasured_one(make_config: MakeConfig) -> None:
    one, two = make_config(analysis={"update_every": 1}), make_config(analysis={"update_every": 0})
    assert identity(one) == identity(two)
    on, off = prepare(one), prepare(two)
    for step in range(3):
        a, b = training_step(on, step), training_step(off, step)
        assert [g.logprob_sums for g in a.groups] == [g.logprob_sums for g in b.groups]
        assert a.metrics["grad_norm"] == b.metrics["grad_norm"] and a.updates and not b.updates
    for p, q in zip(on.policy.model.parameters(), off.policy.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_resumed_run_has_the_same_updates(make_config: MakeConfig, tmp_path: Path, stop_after: int) -> None:
    config = make_config(analysis={"update_every": 1})
    train(config, tmp_path / "whole")

    train_until(config, tmp_path / "cut", stop_after)
    assert {u.step for u in read_updates(tmp_path / "cut")} == set(range(stop_after))
    train(config, tmp_path / "cut")
    pd.testing.assert_frame_equal(updates_frame(tmp_path / "cut"), updates_frame(tmp_path / "whole"), check_exact=True)
    columns = sorted(NAMES)
    cut, whole = (read_metrics(tmp_path / name)[columns] for name in ("cut", "whole"))
    pd.testing.assert_frame_equal(cut, whole, check_exact=True)


def test_frozen_weights_have_no_row(make_config: MakeConfig) -> None:
    setup = prepare(make_config(analysis={"update_every": 1, "every": 0}))
    parameters = dict(setup.policy.model.named_parameters())
    frozen = list(parameters)[::2]
    for name in frozen:
        parameters[name].requires_grad_(False)
    optimizer = MasterAdamW(setup.policy.model.parameters(), setup.config.trainer)
    updates = training_step(dataclasses.replace(setup, optimizer=optimizer), 0).updates
    assert [u.name for u in updates] == list(parameters)[1::2]
    assert all(u.shape == tuple(parameters[u.name].shape) and u.changed > 0 for u in updates)
