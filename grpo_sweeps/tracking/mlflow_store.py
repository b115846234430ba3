"""One MLflow store: opened with short time-outs, errors told apart, batches cut to MLflow's limits.

The only module that imports MLflow, when a store is opened. Telemetry is off.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from grpo_sweeps.redaction import redact
from grpo_sweeps.text import show
from grpo_sweeps.tracking.mlflow_deadline import Late, deadline
from grpo_sweeps.tracking.mlflow_making import make
from grpo_sweeps.tracking.tracker import TrackerError
from grpo_sweeps.types import ConfigError

TIMEOUT = 10  # seconds that a server may be silent
DEADLINE = 30.0  # seconds that one request may take in all, with its second try: a server that drips never is silent
SLOWEST = 100_000  # bytes a second that an upload may go down to
METRICS_PER_BATCH = 1000
ENTRIES_PER_BATCH = 100  # parameters, tags
PARAM_LIMIT = 6000  # characters
TAG_LIMIT = 5000
KEY_LIMIT = 250
PAGE = 1000  # runs of one answer
REPLACED_BY = "grpo_sweeps.replaced_by"  # the tag of a run that another one stands for
LARGEST = 1.7976931348623157e308  # MLflow's infinity
KIND = "mlflow.experimentKind"  # the tag of what an experiment holds: training runs, or traces
TRAINING = "custom_model_development"

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TIMEOUT),
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "glusterfs", "afs"]
)
_BAD_KEY = re.compile(r"[^\w\-. /:]")

Point = tuple[str, float, int, int]  # name, value, time in milliseconds, step
History = dict[tuple[str, int], list[tuple[float, int]]]  # (name, step): value and time of each point there


@dataclass(frozen=True)
class Stored:
    """What a store has of one run: ended in seconds, the artifacts of its top folder with their sizes in bytes, and
    that folder where it is one of this machine."""

    name: str
    status: str
    ended: float | None
    tags: dict[str, str]
    files: dict[str, int]
    folder: Path | None


class StoreError(TrackerError):
    """The store cannot be reached or opened: one sentence."""


class RefusedError(StoreError):
    """The store answered and refused something about one run; other runs may still be copied."""


def check_uri(uri: str) -> None:
    """Raise ConfigError, one sentence, for an address that records cannot be copied to. Opens nothing."""
    allowed = "allowed are sqlite:///FILE, http://HOST:PORT, https://HOST:PORT and MLflow's other databases."
    try:
        parts = urlsplit(uri)
        scheme, host, _ = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"uri={redact(uri)}: it is no address ({error}); {allowed}") from error
    if scheme in ("", "file"):
        raise ConfigError(f"uri={redact(uri)}: MLflow no longer writes to a folder; {allowed}")
    if scheme not in ("http", "https") and scheme.partition("+")[0] not in DATABASES:
        raise ConfigError(f"uri={redact(uri)}: {scheme}:// is not understood; {allowed}")
    if scheme == "sqlite" and not uri.removeprefix("sqlite:///").strip("/"):
        raise ConfigError(f"uri={redact(uri)}: it names no file; {allowed}")
    if scheme == "sqlite" and not uri.startswith("sqlite:///"):
        raise ConfigError(f"uri={redact(uri)}: three slashes stand before the file; {allowed}")
    if scheme in ("http", "https") and not host:
        raise ConfigError(f"uri={redact(uri)}: it names no host; {allowed}")


def resolve_uri(uri: str | None) -> str:
    """`uri`, or MLFLOW_TRACKING_URI, or SQLite in the working directory; a relative SQLite path is made absolute.

    Raises ConfigError as `check_uri` does.
    """
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    check_uri(uri)
    path = sqlite_path(uri)
    return uri if path is None else f"sqlite:///{path.absolute()}"


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite store, None for another store."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that `path` lies on, None for a local one. `mounts`: /proc/mounts' text."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None  # not Linux: nothing to go by
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, point, this, *_ = line.split()
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), this
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def clean_key(key: str) -> str:
    """The key as a name that MLflow accepts: letters, digits, _ - . space / :, at most 250 characters."""
    return _BAD_KEY.sub("_", key)[:KEY_LIMIT]


def stored_value(value: float) -> float:
    """The value as MLflow gives it back: infinities become the largest float."""
    return math.copysign(LARGEST, value) if math.isinf(value) else float(value)


def import_mlflow(uri: str) -> None:
    """Import what a store of this address needs: seconds, a minute on a busy machine. Whoever opens a store under a
    lock does this first. Raises StoreError."""
    os.environ.update(_ENVIRONMENT)
    try:
        importlib.import_module("mlflow.tracking")
        if sqlite_path(uri) is not None:
            importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    except ImportError as error:
        raise StoreError(f"mlflow cannot be imported here ({error}).") from error


class Store:
    """An experiment of an MLflow store. Raises StoreError when it cannot be reached, RefusedError when it says no."""

    def __init__(self, uri: str, experiment: str, restore: bool = False) -> None:
        """restore: an experiment that was deleted in MLflow is restored, which without it is a StoreError."""
        self.uri, self.experiment, self._restore = uri, experiment, restore
        _probe(uri)
        _check_database_file(uri)
        import_mlflow(uri)
        from mlflow.entities import ViewType
        from mlflow.tracking import MlflowClient

        for name in ("alembic", "mlflow.store.db.utils", "mlflow.store.tracking.sqlalchemy_store"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._active = ViewType.ACTIVE_ONLY
        path = sqlite_path(uri)
        if path is not None and (kind := network_file_system(path.resolve())):
            show(
                f"mirror: {path} lies on {kind}, where SQLite is unsafe; set tracking.uri to a local file or a server."
            )
        with self._errors(opening=True):
            if path is not None:
                make(path)
            self.client = MlflowClient(tracking_uri=uri)
            self.experiment_id = self._experiment_id()

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            path = sqlite_path(self.uri)
            # Beside the database. A server places its artifacts itself.
            place = None if path is None else (path.parent / "mlartifacts" / clean_key(self.experiment)).as_uri()
            try:
                return self.client.create_experiment(self.experiment, artifact_location=place, tags={KIND: TRAINING})
            except MlflowException as error:  # another process has made it since
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(self.experiment)
                assert found is not None
        if found.lifecycle_stage != "active":
            if self._restore:
                self._restored(found.experiment_id)
                return found.experiment_id
            raise StoreError(
                f"experiment {self.experiment!r} is deleted in {redact(self.uri)}: restore it "
                f"(python -m grpo_sweeps.sync, or mlflow experiments restore -x {found.experiment_id}) or set "
                f"tracking.experiment to another name."
            )
        if KIND not in found.tags:  # made by an older version; who chose a kind keeps it
            self.client.set_experiment_tag(found.experiment_id, KIND, TRAINING)
        return found.experiment_id

    def _restored(self, experiment_id: str) -> None:
        """Restore the experiment. MLflow brings all its runs back, so those that others replaced are deleted again."""
        self.client.restore_experiment(experiment_id)
        show(f"experiment {self.experiment!r} was deleted in {redact(self.uri)} and is restored.")
        for run in self._search([experiment_id], f"tags.`{REPLACED_BY}` != ''"):
            self.client.delete_run(run.info.run_id)

    def _search(self, experiment_ids: Sequence[str], condition: str) -> list[Any]:
        """MLflow's runs, not deleted, that meet a condition in its language; all of them, page by page."""
        found: list[Any] = []
        token = None
        while True:
            with self._errors():
                page = self.client.search_runs(
                    list(experiment_ids), condition, self._active, max_results=PAGE, page_token=token
                )
            found += page
            if not (token := page.token):
                return found

    @contextlib.contextmanager
    def _errors(self, opening: bool = False, seconds: float | None = None) -> Iterator[None]:
        """Tell errors apart, and end a request to a server after DEADLINE (or `seconds`)."""
        import requests
        from mlflow.exceptions import MlflowException

        limit = (DEADLINE if seconds is None else seconds) if self.uri.startswith(("http://", "https://")) else None
        try:
            with deadline(limit):
                yield
        except StoreError:
            raise
        except Late as error:
            raise StoreError(f"{redact(self.uri)} has not answered a request in {limit:g} s.") from error
        except MlflowException as error:
            line = redact(str(error).strip().splitlines()[0][:300])
            if opening or line.startswith("API request to") or error.error_code == "TEMPORARILY_UNAVAILABLE":
                raise StoreError(f"{redact(self.uri)}: {line}") from error
            raise RefusedError(line) from error
        except (requests.RequestException, ConnectionError, TimeoutError) as error:
            raise StoreError(f"{redact(self.uri)} does not answer: {redact(str(error))[:300]}") from error
        except Exception as error:  # a database's driver: missing, or with errors of its own
            line = redact(" ".join(str(error).split())[:300])
            if opening:
                raise StoreError(f"uri={redact(self.uri)} cannot be opened: {line}") from error
            if not type(error).__module__.startswith("sqlalchemy."):
                raise
            raise StoreError(f"{redact(self.uri)} cannot be used: {line}") from error  # locked, gone, read-only

    def find(self, tag: str, value: str) -> str | None:
        """The id of the run, not deleted and not replaced, whose tag has this value."""
        found = self.find_all({tag: value})
        return next((run_id for run_id, _, tags in found if not tags.get(REPLACED_BY)), None)

    def find_all(self, tags: Mapping[str, str]) -> list[tuple[str, str, dict[str, str]]]:
        """(id, name, tags) of the runs, not deleted, whose tags have these values (which hold no quotation mark)."""
        condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = self._search([self.experiment_id], condition)
        return [(run.info.run_id, run.info.run_name, dict(run.data.tags)) for run in found]

    def read(self, run_id: str) -> Stored:
        """What the store has of a run beside its points."""
        with self._errors():
            run = self.client.get_run(run_id)
        with self._errors():
            files = {file.path: file.file_size for file in self.client.list_artifacts(run_id) if not file.is_dir}
        ended = None if run.info.end_time is None else run.info.end_time / 1000
        uri = str(run.info.artifact_uri)
        folder = Path(unquote(urlsplit(uri).path)) if uri.startswith("file://") else None
        return Stored(run.info.run_name, run.info.status, ended, dict(run.data.tags), files, folder)

    def moments(self, run_id: str, name: str) -> set[tuple[int, int]]:
        """(step, time in milliseconds) of the points of one metric."""
        with self._errors():
            return {(m.step, m.timestamp) for m in self.client.get_metric_history(run_id, clean_key(name))}

    def active(self, run_id: str) -> bool:
        """True when the store still has this run."""
        from mlflow.exceptions import MlflowException

        with self._errors():
            try:
                return self.client.get_run(run_id).info.lifecycle_stage == "active"
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return False
                raise

    def create(self, name: str, started: float | None, tags: Mapping[str, str]) -> str:
        """Create a run, RUNNING since `started` (seconds)."""
        with self._errors():
            run = self.client.create_run(
                self.experiment_id, start_time=_milliseconds(started), tags=_cut(tags, TAG_LIMIT), run_name=name
            )
        return run.info.run_id

    def delete(self, run_id: str) -> None:
        """Delete in MLflow's sense: `mlflow runs restore` brings it back."""
        with self._errors():
            self.client.delete_run(run_id)

    def rename(self, run_id: str, name: str) -> None:
        with self._errors():
            self.client.update_run(run_id, name=name)

    def set_status(self, run_id: str, status: str, ended: float | None) -> None:
        """Set RUNNING, SCHEDULED, FINISHED, FAILED or KILLED; the last three with their time (seconds)."""
        with self._errors():
            if status in ("RUNNING", "SCHEDULED"):
                self.client.update_run(run_id, status=status)
            else:
                self.client.set_terminated(run_id, status, end_time=_milliseconds(ended))

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Send metrics, a thousand at a time."""
        from mlflow.entities import Metric

        for start in range(0, len(points), METRICS_PER_BATCH):
            batch = [Metric(clean_key(k), v, t, s) for k, v, t, s in points[start : start + METRICS_PER_BATCH]]
            with self._errors():
                self.client.log_batch(run_id, metrics=batch)

    def history(self, run_id: str) -> History:
        """Every metric point that the store has."""
        out: History = {}
        with self._errors():
            keys = list(self.client.get_run(run_id).data.metrics)
        for key in keys:
            with self._errors():
                metrics = self.client.get_metric_history(run_id, key)
            for metric in metrics:
                out.setdefault((key, metric.step), []).append((metric.value, metric.timestamp))
        return out

    def params(self, run_id: str) -> dict[str, str]:
        """The run's parameters."""
        with self._errors():
            return dict(self.client.get_run(run_id).data.params)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Send parameters that the run does not have yet (MLflow refuses to change one)."""
        from mlflow.entities import Param

        items = [Param(k, v) for k, v in _cut(params, PARAM_LIMIT).items()]
        for start in range(0, len(items), ENTRIES_PER_BATCH):
            with self._errors():
                self.client.log_batch(run_id, params=items[start : start + ENTRIES_PER_BATCH])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Send tags, new or changed."""
        from mlflow.entities import RunTag

        items = [RunTag(k, v) for k, v in _cut(tags, TAG_LIMIT).items()]
        for start in range(0, len(items), ENTRIES_PER_BATCH):
            with self._errors():
                self.client.log_batch(run_id, tags=items[start : start + ENTRIES_PER_BATCH])

    def upload(self, run_id: str, path: Path) -> None:
        """Send one artifact to the run's top folder, named like the file; one of the same name is replaced."""
        with self._errors(seconds=DEADLINE + path.stat().st_size / SLOWEST):
            self.client.log_artifact(run_id, str(path))


def _probe(uri: str) -> None:
    """Fail within seconds when nobody listens at a server's address (not tried through a proxy)."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=5).close()
    except OSError as error:
        raise StoreError(f"nobody answers at {redact(uri)} ({error}).") from error


def _check_database_file(uri: str) -> None:
    """Fail before MLflow does, which tries a file that is no database several times."""
    path = sqlite_path(uri)
    if path is None or not path.exists():
        return
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise StoreError(f"uri={redact(uri)}: the file cannot be opened ({error.strerror}).") from error
    if head and head != b"SQLite format 3\0":
        raise StoreError(f"uri={redact(uri)}: the file is no SQLite database.")


def _cut(entries: Mapping[str, Any], limit: int) -> dict[str, str]:
    return {clean_key(key): str(value)[:limit] for key, value in entries.items()}


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
