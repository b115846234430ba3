"""Addresses of stores, what is said when nobody is there, and the flattening of configurations."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from grpo_sweeps import sync
from grpo_sweeps.tracking.mlflow_copy import flatten
from grpo_sweeps.tracking.mlflow_store import Store, StoreError, clean_key, network_file_system, resolve_uri
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import ConfigError

pytestmark = pytest.mark.integration


def test_addresses_of_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve_uri("sqlite:////abs/x.db") == "sqlite:////abs/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert resolve_uri(None) == "http://127.0.0.1:5000"
    for folder in ("mlruns", "file:///x/mlruns"):
        with pytest.raises(ConfigError, match="no longer writes to a folder"):
            resolve_uri(folder)


def test_flatten() -> None:
    config = {"a": {"b": {"c": 1, "d": None}, "e": []}, "f": [1, "x"], "g": {}, "h": True}
    assert flatten(config) == {"a.b.c": "1", "a.b.d": "None", "a.e": "[]", "f": '[1, "x"]', "g": "{}", "h": "True"}
    assert flatten({}) == {}


def test_nobody_at_the_server_is_one_sentence_within_seconds(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "study" / "0"
    run.mkdir(parents=True)
    write_status(run, RunStatus("finished", "0"))
    started = time.monotonic()
    assert sync.main(["sweep=study", "uri=http://ann:s3cret@127.0.0.1:9", "experiment=x"]) == 1
    assert time.monotonic() - started < 5
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nobody answers" in error and "s3cret" not in error
    with pytest.raises(StoreError):
        Store("http://127.0.0.1:9", "x")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_sqlite_on_a_network_file_system_is_known() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/ann/scratch tmpfs rw 0 0\n"
    assert network_file_system(Path("/home/ann/mlflow.db"), mounts) == "nfs4"
    assert network_file_system(Path("/home/ann/scratch/mlflow.db"), mounts) is None
    assert network_file_system(Path("/homes/mlflow.db"), mounts) is None


def test_names_that_mlflow_takes() -> None:
    assert clean_key("spectral/top1_fraction") == "spectral/top1_fraction"
    assert clean_key("a[0]=é\n") == "a_0__é_" and len(clean_key("x" * 999)) == 250
