"""Hydra 1.3 and 1.4 compose the same configurations, and neither warns.

`GRPO_SWEEPS_HYDRA` names a folder with the other version, made by
`pip install --pre --target FOLDER 'hydra-core>=1.4.0rc1,<1.5'`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHER = os.environ.get("GRPO_SWEEPS_HYDRA")
# Every choice but the open ones, alone; each objective with a model that chooses its trainer; every sweep; launchers.
PROGRAM = """
import json, hydra
from grpo_sweeps.config import to_mapping
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.paths import conf_dir, sweep_files
from tests.composing import composed, run_config
groups = ("model", "task", "reward", "estimator", "objective", "rollout", "analysis", "trainer", "tracking")
files = [path for group in groups for path in sorted((conf_dir() / group).glob("*.yaml"))]
files = [path for path in files if path.stem != "custom" and "???" not in path.read_text()]
words = [[f"{path.parent.name}={path.stem}"] for path in files]
words += [[f"objective={path.stem}", "model=smollm2_135m"] for path in files if path.parent.name == "objective"]
words += [[f"+sweeps={name}"] for name in sweep_files()]
configs = {" ".join(one): run_config(*one) for one in words}
made = {one: [identity(config), to_mapping(config)] for one, config in configs.items()}
names = ("basic", "submitit_local", "submitit_slurm")
launchers = [composed(f"hydra/launcher={name}").hydra.launcher for name in names]
print(json.dumps([hydra.__version__, made, [sorted(map(str, one.items())) for one in launchers]]))
"""
SMALL = ("tracking=local", *(f"trainer.{key}" for key in ("steps=1", "prompts=1", "eval_every=0", "device=cpu")))
needs_other = pytest.mark.skipif(
    OTHER is None, reason="GRPO_SWEEPS_HYDRA names no folder with another version of Hydra (see CONTRIBUTING.md)"
)


def python(*arguments: str, other: bool, cwd: Path = ROOT) -> str:
    """The standard output of this interpreter with one of the two versions; a warning of Hydra's is an error."""
    folders = [*([str(OTHER)] if other else []), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "HYDRA_DEPRECATION_WARNINGS_AS_ERRORS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


@needs_other
def test_both_versions_compose_the_same() -> None:
    found = [json.loads(python("-W", "error", "-c", PROGRAM, other=other)) for other in (False, True)]
    (version, made, launchers), (other_version, other_made, other_launchers) = found
    assert version.startswith("1.3.") and other_version.startswith("1.4.")
    assert len(made) > 40 and made == other_made and launchers == other_launchers


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=needs_other)], ids=["installed", "other"])
def test_a_plan_and_the_help_warn_of_nothing(other: bool, tmp_path: Path) -> None:
    run = ("-W", "error", "-m", "grpo_sweeps.run")
    plan = python(*run, "+sweeps=default", "dry_run=true", "tracking=local", other=other, cwd=tmp_path)
    assert "3 runs to do" in plan
    assert "hydra/launcher: basic" in python(*run, "--help", other=other, cwd=tmp_path)


@needs_other
@pytest.mark.integration
def test_the_other_version_runs_a_sweep(tmp_path: Path) -> None:
    python("-m", "grpo_sweeps.run", "-m", "R=2,4", *SMALL, other=True, cwd=tmp_path)
    states = [json.loads(path.read_text())["state"] for path in (tmp_path / "runs").glob("*/*/status.json")]
    assert states == ["finished", "finished"]
