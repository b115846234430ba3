"""Real Grams: 20 mixed groups of 8 rollouts of a 0.5B model in bfloat16, with the values that their K has.

The file says model, task and how it was made. Its runs recorded a floor of .165, the training dtype against a wider
copy of the model, and no `same_as`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.ranks import rank_of_few
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.pooled import pooled, usable_groups
from grpo_sweeps.spectra import effective_rank, eigenvalue_error, eigenvalues, summary
from grpo_sweeps.spectra.equal import same_as_by_cosine
from grpo_sweeps.spectra.floor import tolerance
from grpo_sweeps.spectra.records import is_older, own_precision, spectral_metrics
from grpo_sweeps.tracking.local import LocalRecord, read_groups
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import GroupRecord
from tests.floors import floor_interval
from tests.unit.report.conftest import config_of

FILE = Path(__file__).parents[1] / "data" / "real_grams" / "qwen2_5_coder_0_5b_R8.json"
GROUPS: list[dict[str, Any]] = json.loads(FILE.read_text())["groups"]
VALUES = ("effective_rank", "participation_ratio", "top1_fraction")
R, DTYPE = 8, "bfloat16"


def record(g: dict[str, Any]) -> GroupRecord:
    """The group as its run recorded it."""
    right = tuple(r == 1 for r in g["rewards"])
    advantages = np.array(g["rewards"]) - np.mean(g["rewards"])
    return GroupRecord(
        step=g["step"], prompt_id=f"train-{g['step']}-{g['group']}", R=R, rewards=tuple(g["rewards"]),
        advantages=tuple(advantages), weights=tuple(g["weights"]), lengths=tuple(g["lengths"]),
        logprob_sums=(-50.0,) * R, strict=right, flexible=right, gram=np.array(g["gram"]), floor=g["floor_recorded"],
        group=g["group"],
    )  # fmt: skip


def cut_effective_rank(g: dict[str, Any]) -> float:
    """What was logged: every eigenvalue within the error that the recorded floor allows, save the largest, set to 0."""
    values = eigenvalues(g["gram"], g["weights"])
    kept = values > eigenvalue_error(g["gram"], g["weights"], g["floor_recorded"])
    kept[0] = True
    return float(effective_rank(np.sqrt(np.where(kept, values, 0.0))))


def test_every_group_has_the_values_of_its_gram():
    assert len(GROUPS) == 20 and np.mean([g["effective_rank"] for g in GROUPS]) == pytest.approx(6.08, abs=0.005)
    for g in GROUPS:
        found = summary(g["gram"], g["weights"], g["floor_recorded"], same_as_by_cosine(g["gram"]))
        assert {name: found[name] for name in VALUES} == pytest.approx({name: g[name] for name in VALUES}, rel=1e-8)
        H = np.outer(g["weights"], g["weights"]) * np.array(g["gram"])
        s = np.sqrt(np.linalg.eigvalsh(H))  # all of them positive
        by_hand = s.sum() ** 2 / np.trace(H), np.trace(H) ** 2 / (H**2).sum(), s[-1] ** 2 / np.trace(H)
        assert tuple(g[name] for name in VALUES) == pytest.approx(by_hand, rel=1e-8)


def test_cutting_at_the_recorded_floor_gives_another_number():
    """The old rule fails for each group, and in the mean says what the paper says."""
    cut = np.array([cut_effective_rank(g) for g in GROUPS])
    exact = np.array([g["effective_rank"] for g in GROUPS])
    assert (np.abs(cut / exact - 1) > 0.1).all() and 1.0 <= cut.mean() < 2.25 < 6 < exact.mean()


def test_the_value_lies_in_the_interval_of_its_own_precision():
    for g in GROUPS:
        low, high = floor_interval(g["gram"], g["weights"], tolerance(DTYPE))
        assert 0.9 * g["effective_rank"] < low < g["effective_rank"] < high < 1.1 * g["effective_rank"]


def test_a_step_recomputed_from_older_records():
    groups = [record(g) for g in GROUPS]
    assert all(is_older(g) and own_precision(g, DTYPE) == tolerance(DTYPE) for g in groups)
    metrics = spectral_metrics(groups, dtype=DTYPE)
    for name in VALUES:
        assert metrics[f"spectral/{name}"] == pytest.approx(np.mean([g[name] for g in GROUPS]), rel=1e-9)
    newer = [dataclasses.replace(g, same_as=tuple(range(R)), floor=1e-4) for g in groups]
    assert spectral_metrics(newer) == {**metrics, **{k: 8.0 for k in metrics if k.endswith("numerical_rank")}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The groups in a run as an older version wrote it, without the column `same_as`."""
    root = tmp_path_factory.mktemp("real") / "runs"
    changes = {"model.name": "qwen2_5_coder_0_5b", "model.dtype": DTYPE, "trainer.prompts": 16}
    run = root / "real" / "run0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config_of(R, 0, "real", changes)))
    write_status(run, RunStatus(state="finished", identity=run.name, sweep="real", step=3, total=3, commit="6f87720"))
    with LocalRecord(run) as journal:
        journal.log_groups([record(g) for g in GROUPS])
        journal.log_metrics(0, {"reward": 0.1, "grad_norm": 1.0})
    (segment,) = (run / "grams").glob("*.parquet")
    pq.write_table(pq.read_table(segment).drop_columns(["same_as"]), segment)
    assert all(is_older(g) for g in read_groups(run))
    return root


def test_twenty_groups_contradict_about_two_whatever_their_distribution(runs: Path):
    """Hoeffding's interval, from each end that the precision of K leaves; Student's t is not trusted with so few."""
    groups = usable_groups(load_sweep("real", runs), "all", R)
    alpha = rules.simultaneous_alpha(1)
    half = (R - 1) * np.sqrt(np.log(2 / alpha) / (2 * len(GROUPS)))
    found = rank_of_few(R, groups, alpha)
    assert found.mean == pytest.approx(np.mean([g["effective_rank"] for g in GROUPS]), rel=1e-9)
    assert found.low == pytest.approx(groups["effective_rank_floor_low"].mean() - half, rel=1e-9)
    assert 2.25 < found.low < found.mean - half + 0.2 and found.high == R
    assert rules.judge(pooled(groups, "effective_rank"), 1.75, 2.25, len(groups)) == rules.UNDECIDED
    two_seeds = pd.concat([groups, groups.assign(seed=1)])
    assert rank_of_few(R, two_seeds, alpha).low == 1.0, "two seeds tell nothing without an assumption"
    one_prompt = groups.assign(prompt_id="p", seed=range(len(groups)))
    assert rank_of_few(R, one_prompt, alpha).low == 1.0, "nor does one prompt under many seeds"
