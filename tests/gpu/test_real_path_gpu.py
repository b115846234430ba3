"""The real path on a card: every pair of what a user combines, with the weights and problems that two variables name.

    GRPO_SWEEPS_MODEL=FOLDER GRPO_SWEEPS_GSM8K=FOLDER \
        python -m pytest -n 8 -rs --durations=0 tests/gpu/test_real_path_gpu.py

A small model waits for the host, so eight processes share the card: five to six minutes, and up to 30 GB of disk at a
time. One process takes more than ten. The killed runs are processes of one test, four at a time.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.covering import Case
from tests.real_path import CASES, assert_right, run_case, title

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOKENS = 48
AT_ONCE = 4
KILLED = [case for case in CASES if case["kill"]]


@pytest.fixture(scope="module")
def source() -> list[str]:
    """The words that name model and task."""
    model, problems = (os.environ.get(f"GRPO_SWEEPS_{name}", "") for name in ("MODEL", "GSM8K"))
    if not model or not problems:
        pytest.skip(
            "GRPO_SWEEPS_MODEL (a folder with a model of 135M to 0.5B parameters) and GRPO_SWEEPS_GSM8K (a folder with "
            "train.jsonl and test.jsonl) name what the real path is tried on; one of them is not set"
        )
    words = ["model=smollm2_135m", "model.name=real", f"model.path={Path(model).resolve()}", "task=gsm8k"]
    return [*words, f"task.path={Path(problems).resolve()}"]


def tried(case: Case, source: list[str], folder: Path) -> int:
    """Run and judge one case; the number of its Grams. What went wrong is said at once: the time may run out. The
    folder of a case that passed is removed: all of them together would fill a disk."""
    folder.mkdir()
    try:
        grams = assert_right(case, run_case(case, source, folder, TOKENS, "cuda"))
        shutil.rmtree(folder)
        return grams
    except BaseException as error:
        print(f"\n{title(case)}: {type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        raise


@pytest.mark.parametrize("case", [case for case in CASES if not case["kill"]], ids=title)
def test_a_run_of_the_real_path(case: Case, source: list[str], tmp_path: Path) -> None:
    tried(case, source, tmp_path / "case")
    torch.cuda.empty_cache()


def test_runs_that_are_killed_go_on(source: list[str], tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {title(case): pool.submit(tried, case, source, tmp_path / title(case)) for case in KILLED}
    failed = {name: repr(run.exception()) for name, run in runs.items() if run.exception()}
    assert not failed, failed
    assert sum(run.result() for run in runs.values()) > 0, "no group of any run was mixed: nothing was measured"
