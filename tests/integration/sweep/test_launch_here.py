"""Runs and sweeps in this process: plan, skip, continue, redo, failures, interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.sweep.conftest import frozen_config

pytestmark = pytest.mark.integration

Run = Callable[..., int]
Statuses = Callable[..., dict[str, Any]]


def test_one_run_leaves_its_whole_folder(run: Run, statuses: Statuses, workplace: Path) -> None:
    assert run("R=4") == 0
    (status,) = statuses().values()
    assert (status.state, status.step, status.total, status.sweep) == ("finished", 3, 3, "adhoc")
    assert status.command.startswith("python -m grpo_sweeps.run ") and "R=4" in status.command
    assert status.versions["hydra-core"] and status.started <= status.ended
    run_dir = workplace / "runs" / "adhoc" / status.identity
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert stored["R"] == 4 and stored["sweep"] == "adhoc"
    assert stored["estimator"] == {"_target_": "plain_functions.estimator"}
    assert "step 3/3  reward 0.500  effective rank 1.500" in (run_dir / "log.txt").read_text()
    left = {path.name for path in workplace.iterdir()}
    assert left <= {"runs", "site", "plain_functions.py", "__pycache__"}, "Hydra wrote something of its own"


def test_each_run_keeps_the_names_of_its_choices(run: Run, workplace: Path) -> None:
    assert run("R=4") == 0
    assert run("-m", "R=4", "trainer=pretrained,fixed_policy", "sweep=two") == 0
    found = {}
    for path in workplace.glob("runs/*/*/source.json"):
        config = yaml.safe_load((path.parent / "config.yaml").read_text())
        found[config["sweep"], config["trainer"]["lr"]] = json.loads(path.read_text())["choices"]
    assert len(found) == 3 and found["two", 0.0]["trainer"] == "fixed_policy"
    assert found["two", 1e-6]["trainer"] == "pretrained" and all(one["model"] == "tiny" for one in found.values())


def test_finished_is_skipped_and_taken_further(run: Run, statuses: Statuses, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("R=4") == 0
    capfd.readouterr()
    assert run("R=4") == 0
    assert "skip      R=4 seed=0" in capfd.readouterr().err
    assert run("R=4", "trainer.steps=5") == 0
    assert "continue  R=4 seed=0" in capfd.readouterr().err
    (status,) = statuses().values()
    assert (status.state, status.step, status.total) == ("finished", 5, 5)
    assert run("R=4", "trainer.steps=2") == 0
    assert "skip" in capfd.readouterr().err


def test_redo_starts_afresh_and_keeps_the_old_folder(run: Run, workplace: Path) -> None:
    assert run("R=4") == 0
    assert run("R=4", "redo=all") == 0
    (new,) = (workplace / "runs" / "adhoc").glob("*/metrics.jsonl")
    assert len(new.read_text().splitlines()) == 3
    (old,) = (workplace / "runs" / "adhoc" / ".replaced").glob("*/metrics.jsonl")
    assert len(old.read_text().splitlines()) == 3


def test_one_failure_hides_no_other_run(run: Run, statuses: Statuses, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "R=4", "seed=0,1,5") == 1
    states = {name: status.state for name, status in statuses().items()}
    assert states == {"R=4 seed=0": "finished", "R=4 seed=1": "failed", "R=4 seed=5": "finished"}
    failed = statuses()["R=4 seed=1"]
    assert failed.error == "RuntimeError: boom"
    err = capfd.readouterr().err
    assert "1 of 3 runs did not finish:" in err
    assert "R=4 seed=1  failed  RuntimeError: boom  log: runs/adhoc/" in err
    assert "Traceback" not in err and "Error executing job" not in err
    log = Path("runs/adhoc") / failed.identity / "log.txt"
    assert "second line" in log.read_text() and "Traceback" in log.read_text()


def test_failed_runs_are_tried_again_only_when_asked(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "seed=1,0") == 1
    capfd.readouterr()
    assert run("-m", "seed=1,0") == 1
    err = capfd.readouterr().err
    assert "2 runs, 0 to do, 2 skipped" in err and "1 of 2 runs did not finish:" in err
    assert "R=4 seed=1  failed  failed at step 0: RuntimeError: boom; redo=failed runs it again" in err
    assert run("-m", "seed=1,0", "redo=failed") == 1
    assert "redo      R=4 seed=1" in capfd.readouterr().err


def test_a_run_of_another_commit_is_not_continued_unasked(
    run: Run, statuses: Statuses, capfd: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from grpo_sweeps.tracking.status import write_status

    assert run("R=4") == 0
    (status,) = statuses().values()
    run_dir = Path("runs/adhoc") / status.identity
    write_status(run_dir, replace(status, state="interrupted", step=2, commit="0" * 40))
    (run_dir / "source.json").unlink()  # a record of before digests were kept: its commit is all there is to go by
    capfd.readouterr()
    assert run("R=4") == 1
    err = capfd.readouterr().err
    assert "stale: interrupted at step 2 of 3 by another commit (0000000); redo=stale makes it afresh" in err
    assert run("R=4", "redo=stale") == 0


def test_a_run_that_lives_elsewhere_is_neither_finished_nor_failed(
    run: Run, statuses: Statuses, capfd: pytest.CaptureFixture[str]
) -> None:
    import time
    from dataclasses import replace

    from grpo_sweeps.tracking.status import write_status

    assert run("R=4") == 0
    (status,) = statuses().values()
    living = replace(status, state="running", step=1, host="elsewhere", heartbeat=time.time() + 60)
    write_status(Path("runs/adhoc") / status.identity, living)
    capfd.readouterr()
    assert run("-m", "R=4,8") == 0
    err = capfd.readouterr().err
    assert "1 of 2 runs queued or running: neither finished nor failed" in err and "did not finish" not in err
    assert "2 of 2 runs finished" not in err


def test_what_was_composed_is_written_before_the_start(run: Run, workplace: Path, monkeypatch: Any) -> None:
    import sys
    import types

    seen: list[Any] = []

    def train(config: Any, run_dir: Path, *_: Any) -> None:
        for path in sorted(run_dir.parent.glob("*/config.yaml")):
            seen.append(yaml.safe_load(path.read_text())["R"])

    monkeypatch.setitem(sys.modules, "grpo_sweeps.loop.train", types.SimpleNamespace(train=train))
    assert run("-m", "R=4,8") == 0
    assert sorted(seen[:2]) == [4, 8], "the second run's configuration is there while the first one runs"


def test_not_waiting_needs_a_scheduler(run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (("R=4",), ("-m", "R=4,8"), ("-m", "R=4,8", "hydra/launcher=submitit_local")):
        assert run(*words, "wait=false") == 2
        assert "error: wait=false: the runs end with this command, so true is allowed" in capfd.readouterr().err
    assert not (workplace / "runs").exists()


def test_a_clean_checkout_can_be_required(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from grpo_sweeps.tracking import provenance

    monkeypatch.setattr(provenance, "dirty", lambda: True)
    assert run("R=4", "require_clean=true") == 2
    assert "error: require_clean=true: the checkout differs from its commit" in capfd.readouterr().err
    assert not (workplace / "runs").exists()
    assert run("R=4") == 0
    monkeypatch.setattr(provenance, "dirty", lambda: False)
    assert run("R=8", "require_clean=true") == 0


def test_a_configuration_that_only_training_can_judge_gives_2(run: Run, statuses: Statuses) -> None:
    assert run("seed=4") == 2
    (status,) = statuses().values()
    assert status.error == "model.path=x: not in the cache"


def test_ctrl_c_starts_no_other_run(run: Run, statuses: Statuses, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "seed=3,0") == 130
    states = {name: status.state for name, status in statuses().items()}
    assert states == {"R=4 seed=3": "interrupted", "R=4 seed=0": "queued"}
    assert "interrupted: R=4 seed=3 goes on from its last checkpoint" in capfd.readouterr().err


def test_given_twice_runs_once(run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "R=4,4") == 0
    assert len(list((workplace / "runs" / "adhoc").glob("*/metrics.jsonl"))) == 1
    assert "given twice, runs once" in capfd.readouterr().err


def test_an_axis_that_changes_no_result_is_refused(
    run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "trainer.micro_batch=4,8") == 2
    assert "trainer.micro_batch=4,8: cannot be an axis" in capfd.readouterr().err
    assert run("-m", "trainer.steps=2,4") == 2
    assert not (workplace / "runs").exists()


def test_one_bad_run_refuses_the_sweep(run: Run, workplace: Path) -> None:
    assert run("-m", "R=4,3", "trainer.micro_batch=4") == 2
    assert run("-m", "R=4,2,1", "estimator._target_=grpo_sweeps.estimators.group.grpo") == 2
    assert not (workplace / "runs").exists()


def test_dry_run_writes_nothing(run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-m", "R=2,4", "dry_run=true") == 0
    assert not (workplace / "runs").exists()
    assert "2 runs, 2 to do (dry run: nothing is started)" in capfd.readouterr().err


def test_a_dry_run_over_a_failed_run_is_no_failure(run: Run, statuses: Statuses) -> None:
    from dataclasses import replace
    from pathlib import Path

    from grpo_sweeps.tracking.status import write_status

    assert run("R=2") == 0
    (status,) = statuses().values()
    (folder,) = (path.parent for path in Path("runs/adhoc").glob("*/status.json"))
    write_status(folder, replace(status, state="failed", error="OSError: gone"))
    assert run("-m", "R=2", "dry_run=true") == 0
    assert run("-m", "R=2") == 1


def test_sweep_file_axes_can_be_replaced_and_added_to(run: Run, statuses: Statuses) -> None:
    assert run("+sweeps=default", "seed=0,5", "-m", "R=4,8") == 0
    assert sorted(statuses("default")) == ["R=4 seed=0", "R=4 seed=5", "R=8 seed=0", "R=8 seed=5"]
    assert run("+sweeps=paper_table1_tiny", "sweep=mine", "R=2", "seed=0") == 0
    assert list(statuses("mine")) == ["R=2 seed=0 estimator._target_=plain_functions.estimator"]


def test_users_own_configuration_folder(run: Run, statuses: Statuses, workplace: Path) -> None:
    own = workplace / "own"
    (own / "sweeps").mkdir(parents=True)
    (own / "trainer").mkdir()
    (own / "hydra" / "launcher").mkdir(parents=True)
    (own / "sweeps" / "small.yaml").write_text(
        "# @package _global_\nhydra: {sweeper: {params: {R: '2,4'}}}\ntrainer: {lr: 0.5}\n"
    )
    (own / "trainer" / "quick.yaml").write_text("steps: 1\n")
    (own / "hydra" / "launcher" / "cluster.yaml").write_text("defaults: [submitit_slurm]\npartition: gpu\n")
    assert run("--config-dir", str(own), "+sweeps=small", "trainer=quick", "trainer.steps=2") == 0
    assert {status.total for status in statuses("small").values()} == {2}
    assert run("--config-dir", str(own), "hydra/launcher=cluster") == 2


def test_a_reward_of_the_users_own(run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (workplace / "my_reward_module.py").write_text(
        "def short(completion, problem, seed, limit: int = 3):\n    return float(len(completion) < limit)\n"
    )
    assert run("reward._target_=my_reward_module.short", "+reward.limit=4") == 0
    capfd.readouterr()
    assert run("reward._target_=my_reward_module.short", "+reward.limit=wide") == 2
    assert "reward.limit=wide: my_reward_module.short expects a value of type int" in capfd.readouterr().err
    assert run("reward=random", "reward._target_=my_reward_module.short") == 2
    err = capfd.readouterr().err
    assert "reward.p=0.5" in err and "~reward.p" in err
    assert run("reward=random", "reward._target_=my_reward_module.short", "~reward.p") == 0


def test_a_lock_keeps_a_second_process_out(workplace: Path) -> None:
    from grpo_sweeps.sweep.execute import execute
    from tests.integration.sweep.test_lock import HOLDER, holder

    frozen = yaml.safe_load(json.dumps(frozen_config()))
    run_dir = workplace / "runs" / "adhoc" / "abc"
    run_dir.mkdir(parents=True)
    with holder(HOLDER, run_dir):
        result = execute(frozen, run_dir)
    assert result.ok and result.elsewhere and result.error == "another process is running this run"
    assert not (run_dir / "metrics.jsonl").exists()
    assert execute(frozen, run_dir).ok
    assert execute(frozen, run_dir).ok  # started once more after it has finished: returns at once
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_requeued_job_waits_and_an_abandoned_one_is_interrupted(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types

    from submitit.core.utils import UncompletedJobError

    from grpo_sweeps.sweep.execute import Signals, execute
    from grpo_sweeps.tracking.status import read_status

    for index, (error, state) in enumerate(
        [
            (SystemExit(-1), "queued"),
            (UncompletedJobError("not requeued because: timed-out too many times"), "interrupted"),
        ]
    ):

        def train(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "grpo_sweeps.loop.train", types.SimpleNamespace(train=train))
        run_dir = workplace / str(index)
        with pytest.raises(type(error)):
            execute(frozen_config(), run_dir, signals=Signals(requeued=lambda: True))
        assert read_status(run_dir).state == state
