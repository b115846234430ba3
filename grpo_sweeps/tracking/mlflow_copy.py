"""Copies a sweep's local records to an MLflow store: a parent run for the sweep, a child for each run.

Guarantees. Killed at any moment and run again, nothing is there twice: a run is found by its record's tag, and
wherever the note of what was copied (mlflow.json) cannot be trusted - a batch was on its way, the note is gone, the
run went back to a checkpoint - the points in the store are compared with the local record and only missing ones are
sent. If they contradict it (another value at the same step, or points of steps that the ended run does not have), a
new run is made that says which one it replaces; the old one gets tags that name the new one and say why, and is deleted
in MLflow (restorably). The same happens where values of an older run are recomputed (see `recompute`): a chart shows
only these, and a tag says so. The comparison leaves out timings (`lines.is_timing`): steps that ran twice with
the same result keep their first timing in MLflow. Status is set last: FINISHED means that everything is there.

mlflow.json in a run's (and a sweep's) folder notes what has been copied to which store:

    {"record": id,                     made once, before anything is created in MLflow, and kept as a tag there
     "owner": "<sweep>[/<identity>]", "place": {...},
     "stores": {"<uri> <experiment>": {"run_id", "metrics_bytes", "metrics_sha256", "pending", ...}}}

`record` is how a run is found again in MLflow when this file was not written in time (a kill between creating the run
and noting its id) and why nobody else's run is ever touched. Where the file is lost, the run is found by its place
(`mlflow_place`), identity and first point. `owner` and `place` tell a copied folder, whose copy is one of its own, from
a sweep that was renamed, whose runs in MLflow follow it.

A copy by hand is `whole`: what the store has is compared with the record field by field, and not with the note.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo_sweeps.config.choices import choice_names
from grpo_sweeps.files import files_of_report, write_text
from grpo_sweeps.redaction import redact, redact_mapping
from grpo_sweeps.text import plain, show
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.lines import (
    METRICS,
    RECOMPUTED,
    TAIL_BYTES,
    GrowingFile,
    growing,
    is_timing,
    left_out,
    number_from_json,
    parse_lines,
)
from grpo_sweeps.tracking.local import CONFIG, read_config, record_tables
from grpo_sweeps.tracking.mlflow_place import PLACE, read_place
from grpo_sweeps.tracking.mlflow_store import (
    PARAM_LIMIT,
    REPLACED_BY,
    TAG_LIMIT,
    History,
    Point,
    Store,
    Stored,
    clean_key,
    stored_value,
)
from grpo_sweeps.tracking.recompute import recomputed_note
from grpo_sweeps.tracking.status import ENDED, RunStatus, copied, read_status
from grpo_sweeps.tracking.tracker import Copied

FILE_NAME = "mlflow.json"
Artifact = tuple[str, str, Any]  # name, signature of the source, what writes it to a path
ONCE_TAGS = ("error", "stale", "slurm_job_id", "git_dirty", "grpo_sweeps.recomputed")  # that a run may lose again
REPLACES = "grpo_sweeps.replaces"  # the run that the new one was made for
RECOMPUTED_TAG = "grpo_sweeps.recomputed"
STATUS = {
    "queued": "SCHEDULED",
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}


@dataclass
class StoreState:
    """What one store has of one run (or of a sweep's parent run)."""

    run_id: str | None = None
    metrics_bytes: int = 0  # of metrics.jsonl, whole lines
    metrics_sha256: str = ""  # of those bytes: another digest means that the run went back before them
    pending: bool = False  # a batch was on its way, or the store has points that are not verified yet
    status: str | None = None
    name: str | None = None
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # name -> {"source": signature, "sha256", "bytes"}


def key(uri: str, experiment: str) -> str:
    """What a note calls a store."""
    return f"{redact(uri)} {experiment}"


def read_note(path: Path) -> dict[str, Any]:
    """The content of a mlflow.json. Raises OSError, ValueError, KeyError or TypeError where it is none."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content["record"], str) or not isinstance(content["stores"], dict):
        raise TypeError("it is no note of what was copied")
    return content


class CopyState:
    """The file mlflow.json of `folder`, for one store. `owner` (sweep/identity) tells a copied folder."""

    def __init__(self, folder: Path, owner: str, uri: str, experiment: str) -> None:
        self.path = folder / FILE_NAME
        self.key = key(uri, experiment)
        self.runs_dir = folder.parents[owner.count("/")]
        self.place = read_place(self.runs_dir)
        self._content = self._read(owner)
        known = {f.name for f in fields(StoreState)}
        stored = self._content["stores"].get(self.key, {})
        self.store = StoreState(**{k: v for k, v in stored.items() if k in known})

    @property
    def record(self) -> str:
        return self._content["record"]

    def _read(self, owner: str) -> dict[str, Any]:
        place = self.place.tags() if self.place else None
        try:
            content = read_note(self.path)
            if content["owner"] == owner or self._renamed(content):
                return content | {"owner": owner, "place": place}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            show(f"{self.path} is damaged: what was copied is looked up.")
        return {"record": uuid.uuid4().hex, "owner": owner, "place": place, "stores": {}}

    def _renamed(self, content: dict[str, Any]) -> bool:
        """True where the note was written here for a folder that is no longer there: this is that folder."""
        here = self.place is not None and content.get("place") == self.place.tags()
        return here and not (self.runs_dir / content["owner"]).exists()

    def save(self) -> None:
        """Write the file, atomically."""
        self._content["stores"][self.key] = asdict(self.store)
        write_text(self.path, json.dumps(self._content, indent=1) + "\n")


def mlflow_status(status: RunStatus) -> str:
    """MLflow's word for a run's state; a run that died without a word is KILLED."""
    return "KILLED" if status.stale() else STATUS[status.state]


def copy_run(
    store: Store, run_dir: Path, status: RunStatus, parent_id: str, verify: bool = True, whole: bool = False
) -> Copied:
    """Bring one run's copy up to date. verify: ask the store whether it still has the run; whole: and what of it."""
    state = CopyState(run_dir, f"{status.sweep}/{status.identity}", store.uri, store.experiment)
    copied = Copied(runs=1)
    tags = _run_tags(status, state, parent_id)
    over = status.ended or status.heartbeat
    if not _locate(store, state, verify, {"grpo_sweeps.kind": "run", "identity": status.identity}):
        _create(store, state, status, tags)
    elif whole:
        _recall(store, state, tags, over)
    copied.points = _copy_metrics(store, state, run_dir, status, tags)
    run_id, _ = _known(state)
    _copy_params(store, state, run_id, run_dir)
    _copy_tags(store, state, tags)
    copied.artifacts = _copy_artifacts(store, state, run_id, run_dir, status)
    _set_name_and_status(store, state, plain(status.name or status.identity), mlflow_status(status), over)
    return copied


def _copy_tags(store: Store, state: CopyState, tags: dict[str, str]) -> None:
    """Send the tags that are new or other; those that a later attempt does not have (an error) become empty."""
    run_id, noted = _known(state)
    gone = {k: "" for k, v in noted.tags.items() if v and k not in tags}
    changed = {k: v for k, v in tags.items() if noted.tags.get(k) != v} | gone
    if changed:
        store.set_tags(run_id, changed)
        noted.tags |= changed
        state.save()


def _recall(store: Store, state: CopyState, tags: Mapping[str, str], over: float | None) -> None:
    """Put what the store has in the place of what was noted, so that what it lacks or has otherwise is sent again."""
    run_id, noted = _known(state)
    there = store.read(run_id)
    ours = dict.fromkeys([*noted.tags, *tags, *ONCE_TAGS])
    noted.pending, noted.params, noted.name = True, {}, there.name
    noted.tags = {k: there.tags[k] for k in ours if k in there.tags}
    ended_then = there.ended is None or over is None or round(over * 1000) == round(there.ended * 1000)
    noted.status = there.status if ended_then else None
    noted.artifacts = {name: known for name, known in noted.artifacts.items() if _is_there(name, known, there)}


def _is_there(name: str, known: Mapping[str, Any], there: Stored) -> bool:
    """Whether an artifact is in the store as it was sent: by its size, and its digest where it is on this machine."""
    if there.files.get(name) != known.get("bytes"):
        return False
    path = None if there.folder is None else there.folder / name
    return path is None or (path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == known["sha256"])


def ended(status: RunStatus) -> bool:
    """Whether a run writes no more, so that its copy can be as its record."""
    return status.state in ENDED or status.stale()


def difference(store: Store, run_dir: Path, status: RunStatus) -> str:
    """How the copy of an ended run is not as its record; empty where it is, or where this store has none."""
    state = CopyState(run_dir, f"{status.sweep}/{status.identity}", store.uri, store.experiment)
    run_id = state.store.run_id
    if run_id is None:
        return ""
    later = f"python -m grpo_sweeps.sync sweep={status.sweep} mends it"
    if not store.active(run_id):
        return f"(run {run_id}) is no longer there; {later}"
    path = run_dir / METRICS
    points, there = _points(path.read_bytes() if path.exists() else b"", path), store.history(run_id)
    lost = sum(_place(point) not in there for point in points)
    if names := _contradicting(points, there, ended=True):
        return f"(run {run_id}) has other values than the record ({', '.join(names[:5])}); {later}"
    return f"(run {run_id}) lacks {lost} of {len(points)} points; {later}" if lost else ""


def copy_parent(
    store: Store, sweep_dir: Path, statuses: Sequence[RunStatus], verify: bool = True, whole: bool = False
) -> str:
    """Make or find the sweep's parent run; returns its id. `whole`: compare all of it with what the runs say."""
    sweep = sweep_dir.name
    state = CopyState(sweep_dir, sweep, store.uri, store.experiment)
    first = min(statuses, key=lambda s: s.started or float("inf"))
    of_the_sweep = {
        "grpo_sweeps.record": state.record,
        "grpo_sweeps.kind": "sweep",
        "grpo_sweeps.sweep": sweep,
        **(state.place.tags() if state.place else {}),
    }
    tags = of_the_sweep | {
        "mlflow.user": _user(),
        "command": _tag("command", redact(first.command)),
        "git_commit": first.commit or "",
    }
    if not _locate(store, state, verify, {"grpo_sweeps.kind": "sweep"}):
        _create(store, state, replace(first, name=sweep), tags)
    elif whole:
        _recall(store, state, tags, max(s.ended or s.heartbeat for s in statuses))
        state.store.pending = False  # it has no points
        state.save()  # `finish_parent` reads it again
        _copy_tags(store, state, tags)
    else:  # a job that copies one run knows only that one's command
        _copy_tags(store, state, _known(state)[1].tags | of_the_sweep)
    return _known(state)[0]


def finish_parent(store: Store, sweep_dir: Path, statuses: Sequence[RunStatus]) -> None:
    """Set the parent's status from its runs': RUNNING while one lives, else the worst of them."""
    state = CopyState(sweep_dir, sweep_dir.name, store.uri, store.experiment)
    words = {mlflow_status(s) for s in statuses}
    word = next(w for w in ("RUNNING", "SCHEDULED", "FAILED", "KILLED", "FINISHED") if w in words)
    _set_name_and_status(store, state, plain(sweep_dir.name), word, max(s.ended or s.heartbeat for s in statuses))


def _known(state: CopyState) -> tuple[str, StoreState]:
    if state.store.run_id is None:
        raise AssertionError("the run was located or created before")
    return state.store.run_id, state.store


def _locate(store: Store, state: CopyState, verify: bool, known_by: dict[str, str]) -> bool:
    """True when there is a run to go on with; looks it up by tag when the note has no id or the store lost the run.

    known_by: the tags, beside the place, of the run that it must be where the note itself was lost.
    """
    run_id = state.store.run_id
    if run_id is not None and (not verify or store.active(run_id)):
        return True
    found = store.find("grpo_sweeps.record", state.record) or _of_a_lost_note(store, state, known_by)
    # Nothing is known of what the store has: `pending` has the metrics compared, and the rest is sent again.
    state.store = StoreState(run_id=found, pending=True)
    state.save()  # the record's id is on disk before a run carries it
    return found is not None


def _of_a_lost_note(store: Store, state: CopyState, known_by: dict[str, str]) -> str | None:
    """The run in MLflow that was made from this folder before its note was lost; None where there is none."""
    if state.place is None or any("'" in value for value in known_by.values()):
        return None
    folder = state.path.parent
    sweep = folder.name if known_by["grpo_sweeps.kind"] == "sweep" else folder.parent.name
    for run_id, _, tags in store.find_all({PLACE: state.place.id, **known_by}):
        here = state.place.made(tags) and tags.get("grpo_sweeps.sweep") == sweep and not tags.get(REPLACED_BY)
        if here and (known_by["grpo_sweeps.kind"] == "sweep" or _has_first_point(store, run_id, folder)):
            return run_id
    return None


def _has_first_point(store: Store, run_id: str, run_dir: Path) -> bool:
    """Whether a run in the store begins as the record does, to the millisecond: it is of this run, and of no run that
    was in the folder before."""
    record = growing(run_dir / METRICS)
    first = _points(record.bytes(0)[: 1 + record.bytes(0).find(b"\n")], run_dir / METRICS) if record.size else []
    return bool(first) and (first[0][3], first[0][2]) in store.moments(run_id, first[0][0])


def _create(store: Store, state: CopyState, status: RunStatus, tags: dict[str, str]) -> None:
    name = plain(status.name or status.identity)
    run_id = store.create(name, status.started, tags)
    state.store = StoreState(run_id=run_id, status="RUNNING", name=name, tags=dict(tags))
    state.save()


def _run_tags(status: RunStatus, state: CopyState, parent_id: str) -> dict[str, str]:
    tags = {
        "mlflow.parentRunId": parent_id,
        "mlflow.user": _user(),
        "grpo_sweeps.record": state.record,
        "grpo_sweeps.kind": "run",
        "grpo_sweeps.sweep": status.sweep,
        **(state.place.tags() if state.place else {}),
        "identity": status.identity,
        "git_commit": status.commit or "",
        "git_dirty": "" if status.dirty is None else str(status.dirty).lower(),
        "host": status.host,
        "command": redact(status.command),
        "error": redact(status.error or ""),
        "slurm_job_id": status.job_id or "",
        "stale": "true" if status.stale() else "",
        RECOMPUTED_TAG: recomputed_note(status.notes),
        "mlflow.source.git.commit": status.commit or "",
    }
    tags |= {f"version.{name}": version for name, version in status.versions.items()}
    return {key: _tag(key, value) for key, value in tags.items() if value}


def _tag(key: str, value: str) -> str:
    """A tag's value: plain text, but for names that runs are found by."""
    return (value if key.startswith("grpo_sweeps.") else plain(value))[:TAG_LIMIT]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this user id (containers)
        return ""


def _copy_metrics(store: Store, state: CopyState, run_dir: Path, status: RunStatus, tags: dict[str, str]) -> int:
    record = growing(run_dir / METRICS)
    run_id, noted = _known(state)
    copied = noted.metrics_bytes
    rewritten = copied and not record.starts_with(copied, noted.metrics_sha256)
    added = None if noted.pending or rewritten else _added(record, copied, run_dir / METRICS)
    if added is None:
        points = _points(record.bytes(0), run_dir / METRICS)
        there = store.history(run_id)
        names = _contradicting(points, there, ended(status))
        if names:
            _replace(store, state, status, tags, _why(names, tags))
            return _copy_metrics(store, state, run_dir, status, tags)
        missing = [p for p in points if _place(p) not in there]
        here = {_place(p) for p in points}
        verified = all(
            point in here for point in there
        )  # else the run went back and has not come here again: look again
    else:
        if copied == record.size:
            return 0
        missing, verified = added, True
    if missing:
        noted.pending = True
        state.save()
        store.log_points(run_id, missing)
    record.mark()
    noted.metrics_bytes, noted.metrics_sha256 = record.size, record.digest()
    noted.pending = not verified
    state.save()
    return len(missing)


def _added(record: GrowingFile, copied: int, path: Path) -> list[Point] | None:
    """The points of the lines behind `copied` bytes. None where they say something else of a step that was copied (a
    correction): then all must be compared.

    A step may have several lines (an evaluation and the update after it) that share names, and not all of them need
    be written when the first is copied.
    """
    points = _points(record.bytes(copied), path)
    if not copied or not points:
        return points
    sent = {_place(p): p for p in _points(_lines_from(record, copied, min(step for *_, step in points)), path)}
    known = [(p, sent[_place(p)]) for p in points if _place(p) in sent]
    if any(not _same(new[1], old[1]) and not is_timing(new[0]) for new, old in known):
        return None
    return [p for p in points if _place(p) not in sent]


def _lines_from(record: GrowingFile, end: int, step: int) -> bytes:
    """The last lines before byte `end`, as many as may belong to `step` or a later one."""
    span = TAIL_BYTES
    while True:
        lines = record.bytes(max(0, end - span), end)
        if span >= end:
            return lines
        lines = lines[lines.find(b"\n") + 1 :]
        contents, _ = parse_lines(lines.splitlines())
        first = next(
            (content for content in contents if RECOMPUTED not in content), None
        )  # corrections are in no order
        if first is not None and first["step"] < step:
            return lines
        span *= 2


@functools.cache
def _say_once(sentence: str) -> None:
    show(sentence)


def _points(lines: bytes, path: Path) -> list[Point]:
    """One point per name, as MLflow takes it, and step: the last value, at the time its line was written. Damaged lines
    are left out."""
    points: dict[tuple[str, int], Point] = {}
    contents, faults = parse_lines(lines.splitlines())
    for content in contents:
        step, moment = content.pop("step"), round(content.pop("time") * 1000)
        for name, value in content.items():
            points[clean_key(name), step] = (name, stored_value(number_from_json(value)), moment, step)
    if faults:
        _say_once(left_out(path, faults))
    return list(points.values())


def _place(point: Point) -> tuple[str, int]:
    """Where MLflow holds a point: name and step."""
    return clean_key(point[0]), point[3]


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _contradicting(points: Sequence[Point], there: History, ended: bool) -> list[str]:
    """The metrics, sorted, of which the store holds a value that the record does not, or one point twice.

    A timing counts where it says when it was taken: of a step that ran twice the store may hold the first.
    """
    here = {_place(point): point for point in points}
    names = set()
    for (name, step), stored in there.items():
        if len(stored) > 1:
            names.add(name)
        elif (name, step) not in here:
            if ended:
                names.add(name)
        else:
            _, value, moment, _ = here[name, step]
            if any(not _same(v, value) and (t == moment or not is_timing(name)) for v, t in stored):
                names.add(name)
    return sorted(names)


def _why(names: Sequence[str], tags: dict[str, str]) -> str:
    if RECOMPUTED_TAG in tags and all(name.startswith(("spectral/", "scores/")) for name in names):
        return tags[RECOMPUTED_TAG]
    return f"it differs from the local record ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"


def _replace(store: Store, state: CopyState, status: RunStatus, tags: dict[str, str], why: str) -> None:
    """Replace the known run by a new one; the old one is tagged and deleted (restorably).

    The note is written last: after a kill before that, the next pass finds the new run by the id of the old one.
    """
    old, _ = _known(state)
    name = plain(status.name or status.identity)
    new = store.find(REPLACES, old)
    if new is None:
        new = store.create(name, status.started, tags | {REPLACES: old})
        known = StoreState(run_id=new, status="RUNNING", name=name, tags=dict(tags))
    else:
        known = StoreState(run_id=new, pending=True)
    show(f"{status.sweep}/{status.identity}: run {new} replaces MLflow's run {old}: {why}.")
    store.set_tags(old, {REPLACED_BY: new, "grpo_sweeps.replaced_because": why})
    store.delete(old)
    state.store = known
    state.save()


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """{"trainer": {"lr": 1e-6}} as {"trainer.lr": "1e-06"}; lists as JSON, addresses without credentials."""
    if isinstance(config, dict) and (config or not prefix):
        out: dict[str, str] = {}
        for key, value in config.items():
            out |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return out
    text = json.dumps(config) if isinstance(config, list | dict) else str(config)
    return {prefix: redact(text)}


def _copy_params(store: Store, state: CopyState, run_id: str, run_dir: Path) -> None:
    """Copy the flattened configuration and the names of its choices. A value that changed (a continued run) becomes a
    tag `changed.<key>`."""
    config = read_config(run_dir)
    source = provenance.read(run_dir, with_diff=False) or provenance.Source()
    names = flatten(choice_names(config, source.choices))
    params = {clean_key(k): v[:PARAM_LIMIT] for k, v in (flatten(redact_mapping(config)) | names).items()}
    noted = state.store
    if params == noted.params:
        return
    there = store.params(run_id)
    store.log_params(run_id, {k: v for k, v in params.items() if k not in there})
    store.set_tags(run_id, {f"changed.{k}": v for k, v in params.items() if there.get(k, v) != v})
    noted.params = params
    state.save()


def _copy_artifacts(store: Store, state: CopyState, run_id: str, run_dir: Path, status: RunStatus) -> int:
    """Copy config.yaml and environment.json at once, log.txt and the records (Parquet) once the run has ended."""
    return _send(store, state, run_id, _artifacts(run_dir, status))


def copy_report(store: Store, sweep_dir: Path, report: Path) -> int:
    """Make the files of a report artifacts of the sweep's parent run, which was copied before; how many were sent.

    A folder that holds no report of this sweep brings nothing.
    """
    state = CopyState(sweep_dir, sweep_dir.name, store.uri, store.experiment)
    run_id = state.store.run_id
    files = [report / name for name in files_of_report(report, sweep_dir.name)]
    if run_id is None:
        return 0
    copies = [(path.name, _signature([path]), functools.partial(shutil.copyfile, path)) for path in files]
    return _send(store, state, run_id, copies)


def _send(store: Store, state: CopyState, run_id: str, artifacts: Sequence[Artifact]) -> int:
    """Upload what is new or other than what was noted; how many were."""
    sent = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, signature, build in artifacts:
            noted = state.store.artifacts.get(name, {})
            if noted.get("source") == signature:
                continue
            path = Path(scratch) / name
            build(path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if noted.get("sha256") != digest:
                store.upload(run_id, path)
                sent += 1
            state.store.artifacts[name] = {"source": signature, "sha256": digest, "bytes": path.stat().st_size}
            state.save()
    return sent


def _artifacts(run_dir: Path, status: RunStatus) -> list[Artifact]:
    made_by = {
        k: v for k, v in asdict(status).items() if k in ("commit", "dirty", "versions", "command", "host", "job_id")
    }
    environment = redact(json.dumps(made_by, indent=1, sort_keys=True)) + "\n"
    out: list[Artifact] = [
        (
            "environment.json",
            hashlib.sha256(environment.encode()).hexdigest(),
            lambda path: path.write_text(environment),
        )
    ]
    ended = status.state in ENDED or status.stale()
    for name in (CONFIG, *(["log.txt"] if ended else [])):
        source = run_dir / name
        if source.exists():
            out.append((name, _signature([source]), lambda path, source=source: path.write_text(_redacted(source))))
    for name, table in record_tables(run_dir).items() if ended else ():
        files = sorted(p for p in (run_dir / name).glob("[!.]*") if p.stat().st_size)
        if files:
            out.append((f"{name}.parquet", _signature(files), lambda path, table=table: pq.write_table(table(), path)))
    return out


def _redacted(path: Path) -> str:
    return redact(path.read_text(encoding="utf-8", errors="replace"))


def _signature(files: Sequence[Path]) -> str:
    return " ".join(f"{p.name}:{(s := p.stat()).st_size}:{s.st_mtime_ns}" for p in files)


def _set_name_and_status(store: Store, state: CopyState, name: str, status: str, ended: float | None) -> None:
    run_id, noted = _known(state)
    if noted.name != name:
        store.rename(run_id, name)
    if noted.status != status:
        store.set_status(run_id, status, ended)
    if (noted.name, noted.status) != (name, status):
        noted.name, noted.status = name, status
        state.save()


def read_statuses(sweep_dir: Path, only: str | None = None) -> tuple[list[tuple[Path, RunStatus]], list[str]]:
    """The sweep's runs that have begun, and a sentence for each folder that cannot be read."""
    runs, problems = [], []
    for folder in sorted(p for p in sweep_dir.iterdir() if (p / "status.json").exists()):
        if only is not None and folder.name != only:
            continue
        try:
            status = read_status(folder)
        except ValueError as error:
            problems.append(str(error))
            continue
        if sentence := copied(folder, status):
            problems.append(sentence)
            continue
        # Where the folder lies decides: a status written by hand or copied may name another sweep.
        status = replace(status, sweep=sweep_dir.name, identity=status.identity or folder.name)
        runs.append((folder, status))
    return runs, problems
