"""mlflow.json in a run's (and a sweep's) folder: what of it has been copied, to which store; and the locks of copying.

    {"record": id,                     made once, before anything is created in MLflow, and kept as a tag there
     "stores": {"<uri> <experiment>": {"run_id", "metrics_bytes", "metrics_sha256", "pending", ...}}}

`record` is how a run is found again in MLflow when this file was not written in time (a kill between creating the run
and noting its id) and how nobody else's run is ever touched. Removing the file makes the next copy a fresh one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo_sweeps.tracking.atomic import write_text
from grpo_sweeps.tracking.provenance import redact

FILE_NAME = "mlflow.json"
LOCK_NAME = ".mlflow.lock"


@dataclass
class StoreState:
    """What one store has of one run (or of a sweep's parent run)."""

    run_id: str | None = None
    metrics_bytes: int = 0  # of metrics.jsonl, whole lines
    metrics_sha256: str = ""  # of those bytes: another digest means that the run went back behind them
    pending: bool = False  # a batch was on its way, or the store has points that are not verified yet
    status: str | None = None
    name: str | None = None
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, dict[str, str]] = field(default_factory=dict)  # name -> {"source": signature, "sha256"}


class CopyState:
    """The file mlflow.json of `folder`, for one store. `owner` (sweep/identity) tells a copied folder."""

    def __init__(self, folder: Path, owner: str, uri: str, experiment: str) -> None:
        self.path = folder / FILE_NAME
        self.key = f"{redact(uri)} {experiment}"
        self._content = self._read(owner)
        known = {f.name for f in fields(StoreState)}
        stored = self._content["stores"].get(self.key, {})
        self.store = StoreState(**{k: v for k, v in stored.items() if k in known})

    @property
    def record(self) -> str:
        return self._content["record"]

    def _read(self, owner: str) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["owner"] == owner and isinstance(content["record"], str) and isinstance(content["stores"], dict):
                return content
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            print(f"{self.path} is damaged: a fresh copy is made.", flush=True)
        return {"record": uuid.uuid4().hex, "owner": owner, "stores": {}}

    def save(self) -> None:
        """Write the file, atomically."""
        self._content["stores"][self.key] = asdict(self.store)
        write_text(self.path, json.dumps(self._content, indent=1) + "\n")


@contextlib.contextmanager
def locked(path: Path, wait: float) -> Iterator[bool]:
    """Hold an exclusive lock on `path` (made when missing); yields False when another process kept it for `wait`
    seconds.

    The system frees the lock when its holder dies. A file system without locks yields True: there, one copying
    process at a time is the user's care.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.1)
                continue
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            break
        yield True
    finally:
        os.close(descriptor)
