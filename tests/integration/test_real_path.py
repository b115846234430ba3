"""The cases of the card (tests/gpu/test_real_path_gpu.py) on the CPU with the embedded model: a few of them, whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from grpo_sweeps.loop.results import spectral_metrics
from grpo_sweeps.tracking.local import read_groups
from tests.covering import Case
from tests.real_path import CASES, assert_right, assert_spectra, composed, overrides, run_case, title

pytestmark = pytest.mark.integration
EMBEDDED: list[str] = []
RANK = "spectral/effective_rank"
CHOSEN = {
    "reinforce in parts": dict(objective="reinforce", R=8, micro_batch="part", lora=True, checkpointing=True),
    "vine": dict(objective="vine", R=3, micro_batch="null", lora=False, checkpointing=False),
    "gspo, checkpointing": dict(objective="gspo", R=8, micro_batch="8", lora=False, checkpointing=True),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_of_the_real_path(name: str, tmp_path: Path) -> None:
    case = CHOSEN[name] | {"dtype": "float32", "kill": False}
    assert assert_right(case, run_case(case, EMBEDDED, tmp_path, tokens=16, device="cpu")) > 0


def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    case = dict(objective="ppo", R=2, micro_batch="32", lora=False, checkpointing=False, dtype="bfloat16", kill=True)
    assert assert_right(case, run_case(case, EMBEDDED, tmp_path, tokens=16, device="cpu")) > 0


def test_a_logged_mean_that_is_not_the_records_is_found(tmp_path: Path) -> None:
    case = CHOSEN["reinforce in parts"] | {"dtype": "float32", "kill": False}
    groups = list(read_groups(run_case(case, EMBEDDED, tmp_path, tokens=16, device="cpu")))
    steps = [[group for group in groups if group.step == step] for step in range(2)]
    logged, of_step = max(((spectral_metrics(step), step) for step in steps), key=lambda pair: pair[0][RANK])
    assert_spectra(of_step, logged)
    with pytest.raises(AssertionError):
        assert_spectra(of_step, logged | {RANK: logged[RANK] * (1 + 1e-7)})
    changed = []
    for group in of_step:
        scale = np.linspace(1, 1.2, group.R)
        gram = None if group.gram is None else scale[:, None] * group.gram * scale
        changed.append(dataclasses.replace(group, gram=gram))
    with pytest.raises(AssertionError):
        assert_spectra(changed, logged)


@pytest.mark.parametrize("case", CASES, ids=title)
def test_every_case_is_a_configuration(case: Case, tmp_path: Path) -> None:
    composed(overrides(case, EMBEDDED, tmp_path, 48, "cpu"))
