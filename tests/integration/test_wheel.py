"""The wheel holds everything, and works from any directory without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.integration


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline, by the build backend that the dev extra installs."""
    folder = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", str(folder), str(ROOT), cwd=folder)
    (built,) = folder.glob("grpo_sweeps-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, to be put on PYTHONPATH; its dependencies come from this interpreter."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    run(*pip, str(target), str(wheel), cwd=target)
    return target


def shipped(folder: str, suffixes: tuple[str, ...]) -> set[str]:
    """Files of the checkout below `folder` that must be in the wheel, relative to the root."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in suffixes)
    found = (path for path in found if not path.is_relative_to(ROOT / "conf" / "local"))  # the machine's own
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_wheel_holds_code_configuration_model_and_templates(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = shipped("grpo_sweeps", (".py", ".cu", ".cuh", ".html", ".j2", ".css", ".safetensors", ".json"))
    code |= shipped("hydra_plugins", (".py",))
    data = {f"grpo_sweeps/_data/{name}" for folder in ("conf", "sweeps") for name in shipped(folder, (".yaml",))}
    assert len(code) > 30 and len(data) > 10
    assert code | data <= names, sorted((code | data) - names)
    assert {"grpo_sweeps/models/tiny/model.safetensors", "grpo_sweeps/py.typed"} <= names
    assert any(name.startswith("hydra_plugins/grpo_launcher/") for name in names)
    assert "hydra_plugins/__init__.py" not in names
    pages = ("publish/base", "publish/style", "report/page", "science/theory", "credit/credit")
    assert all(any(name.startswith(f"grpo_sweeps/{page}.") for name in names) for page in pages)
    strays = {name.split("/")[0] for name in names} - {"grpo_sweeps", "hydra_plugins"}
    assert all(stray.endswith(".dist-info") for stray in strays), strays


def test_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 8_000_000


def test_help_lists_groups_and_sweeps_from_another_directory(installed: Path, tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "grpo_sweeps.run", "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    for group in ("model", "task", "reward", "estimator", "rollout", "analysis", "trainer", "tracking"):
        assert (ROOT / "conf" / group).is_dir()
        assert group in done.stdout
    for choice in ("tiny", "arithmetic", "gsm8k", "submitit_slurm"):
        assert choice in done.stdout
    sweeps = [path.stem for path in (ROOT / "sweeps").glob("*.yaml")]
    assert {"default", "paper_table1", "paper_table1_tiny"} <= set(sweeps)
    for sweep in sweeps:
        assert sweep in done.stdout


def test_the_package_and_its_data_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = "import grpo_sweeps, hydra_plugins.grpo_launcher as p; print(grpo_sweeps.__file__); print(p.__file__)"
    done = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    for line in done.stdout.split():
        assert Path(line).is_relative_to(installed), line


def test_both_launcher_plugins_are_in_one_namespace(installed: Path, tmp_path: Path) -> None:
    program = "import hydra_plugins.grpo_launcher, hydra_plugins.hydra_submitit_launcher"
    run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))


def test_the_console_script_starts_a_command(installed: Path, tmp_path: Path) -> None:
    script = str(installed / "bin" / "grpo-sweeps")
    assert run(script, "--version", cwd=tmp_path, PYTHONPATH=str(installed)).stdout.startswith("grpo_sweeps ")
    (tmp_path / "runs").mkdir()
    assert run(script, "status", "json=true", cwd=tmp_path, PYTHONPATH=str(installed)).stdout == "[]\n"


def test_a_machine_s_own_values_are_found_in_a_folder_of_the_user_s(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "own" / "local").mkdir(parents=True)
    (tmp_path / "own" / "local" / "default.yaml").write_text("# @package _global_\nruns_dir: elsewhere\n")
    (tmp_path / "own" / "local" / "submitit_slurm.yaml").write_text("partition: gpu\n")
    words = ["--config-dir", "own", "R=2", "hydra/launcher=submitit_slurm", "--cfg", "all"]
    done = run(sys.executable, "-m", "grpo_sweeps.run", *words, cwd=tmp_path, PYTHONPATH=str(installed))
    assert "\nruns_dir: elsewhere\n" in done.stdout and "    partition: gpu\n" in done.stdout


def test_the_wheels_code_is_that_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    """By its digest: a run that was begun from the one goes on from the other."""
    from grpo_sweeps.tracking.digests import of_folder

    ask = "from grpo_sweeps.tracking.digests import PACKAGE, of_package; print(PACKAGE.parent, of_package().syntax)"
    done = run(sys.executable, "-c", ask, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.stdout.split() == [str(installed), of_folder(ROOT).syntax]
