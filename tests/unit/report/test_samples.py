"""The sample completions of a report: of a group that taught something, best and worst, the latest first."""

from __future__ import annotations

import shutil

from grpo_sweeps.report.page import samples, silent_cells
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.types import Completion


def keep(run, step, rewards, group=0, baseline=None):
    """A kept group; its baseline is the rewards' mean unless given. Its first rollout has the text `step/group/0`."""
    baseline = sum(rewards) / len(rewards) if baseline is None else baseline
    with LocalRecord(run) as record:
        for i, r in enumerate(rewards):
            text, right = f"{step}/{group}/{i}", r > 0.5
            record.log_completions(
                [Completion(step, f"p{step}", i, "?", text, r, r - baseline, right, right, 3, False, group)]
            )


def texts(folder, R=None):
    shown = samples(load_sweep("s", folder))
    return [row["text"] for row in shown if R in (None, row["R"])], shown


def bare(write, folder, R=4, seed=0):
    """A run that has kept no completions yet."""
    run = write(folder, "s", R, seed, steps=1, evaluate=False)
    shutil.rmtree(run / "completions")
    return run


def test_a_later_silent_group_does_not_hide_one_that_taught(write, tmp_path):
    run = bare(write, tmp_path)
    keep(run, 10, (0.0, 1.0, 1.0, 0.0), group=3)
    keep(run, 20, (1.0, 0.0, 0.0, 1.0), group=2)
    keep(run, 30, (1.0, 1.0, 1.0, 1.0))
    found, shown = texts(tmp_path)
    assert found == ["20/2/0", "20/2/2"] and [row["strict"] for row in shown] == [True, False]
    assert all(row["taught"] for row in shown) and silent_cells(shown) == ""


def test_both_are_of_one_group_and_each_R_has_its_own(write, tmp_path):
    for R, rewards in ((2, (0.0, 1.0)), (4, (1.0, 0.25, 0.5, 0.0))):
        for seed in (0, 1):
            run = bare(write, tmp_path, R, seed)
            keep(run, 10 + seed, rewards)
    assert texts(tmp_path, 2)[0] == ["11/0/1", "11/0/0"] and texts(tmp_path, 4)[0] == ["11/0/0", "11/0/3"]
    shown = texts(tmp_path)[1]
    assert len({(row["R"], row["run"], row["step"]) for row in shown}) == 2


def test_a_group_of_one_rollout_is_shown_once_and_none_is_no_fault(write, tmp_path):
    run = bare(write, tmp_path)
    assert texts(tmp_path) == ([], [])
    keep(run, 0, (1.0,), baseline=0.0)
    assert texts(tmp_path)[0] == ["0/0/0"]
