"""A tracker from outside the package, chosen by its dotted path: a real sweep, `sync`, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps import sync
from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.run import main
from grpo_sweeps.tracking.local import read_config, read_metrics
from grpo_sweeps.tracking.mirror import Follower, initialise, settings
from grpo_sweeps.tracking.status import RunStatus, read_status, write_status
from grpo_sweeps.tracking.tracker import Copied, NotInstalled, Tracker, TrackerError, load, shared
from grpo_sweeps.types import ConfigError

pytestmark = pytest.mark.integration

HERE = "tests.integration.test_tracker"
SWEEP = (
    "-m", "R=2,4", "sweep=small", "trainer.steps=2", "trainer.prompts=2", "trainer.eval_every=0",
    "trainer.device=cpu", "rollout.max_new_tokens=8",
)  # fmt: skip


class FileTracker:
    """Keeps a copy in one JSON file: identity -> state and rewards by step. `passes` tells which processes copied."""

    name, shared = "a file", False

    def __init__(self, tracking: TrackingConfig) -> None:
        if tracking.uri is None:
            raise ConfigError("tracking.uri=null: the path of a file is needed")
        self.place, self.path = tracking.uri, Path(tracking.uri)

    def read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"runs": {}, "passes": []}
        return json.loads(self.path.read_text())

    def write(self, content: dict[str, Any]) -> None:
        if not self.path.parent.is_dir():
            raise TrackerError(f"{self.path.parent} is not there.")
        self.path.write_text(json.dumps(content))

    def prepare(self) -> None:
        self.write({**self.read(), "prepared_by": os.getpid()})

    def copy(self, sweep_dir: Path, only: str | None = None, wait: float = 0.0) -> Copied:
        content, sent = self.read(), Copied()
        for run_dir in sorted(path.parent for path in sweep_dir.glob("*/metrics.jsonl")):
            if only not in (None, run_dir.name):
                continue
            rewards = {str(row["step"]): row["reward"] for row in read_metrics(run_dir).to_dict("records")}
            run = {"state": read_status(run_dir).state, "rewards": rewards}
            if content["runs"].get(run_dir.name) != run:
                content["runs"][run_dir.name] = run
                sent.add(Copied(runs=1, points=len(rewards)))
        if sent.runs:
            content["passes"].append(os.getpid())
            self.write(content)
        return sent


class SharedTracker(FileTracker):
    shared = True


class Incomplete:
    name, place = "half", "nowhere"

    def __init__(self, tracking: TrackingConfig) -> None: ...


class NeedsAPackage:
    def __init__(self, tracking: TrackingConfig) -> None:
        raise NotInstalled("aim")


class Broken(FileTracker):
    def copy(self, sweep_dir: Path, only: str | None = None, wait: float = 0.0) -> Copied:
        raise ZeroDivisionError("my tracker divides by 0")


class Unready(FileTracker):
    def prepare(self) -> None:
        raise ZeroDivisionError("my tracker\ndivides by 0")


class Talkative(FileTracker):
    def copy(self, sweep_dir: Path, only: str | None = None, wait: float = 0.0) -> Any:
        return "all copied"


def assert_whole(content: dict[str, Any], sweep_dir: Path) -> None:
    """The copy holds what the records hold, of both runs."""
    run_dirs = [path.parent for path in sweep_dir.glob("*/status.json")]
    assert len(run_dirs) == 2 and set(content["runs"]) == {path.name for path in run_dirs}
    for run_dir in run_dirs:
        frame = read_metrics(run_dir)
        run = content["runs"][run_dir.name]
        assert run["state"] == "finished" and len(run["rewards"]) == 2
        assert run["rewards"] == {str(step): reward for step, reward in zip(frame.step, frame.reward, strict=True)}


def test_a_sweep_and_sync_use_the_tracker_that_the_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    there, kind = tmp_path / "copy.json", f"{HERE}.FileTracker"
    assert main([*SWEEP, "tracking=custom", f"tracking.kind={kind}", f"tracking.uri={there}"]) == 0
    said = capfd.readouterr()
    assert "mirror:" not in said.out + said.err
    sweep_dir = tmp_path / "runs" / "small"
    assert (sweep_dir / "mirror.log").read_text() == ""
    content = json.loads(there.read_text())
    assert_whole(content, sweep_dir)
    assert content["passes"] and os.getpid() not in content["passes"], "the training process copied"
    assert read_config(next(sweep_dir.glob("*/config.yaml")).parent)["tracking"]["kind"] == kind

    there.unlink()  # the record is the truth: the copy can be made again
    assert sync.main(["sweep=small"]) == 0
    assert_whole(json.loads(there.read_text()), sweep_dir)
    assert capfd.readouterr().out == f"small: 2 runs, 4 points and 0 files new -> {there}\n"
    assert sync.main(["sweep=small"]) == 0
    assert capfd.readouterr().out == f"small: 0 runs, 0 points and 0 files new -> {there}\n"

    other = tmp_path / "other.json"  # what the command says goes before what the runs were configured with
    assert sync.main(["sweep=small", f"tracker={HERE}.SharedTracker", f"uri={other}"]) == 0
    assert_whole(json.loads(other.read_text()), sweep_dir)
    capfd.readouterr()
    assert sync.main(["sweep=small", f"uri={tmp_path / 'no' / 'folder.json'}"]) == 1
    assert "is not there. The local record is whole" in capfd.readouterr().err
    assert not (tmp_path / "mlflow.db").exists()


def test_a_job_copies_its_own_run_to_a_tracker_that_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_mlflow_follower import write_run

    monkeypatch.chdir(tmp_path)
    tracking = TrackingConfig(f"{HERE}.SharedTracker", str(tmp_path / "copy.json"))
    assert shared(tracking) and not shared(TrackingConfig(f"{HERE}.FileTracker", "x"))
    assert initialise(tracking) is None
    assert json.loads((tmp_path / "copy.json").read_text())["prepared_by"] != os.getpid()
    with Follower("study", "runs", tracking, tmp_path / "mirror.log", run="2"):
        write_run(tmp_path / "runs" / "study" / "4", 1)
        write_run(tmp_path / "runs" / "study" / "2", 3)
    assert set(json.loads((tmp_path / "copy.json").read_text())["runs"]) == {"2"}
    nowhere = TrackingConfig(tracking.kind, str(tmp_path / "no" / "copy.json"))
    assert initialise(nowhere) == f"{tmp_path / 'no'} is not there."


def test_the_copying_process_finds_the_class_where_this_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the working directory nor on PYTHONPATH, as in a job whose modules lie where it was submitted."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "tracker_of_mine.py").write_text(f"from {HERE} import FileTracker\n\nclass Mine(FileTracker): ...\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.chdir(tmp_path)
    assert initialise(TrackingConfig("tracker_of_mine.Mine", str(tmp_path / "copy.json"))) is None
    assert json.loads((tmp_path / "copy.json").read_text())["prepared_by"] != os.getpid()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tracking=custom"], "tracking.kind=custom: choose one of mlflow, local, or give the dotted path of a class"),
        (["tracking=custom", "tracking.kind=no_such.Tracker"], "tracking.kind=no_such.Tracker: no tracker can be made"),
        (["tracking=custom", f"tracking.kind={HERE}.Nothing"], "no tracker can be made of it (AttributeError"),
        (["tracking=custom", f"tracking.kind={HERE}.Incomplete"], "it has no shared, prepare, copy"),
        (["tracking=custom", f"tracking.kind={HERE}.FileTracker"], "tracking.uri=null: the path of a file is needed"),
        (["tracking=custom", f"tracking.kind={HERE}.NeedsAPackage"], "aim is not installed here: pip install aim"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_starts(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["R=2", "trainer.steps=1", *words]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Broken", "a file: copy failed (ZeroDivisionError: my tracker divides by 0)."),
        ("Talkative", "a file: copy returned 'all copied'; a Copied or None is needed."),
    ],
)
def test_a_fault_in_a_tracker_is_one_sentence(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"runs_dir={tmp_path / 'runs'}", f"tracker={HERE}.{name}", f"uri={tmp_path / 'copy.json'}"]
    (tmp_path / "runs" / "small" / "one").mkdir(parents=True)
    write_status(
        tmp_path / "runs" / "small" / "one", RunStatus(state="finished", identity="one", name="R=2", sweep="small")
    )
    assert sync.main(["sweep=small", *words]) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["experiment=e"]])
def test_a_fault_in_making_the_place_is_one_sentence(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sync.main(["--init", f"tracker={HERE}.Unready", f"uri={tmp_path / 'copy.json'}", *words]) == 1
    assert capsys.readouterr().err == "a file: prepare failed (ZeroDivisionError: my tracker divides by 0).\n"


def test_a_run_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small" / "one").mkdir(parents=True)
    write_status(tmp_path / "small" / "one", RunStatus(state="finished", identity="one", name="R=2", sweep="small"))
    assert sync.main([f"runs_dir={tmp_path}", "sweep=small", "run=two"]) == 2
    assert "error: sync: run=two: no such run in" in capsys.readouterr().err


def test_an_address_goes_to_its_own_tracker_alone() -> None:
    mine = {"kind": "my.Tracker", "uri": "file", "experiment": "e"}
    assert settings(mine, None, None, None) == TrackingConfig("my.Tracker", "file", "e")
    assert settings(mine, "mlflow", None, None) == TrackingConfig("mlflow", None, "e")
    assert settings(mine, None, "env", None) == TrackingConfig("my.Tracker", None, "e")
    assert settings({"kind": "local", "uri": "http://h:1"}, None, None, None).uri == "http://h:1"
    assert settings({}, None, None, None) == TrackingConfig()


def test_the_built_in_trackers_keep_to_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trackers: list[Tracker | None] = [load(TrackingConfig()), load(TrackingConfig(uri="http://127.0.0.1:5000"))]
    assert [tracker.name for tracker in trackers if tracker] == ["MLflow", "MLflow"]
    assert [tracker.shared for tracker in trackers if tracker] == [False, True]
    assert load(TrackingConfig("local")) is None and not shared(TrackingConfig("local"))
