"""conf/local: a machine's own values, composed over the groups and under the command line, no part of identity."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
import yaml

from grpo_sweeps import paths
from grpo_sweeps.run import main
from grpo_sweeps.sweep.identity import identity
from tests.composing import composed, run_config

ROOT = Path(__file__).resolve().parents[2]
SLURM = "hydra/launcher=submitit_slurm"


def write(local: Path) -> None:
    """A machine's files, as docs/local.md has them."""
    local.mkdir(parents=True)
    (local / "default.yaml").write_text(
        "# @package _global_\n"
        "runs_dir: elsewhere\ntracking: {kind: local, uri: http://127.0.0.1:9}\ntrainer: {device: cpu}\n"
    )
    (local / "submitit_slurm.yaml").write_text("partition: gpu\naccount: course\n")
    (local / "other.yaml").write_text("# @package _global_\nruns_dir: others\ntrainer: {lr: 0.5}\n")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's conf/ and sweeps/, with conf/local."""
    for folder in ("conf", "sweeps"):
        shutil.copytree(ROOT / folder, tmp_path / "checkout" / folder)
    write(tmp_path / "checkout" / "conf" / "local")
    monkeypatch.setattr(paths, "data_root", lambda: tmp_path / "checkout")
    return tmp_path / "checkout"


def test_nothing_is_there_unless_a_machine_has_it() -> None:
    assert composed().runs_dir == "runs" and composed(SLURM).hydra.launcher.partition is None
    assert "/conf/local/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_it_wins_over_the_groups_and_loses_to_the_command_line(checkout: Path) -> None:
    config = run_config("trainer=pretrained")
    assert (config.runs_dir, config.trainer.device, config.tracking.uri) == ("elsewhere", "cpu", "http://127.0.0.1:9")
    assert config.trainer.steps == 100
    assert run_config("runs_dir=mine", "trainer.device=cuda").runs_dir == "mine"
    assert run_config("+sweeps=default").runs_dir == "elsewhere"


def test_a_launcher_has_a_file_of_its_own(checkout: Path) -> None:
    launcher = composed(SLURM).hydra.launcher
    assert (launcher.partition, launcher.account, launcher.timeout_min) == ("gpu", "course", 240)
    assert composed(SLURM, "hydra.launcher.partition=cpu").hydra.launcher.partition == "cpu"
    assert "partition" not in composed("hydra/launcher=submitit_local").hydra.launcher
    assert "partition" not in composed().hydra.launcher and "defaults" not in launcher


def test_another_file_or_none_is_chosen_by_name(checkout: Path) -> None:
    assert run_config("local=other").runs_dir == "others"
    assert run_config("local=none").runs_dir == "runs"


@pytest.mark.parametrize("name", ["status", "report", "cancel", "sync", "credit"])
def test_commands_take_their_defaults_from_it(
    name: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = importlib.import_module(f"grpo_sweeps.{name}" + ".__main__" * (name in ("report", "credit")))
    assert command.COMMAND.parse([]).runs_dir == "elsewhere"
    assert command.COMMAND.parse(["runs_dir=mine"]).runs_dir == "mine"
    assert command.main(["--help"]) == 0 and "(default: elsewhere)" in capfd.readouterr().out
    assert command.main(["sweep=s"]) == 2 and "runs_dir=elsewhere" in capfd.readouterr().err
    default = checkout / "conf" / "local" / "default.yaml"
    monkeypatch.setenv("PLACE", "scratch")
    default.write_text("# @package _global_\nruns_dir: ${oc.env:PLACE}/runs\n")
    assert command.COMMAND.parse([]).runs_dir == "scratch/runs"
    for content in (
        "# @package _global_\nruns_dir: ${oc.env:NO_SUCH}\n",
        "# @package _global_\nruns_dir: [\n",
        "R: 3\n",
    ):
        default.write_text(content)
        assert command.main(["sweep=s"]) == 2
        said = capfd.readouterr().err
        assert said.startswith(f"error: {default}: ") and said.count("\n") == 1
    shutil.rmtree(default.parent)
    assert command.COMMAND.parse([]).runs_dir == "runs"


def test_credit_takes_the_device_and_init_the_tracker(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_sweeps import sync
    from grpo_sweeps.credit.__main__ import COMMAND
    from grpo_sweeps.tracking import mirror

    assert COMMAND.parse([]).device == "cpu" and COMMAND.parse(["device=cuda"]).device == "cuda"
    made = []
    monkeypatch.setattr(mirror, "prepare", lambda tracking: made.append(tracking) or 0)
    assert sync.main(["--init"]) == sync.main(["--init", "uri=http://127.0.0.1:8"]) == 0
    assert [(one.kind, one.uri) for one in made] == [("mlflow", "http://127.0.0.1:9"), ("mlflow", "http://127.0.0.1:8")]


@pytest.mark.parametrize("content", [b"", b"runs_dir: elsewhere\n", b"# @package _global_\nruns_dir: caf\xe9\n"])
def test_a_file_that_cannot_be_meant_is_named(
    checkout: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = checkout / "conf" / "local" / "default.yaml"
    path.write_bytes(content)
    assert main(["R=2", "dry_run=true"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: {path}: ") and said.count("\n") == 1


def test_none_can_be_chosen_where_there_is_no_folder(
    checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(checkout / "conf" / "local")
    assert main(["R=2", "dry_run=true", "local=none", f"runs_dir={tmp_path}"]) == 0
    assert "1 run to do" in capfd.readouterr().out


def test_identity_is_that_of_the_values(checkout: Path) -> None:
    assert identity(run_config("R=2")) == identity(run_config("R=2", "local=none"))
    assert identity(run_config("R=2", SLURM)) == identity(run_config("R=2"))
    assert identity(run_config("R=2", "local=other")) == identity(run_config("R=2", "trainer.lr=0.5"))
    assert identity(run_config("R=2", "local=other")) != identity(run_config("R=2"))


@pytest.mark.integration
def test_a_sweep_runs_with_it(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "R=2,4", "trainer.steps=1", "trainer.prompts=1", "trainer.eval_every=0", "sweep=tiny"]) == 0
    runs = list((tmp_path / "elsewhere" / "tiny").glob("*/config.yaml"))
    assert {yaml.safe_load(path.read_text())["R"] for path in runs} == {2, 4}
    assert {path.parent.name for path in runs} == {
        identity(run_config(f"R={R}", "local=none", "trainer.steps=1", "trainer.prompts=1", "trainer.eval_every=0"))
        for R in (2, 4)
    }


def test_a_folder_of_ones_own_holds_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "own" / "local")
    assert main(["--config-dir", "own", "R=2", "--cfg", "job"]) == 0
    job = yaml.safe_load(capfd.readouterr().out)
    assert (job["runs_dir"], job["tracking"]["kind"], job["R"]) == ("elsewhere", "local", 2)
    assert main(["--config-dir", "own", "R=2", SLURM, "--cfg", "hydra"]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["hydra"]["launcher"]["partition"] == "gpu"
