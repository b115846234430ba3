"""The copy in MLflow: what is in it, that nothing is in it twice, and that its statuses are true (SQLite)."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow.entities import ViewType

from grpo_sweeps import sync
from grpo_sweeps.tracking import mlflow_store, provenance
from grpo_sweeps.tracking.local import METRICS, LocalRecord, read_groups
from grpo_sweeps.tracking.mlflow_store import Store
from grpo_sweeps.tracking.mlflow_tracker import Mirror
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import Completion, GroupRecord

pytestmark = pytest.mark.integration

CONFIG = """\
R: 8
seed: 0
trainer: {lr: 1.0e-06, steps: 3, betas: [0.9, 0.95]}
task: {name: arithmetic, prompt: "%s", stop: []}
tracking: {kind: mlflow, uri: "https://ann:s3cret@host/x", experiment: study}
""" % ("long " * 2000)


def make_run(sweep_dir: Path, identity: str, state: str = "finished", steps: int = 3, **status: Any) -> Path:
    run = sweep_dir / identity
    with LocalRecord(run) as record:
        for step in range(steps):
            log_step(record, step)
    (run / "config.yaml").write_text(CONFIG)
    (run / "log.txt").write_text("tracking.uri=https://ann:s3cret@host/x\nstep 2\n")
    fields = dict(
        identity=identity, name=f"R=8 seed={identity}", sweep=sweep_dir.name, step=steps, total=steps, host="elsewhere",
        pid=1, job_id="77_1", heartbeat=time.time(), started=1_700_000_000.0, ended=1_700_000_100.0, commit="c0ffee",
        dirty=False, versions={"torch": "2.13.0"}, command="python -m grpo_sweeps.run R=8",
    )  # fmt: skip
    write_status(run, RunStatus(state, **{**fields, **status}))  # type: ignore[arg-type]
    return run


def log_step(record: LocalRecord, step: int, shift: float = 0.0) -> None:
    infinite = {"loss": math.inf} if step == 1 else {"loss": math.nan}
    record.log_metrics(
        step, {"reward": 0.1 * step + shift, "step_time": time.monotonic(), "spectral/groups": 1, **infinite}
    )
    gram = np.array([[2.0, 0.3], [0.3, 1.0 + step]])
    pair, right = (-1.0, 1.0), (True, False)
    record.log_groups([GroupRecord(step, "p", 2, (0.0, 1.0), pair, pair, (3, 4), pair, right, right, gram=gram)])
    record.log_completions([Completion(step, "p", 0, "q", "#### 1", 1.0, 1.0, True, True, 3, False)])


@pytest.fixture
def place(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with an initialised mlflow.db."""
    shutil.copy(template, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def uri(place: Path) -> str:
    return f"sqlite:///{place}/mlflow.db"


def copy(place: Path, sweep: str = "study", **keys: Any) -> Mirror:
    mirror = Mirror(place / "runs" / sweep, keys.pop("uri", uri(place)), "grpo_sweeps", **keys)
    assert mirror.copy(wait=5.0) is not None
    return mirror


def contents(
    where: str, experiment: str = "grpo_sweeps", deleted: bool = False, served: Path | None = None
) -> dict[str, Any]:
    """Everything an MLflow store has of the experiment, keyed by run id, to be compared as a whole.

    served: where a server of this machine keeps the artifacts.
    """
    client = Store(where, experiment).client
    view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
    out = {}
    for run in client.search_runs([client.get_experiment_by_name(experiment).experiment_id], run_view_type=view):
        history = {
            key: [(m.step, m.timestamp, repr(m.value)) for m in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        address = run.info.artifact_uri
        root = Path(address.removeprefix("file://"))
        if served is not None:
            assert address.startswith("mlflow-artifacts:/"), address
            root = served / address.removeprefix("mlflow-artifacts:/")
        files = {
            str(p.relative_to(root)): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()
        }
        info = (run.info.run_name, run.info.status, run.info.start_time, run.info.end_time, run.info.lifecycle_stage)
        out[run.info.run_id] = {
            "info": info, "params": run.data.params, "tags": run.data.tags, "history": history, "files": files,
        }  # fmt: skip
    return out


def child(where: str, identity: str) -> dict[str, Any]:
    (found,) = [r for r in contents(where).values() if r["tags"].get("identity") == identity]
    return found


def points(run: dict[str, Any], key: str = "reward") -> list[tuple[int, float]]:
    return sorted((step, float(value)) for step, _, value in run["history"][key])


def test_one_parent_a_child_a_run_and_all_that_belongs_to_it(place: Path) -> None:
    runs = place / "runs" / "study"
    run = make_run(runs, "0")
    make_run(runs, "1", "failed", error="ValueError: https://ann:s3cret@host/x refused")
    make_run(runs, "2", "queued", steps=0)
    copy(place)
    everything = contents(uri(place))
    (parent_id,) = [i for i, r in everything.items() if r["tags"]["grpo_sweeps.kind"] == "sweep"]
    children = [r for r in everything.values() if r["tags"].get("mlflow.parentRunId") == parent_id]
    assert len(everything) == 3 and sorted(r["info"][0] for r in children) == ["R=8 seed=0", "R=8 seed=1"]
    parent, first = everything[parent_id], child(uri(place), "0")
    assert parent["info"][0] == "study" and parent["tags"]["git_commit"] == "c0ffee"

    assert first["info"][1:4] == ("FINISHED", 1_700_000_000_000, 1_700_000_100_000)
    assert points(first) == [(0, 0.0), (1, 0.1), (2, 0.2)]
    moments = [json.loads(line)["time"] for line in (run / METRICS).read_text().splitlines()]
    assert [t for _, t, _ in first["history"]["reward"]] == [round(m * 1000) for m in moments]
    loss = dict(points(first, "loss"))
    assert math.isnan(loss[0]) and loss[1] == mlflow_store.LARGEST
    assert first["params"]["trainer.lr"] == "1e-06" and first["params"]["trainer.betas"] == "[0.9, 0.95]"
    assert len(first["params"]["task.prompt"]) == 6000 and first["params"]["task.stop"] == "[]"
    assert first["tags"]["slurm_job_id"] == "77_1" and first["tags"]["git_dirty"] == "false"
    assert first["tags"]["version.torch"] == "2.13.0" and "error" not in first["tags"]
    assert child(uri(place), "1")["tags"]["error"] == "ValueError: https://***@host/x refused"

    assert {Path(name).stem for name in first["files"]} == {"config", "environment", "log", "grams", "completions"}
    (place / "grams.parquet").write_bytes(first["files"]["grams.parquet"][1])
    stored = pq.read_table(place / "grams.parquet")["gram"].to_pylist()
    assert stored == [g.gram.ravel().tolist() for g in read_groups(run)]  # type: ignore[union-attr]
    for where in (place / "mlflow.db", *(p for p in place.rglob("*") if p.is_file() and "mlartifacts" in p.parts)):
        assert b"s3cret" not in where.read_bytes()
    assert not [p for p in place.rglob("mlflow.json") if "s3cret" in p.read_text()]


def test_the_names_of_choices_are_parameters(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0")
    (run / "config.yaml").write_text(
        CONFIG + "estimator: {_target_: grpo_sweeps.estimators.group.rloo}\nreward: {_target_: mine.brief}\n"
    )
    copy(place)
    older = child(uri(place), "0")["params"]
    assert (older["estimator"], older["reward"]) == ("rloo", "mine.brief") and "trainer" not in older
    chosen = {"reward": "custom", "estimator": "rloo", "trainer": "pretrained"}
    provenance.write(run, provenance.Source(choices=chosen))
    copy(place)
    found = child(uri(place), "0")
    assert found["params"] == older | {"trainer": "pretrained"}, "custom says nothing of a function"
    assert not [tag for tag in found["tags"] if tag.startswith("changed.")]


def test_a_second_copy_changes_nothing(place: Path) -> None:
    runs = place / "runs" / "study"
    make_run(runs, "0"), make_run(runs, "1", "interrupted")
    copy(place)
    before, notes = contents(uri(place)), {p: p.read_bytes() for p in place.rglob("mlflow.json")}
    assert len(before) == 3 and len(notes) == 3
    copy(place)
    assert sync.main(["sweep=study", f"uri={uri(place)}", "experiment=grpo_sweeps"]) == 0
    assert repr(contents(uri(place))) == repr(before)
    assert {p: p.read_bytes() for p in place.rglob("mlflow.json")} == notes


@pytest.mark.parametrize("lost", ["all notes", "the runs' notes of what was sent"])
def test_with_the_notes_lost_the_runs_are_found_again(place: Path, lost: str) -> None:
    runs = place / "runs" / "study"
    make_run(runs, "0")
    copy(place)

    def without_record() -> dict[str, Any]:
        """The id of the record is made anew where its note is lost; files are sent again."""
        out = {}
        for run_id, run in contents(uri(place)).items():
            tags = {k: v for k, v in run["tags"].items() if k != "grpo_sweeps.record" or lost != "all notes"}
            out[run_id] = run | {"tags": tags, "files": {name: data for name, (_, data) in run["files"].items()}}
        return out

    before = without_record()
    for path in place.rglob("mlflow.json"):
        if lost == "all notes":
            path.unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), "stores": {}}))
    copy(place)
    assert repr(without_record()) == repr(before)


def test_a_run_made_again_in_the_folder_of_a_deleted_one_is_another_run(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0")
    copy(place)
    shutil.rmtree(run)
    time.sleep(0.002)  # another millisecond: the time of a point in MLflow
    make_run(place / "runs" / "study", "0")
    copy(place)
    assert len(contents(uri(place))) == 3


class Killed(BaseException):
    """Stands for SIGKILL."""


@contextlib.contextmanager
def killed_around(monkeypatch: pytest.MonkeyPatch, call: str, after: bool) -> Iterator[None]:
    """Before or after the first such call of the store; what is inside must reach it."""
    original = getattr(Store, call)

    def dying(*arguments: Any) -> Any:
        if after:
            original(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Store, call, dying)
        with pytest.raises(Killed):
            yield


CALLS = ("create", "log_points", "log_params", "set_tags", "upload", "set_status")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_killed_around_any_call_a_second_copy_completes_it_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: bool
) -> None:
    runs = place / "runs" / "study"
    make_run(runs, "0")
    with killed_around(monkeypatch, call, after):
        copy(place)
    copy(place)
    assert len(contents(uri(place), deleted=True)) == 2
    found = child(uri(place), "0")
    assert points(found) == [(0, 0.0), (1, 0.1), (2, 0.2)] and len(found["history"]["loss"]) == 3
    assert found["info"][1] == "FINISHED" and len(found["files"]) == 5 and "trainer.lr" in found["params"]


def test_a_run_that_was_requeued_is_scheduled_under_its_id(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0", "running", ended=None)
    mirror = Mirror(run.parent, uri(place), "grpo_sweeps")
    mirror.copy()
    before = set(contents(uri(place)))
    write_status(run, RunStatus("queued", "0", "R=8 seed=0", "study"))
    mirror.copy()
    assert {r["info"][1] for r in contents(uri(place)).values()} == {"SCHEDULED"}
    write_status(run, RunStatus("finished", "0", "R=8 seed=0", "study", ended=5.0))
    mirror.copy()
    assert {r["info"][1] for r in contents(uri(place)).values()} == {"FINISHED"} and set(contents(uri(place))) == before


def test_jobs_that_mirror_one_run_each_share_the_parent(place: Path) -> None:
    runs = place / "runs" / "study"
    make_run(runs, "0"), make_run(runs, "1", "running", ended=None)
    copy(place, only="0")
    assert {r["info"][0]: r["info"][1] for r in contents(uri(place)).values()} == {
        "study": "RUNNING", "R=8 seed=0": "FINISHED",
    }  # fmt: skip
    make_run(runs, "1")
    copy(place, only="1")
    found = contents(uri(place))
    assert len(found) == 3 and {r["info"][1] for r in found.values()} == {"FINISHED"}


def test_a_torn_line_waits_for_its_newline(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0", "running", ended=None)
    data = (run / METRICS).read_bytes()
    mirror = Mirror(run.parent, uri(place), "grpo_sweeps")
    for end in (len(data) - 20, len(data)):
        (run / METRICS).write_bytes(data[:end])
        mirror.copy()
        assert len(points(child(uri(place), "0"))) == (3 if end == len(data) else 2)


def test_the_states_of_a_run_and_its_sweep(place: Path) -> None:
    runs = place / "runs" / "study"
    run = make_run(runs, "0", "running", ended=None)
    mirror = Mirror(runs, uri(place), "grpo_sweeps")
    status = RunStatus(
        "running", identity="0", name="R=8", sweep="study", host="elsewhere", heartbeat=time.time(), started=1.0
    )
    for state, age, word in [
        ("running", 0, "RUNNING"), ("running", 1e4, "KILLED"), ("running", 0, "RUNNING"), ("failed", 0, "FAILED"),
        ("running", 0, "RUNNING"), ("interrupted", 0, "KILLED"), ("finished", 0, "FINISHED"),
    ]:  # fmt: skip
        error = "ValueError: boom" if state == "failed" else None
        write_status(run, replace(status, state=state, heartbeat=time.time() - age, error=error))
        mirror.copy()
        found = contents(uri(place))
        assert {r["info"][1] for r in found.values()} == {word}
        tags = child(uri(place), "0")["tags"]
        assert tags.get("error", "") == (error or "") and tags.get("stale", "") == ("true" if age else "")
    assert child(uri(place), "0")["info"][0] == "R=8"
    make_run(runs, "1", "failed"), make_run(runs, "2", "running", ended=None)
    mirror.copy()
    (parent,) = [r for r in contents(uri(place)).values() if r["tags"]["grpo_sweeps.kind"] == "sweep"]
    assert parent["info"][1] == "RUNNING"
    write_status(runs / "2", replace(status, state="finished", identity="2"))
    mirror.copy()
    (parent,) = [r for r in contents(uri(place)).values() if r["tags"]["grpo_sweeps.kind"] == "sweep"]
    assert parent["info"][1] == "FAILED"


@pytest.mark.parametrize("shift", [0.0, 0.5], ids=["same numbers", "other numbers"])
def test_a_run_that_went_back_to_a_checkpoint_has_each_step_once(place: Path, shift: float) -> None:
    """Same numbers again: the run keeps its id. Other numbers: a fresh copy, the old one deleted (restorably)."""
    run = make_run(place / "runs" / "study", "0", "running", steps=5, ended=None)
    mirror = Mirror(run.parent, uri(place), "grpo_sweeps")
    mirror.copy()
    (before,) = [i for i, r in contents(uri(place)).items() if r["tags"]["grpo_sweeps.kind"] == "run"]
    record = LocalRecord(run)
    record.truncate_after(2)
    mirror.copy()  # in the middle of going back
    for step in (3, 4, 5):
        log_step(record, step, shift)
        mirror.copy()
    record.close()
    write_status(run, RunStatus("finished", identity="0", name="R=8 seed=0", sweep="study", ended=9.0))
    copy(place)
    found = child(uri(place), "0")
    assert points(found) == [(s, 0.1 * s + (shift if s > 2 else 0.0)) for s in range(6)]
    assert len(found["history"]["step_time"]) == 6
    (after,) = [i for i, r in contents(uri(place)).items() if r["tags"]["grpo_sweeps.kind"] == "run"]
    assert (after == before) == (shift == 0.0)
    assert len(contents(uri(place), deleted=True)) == (2 if shift == 0.0 else 3)


def test_a_run_that_went_back_and_ended_there_keeps_no_later_points(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0", steps=5)
    copy(place)
    with LocalRecord(run) as record:
        record.truncate_after(2)
    copy(place)
    assert [s for s, _ in points(child(uri(place), "0"))] == [0, 1, 2]


def test_a_finished_run_taken_further_keeps_its_id_and_parameters(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0")
    copy(place)
    before = set(contents(uri(place)))
    with LocalRecord(run) as record:
        log_step(record, 3)
    (run / "config.yaml").write_text(CONFIG.replace("steps: 3", "steps: 4, warmup: 1"))
    copy(place)
    found = child(uri(place), "0")
    assert set(contents(uri(place))) == before and [s for s, _ in points(found)] == [0, 1, 2, 3]
    assert found["params"]["trainer.steps"] == "3" and found["tags"]["changed.trainer.steps"] == "4"
    assert found["params"]["trainer.warmup"] == "1"
    (place / "again.parquet").write_bytes(found["files"]["grams.parquet"][1])
    assert pq.read_table(place / "again.parquet").num_rows == 4


def test_another_store_gets_a_copy_of_its_own_and_the_first_stays(place: Path, template: Path) -> None:
    make_run(place / "runs" / "study", "0")
    copy(place)
    before = contents(uri(place))
    (place / "other").mkdir()
    shutil.copy(template, place / "other" / "mlflow.db")
    other = f"sqlite:///{place}/other/mlflow.db"
    copy(place, uri=other)
    assert points(child(other, "0")) == points(child(uri(place), "0"))
    copy(place)
    assert repr(contents(uri(place))) == repr(before)


def test_a_run_deleted_in_mlflow_is_copied_afresh_by_hand(place: Path) -> None:
    make_run(place / "runs" / "study", "0")
    copy(place)
    store = Store(uri(place), "grpo_sweeps")
    for run_id in contents(uri(place)):
        store.delete(run_id)
    copy(place)
    assert len(contents(uri(place))) == 2 and len(points(child(uri(place), "0"))) == 3


def test_a_copied_sweep_folder_is_another_sweep(place: Path) -> None:
    make_run(place / "runs" / "study", "0")
    copy(place)
    before = contents(uri(place))
    shutil.copytree(place / "runs" / "study", place / "runs" / "twin")
    copy(place, "twin")
    after = contents(uri(place))
    assert len(after) == 4 and all(repr(after[i]) == repr(r) for i, r in before.items())


def doubled(run: dict[str, Any]) -> dict[str, list[int]]:
    """The steps that stand in the store more than once, by metric."""
    steps = {key: [step for step, _, _ in history] for key, history in run["history"].items()}
    return {
        key: sorted({s for s in found if found.count(s) > 1})
        for key, found in steps.items()
        if len(set(found)) < len(found)
    }


def test_an_evaluation_and_the_step_after_it_share_a_point_though_copied_apart(place: Path) -> None:
    """Both lines of a step say how many rollouts came before; a pass between them must not send that twice."""
    run = make_run(place / "runs" / "study", "0", "running", steps=0, ended=None)
    mirror = Mirror(run.parent, uri(place), "grpo_sweeps")
    with LocalRecord(run) as record:
        for step in range(3):
            record.log_metrics(step, {"eval/reward": 0.5, "rollouts": 8.0 * step})
            assert mirror.copy() is not None
            record.log_metrics(step, {"reward": 0.1, "rollouts": 8.0 * step, "step_time": 1.0})
            assert Mirror(run.parent, uri(place), "grpo_sweeps").copy() is not None  # another follower
    found = child(uri(place), "0")
    assert doubled(found) == {} and points(found, "rollouts") == [(0, 0.0), (1, 8.0), (2, 16.0)]
    assert points(found) == [(0, 0.1), (1, 0.1), (2, 0.1)] and len(contents(uri(place), deleted=True)) == 2


def test_the_lines_of_a_step_are_found_before_corrections_and_beyond_a_tail(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_sweeps.tracking import mlflow_copy

    monkeypatch.setattr(mlflow_copy, "TAIL_BYTES", 64)
    run = make_run(place / "runs" / "study", "0", "running", ended=None)
    mirror = Mirror(run.parent, uri(place), "grpo_sweeps")
    with LocalRecord(run) as record:
        record.log_metrics(3, {"eval/reward": 0.5, "rollouts": 24.0})
        record.log_metrics(0, {"spectral/recomputed": 1.0})
        mirror.copy()
        record.log_metrics(3, {"reward": 0.1, "rollouts": 24.0})
        mirror.copy()
    found = child(uri(place), "0")
    assert doubled(found) == {} and points(found, "rollouts") == [(3, 24.0)] and len(points(found)) == 4


@pytest.mark.parametrize("state", ["finished", "running"])
def test_a_point_that_stands_twice_in_the_store_is_mended_by_hand(place: Path, state: str) -> None:
    make_run(place / "runs" / "study", "0", state)
    copy(place)
    store = Store(uri(place), "grpo_sweeps")
    (run_id,) = [i for i, r in contents(uri(place)).items() if r["tags"].get("identity") == "0"]
    store.log_points(run_id, [("reward", 0.1, 1, 1)])
    assert doubled(child(uri(place), "0")) == {"reward": [1]}
    assert sync.main(["sweep=study", f"uri={uri(place)}", "experiment=grpo_sweeps"]) == 0
    assert doubled(child(uri(place), "0")) == {} and len(points(child(uri(place), "0"))) == 3


def test_a_damaged_run_stops_no_other(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = place / "runs" / "study"
    make_run(runs, "0"), make_run(runs, "1")
    (runs / "0" / "status.json").write_text("{")
    make_run(runs, "2")
    (runs / "2" / "config.yaml").write_text("a: [")
    assert sync.main(["sweep=study", f"uri={uri(place)}", "experiment=grpo_sweeps"]) == 1
    assert len(points(child(uri(place), "1"))) == 3
    error = capsys.readouterr().err
    assert "0/status.json cannot be read" in error and "study/2:" in error


def test_a_second_process_at_the_same_store_is_told(place: Path) -> None:
    from grpo_sweeps.tracking.locks import locked

    make_run(place / "runs" / "study", "0")
    with locked(place / "mlflow.db.lock", 0.0) as mine:
        assert mine
        assert Mirror(place / "runs" / "study", uri(place), "grpo_sweeps").copy(wait=0.2) is None
    assert contents(uri(place), "unused") == {}
    copy(place)


def test_more_than_a_batch(place: Path) -> None:
    run = make_run(place / "runs" / "study", "0", steps=0)
    with LocalRecord(run) as record:
        for step in range(30):
            record.log_metrics(step, {f"m/{i}": float(step * i) for i in range(80)})
    (run / "config.yaml").write_text("\n".join(f"key{i}: {i}" for i in range(250)))
    copy(place)
    found = child(uri(place), "0")
    assert sum(len(h) for h in found["history"].values()) == 2400 and len(found["params"]) == 250


def test_the_interface_opens_an_experiment_on_its_runs(place: Path) -> None:
    client = Store(uri(place), "new").client

    def kind(experiment: str) -> str | None:
        return client.get_experiment_by_name(experiment).tags.get(mlflow_store.KIND)

    assert kind("new") == mlflow_store.TRAINING
    client.create_experiment("of an older version")
    Store(uri(place), "of an older version")
    assert kind("of an older version") == mlflow_store.TRAINING
    client.create_experiment("chosen", tags={mlflow_store.KIND: "genai_development"})
    Store(uri(place), "chosen")
    assert kind("chosen") == "genai_development"


def test_the_files_of_a_report_are_artifacts_of_the_sweep(place: Path) -> None:
    make_run(place / "runs" / "study", "0")
    report = place / "reports" / "study"
    report.mkdir(parents=True)
    (report / "index.html").write_text("<p>one</p>")
    (report / "notes.txt").write_text("not the report's")
    names = ["index.html", "manifest.json", "../../mlflow.db"]
    (report / "manifest.json").write_text(json.dumps({"sweep": "study", "files": names}))
    words = ["sweep=study", f"uri={uri(place)}", "experiment=grpo_sweeps"]
    client = Store(uri(place), "grpo_sweeps").client

    def artifacts() -> dict[str, int]:
        note = json.loads((place / "runs" / "study" / "mlflow.json").read_text())
        (known,) = note["stores"].values()
        return {file.path: file.file_size for file in client.list_artifacts(known["run_id"])}

    assert sync.main([*words, "reports=elsewhere"]) == 2
    (place / "elsewhere").mkdir()
    assert sync.main([*words, "reports=elsewhere"]) == 0
    assert artifacts() == {}
    assert sync.main(words) == 0
    assert set(artifacts()) == {"index.html", "manifest.json"}
    (report / "index.html").write_text("<p>another</p>")
    assert sync.main(words) == 0
    assert artifacts()["index.html"] == len("<p>another</p>")
    (report / "manifest.json").write_text(json.dumps({"sweep": "another", "files": names}))
    (report / "index.html").write_text("<p>of another sweep</p>")
    assert sync.main(words) == 0
    assert artifacts()["index.html"] == len("<p>another</p>")
