"""A tracking server over PostgreSQL: jobs that copy at the same time, the server killed and started again, `sync`."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_sweeps import sync
from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.tracking.mirror import Follower
from tests.integration.test_mlflow_follower import free_port, runs_in, server, write_run

pytestmark = pytest.mark.integration


def _programs() -> Path | None:
    """Debian keeps them out of PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The address of a fresh PostgreSQL, started for these tests alone."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed here (apt-get install postgresql)")
    if find_spec("psycopg2") is None:
        pytest.skip("psycopg2 is not installed here (pip install psycopg2-binary)")
    as_user: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="grpo-sweeps-postgres-"))
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        if shutil.which("runuser") is None or subprocess.run(["id", "postgres"], capture_output=True).returncode:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres to run it as")
        as_user = ["runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres")
    user, port = "postgres" if as_user else getpass.getuser(), free_port()
    data, options = folder / "data", f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"

    def control(program: str, *words: str) -> None:
        subprocess.run([*as_user, str(programs / program), *words], check=True, cwd=folder, capture_output=True)

    control("initdb", "-D", str(data), "-A", "trust", "-U", user)
    control("pg_ctl", "-D", str(data), "-w", "-o", options, "-l", str(folder / "log"), "start")
    try:
        yield f"postgresql+psycopg2://{user}@127.0.0.1:{port}/postgres"
    finally:
        control("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(folder)


def test_jobs_copy_at_once_and_sync_completes_what_a_dead_server_missed(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    tracking = TrackingConfig(uri=f"http://127.0.0.1:{port}")
    names = ["1", "2", "3"]
    followers = [Follower("study", "runs", tracking, tmp_path / f"log-{n}", run=n, wait=30.0) for n in names]
    with server(tmp_path, port, database):
        for follower in followers:
            follower.__enter__()
        for name in names:
            write_run(tmp_path / "runs" / "study" / name, steps=5)
        for follower in followers:
            follower.__exit__(None)
        expected = {f"R={n}": ("FINISHED", [float(s) for s in range(5)]) for n in names}
        assert runs_in(tracking.uri) == {"study": ("FINISHED", []), **expected}
    write_run(tmp_path / "runs" / "study" / "4", steps=4)
    assert sync.main(["sweep=study", f"uri={tracking.uri}"]) == 1  # nobody answers
    with server(tmp_path, port, database):
        assert sync.main(["sweep=study", f"uri={tracking.uri}"]) == 0
        first = runs_in(tracking.uri)
        assert first == {"study": ("FINISHED", []), **expected, "R=4": ("FINISHED", [0.0, 1.0, 2.0, 3.0])}
        capsys.readouterr()
        assert sync.main(["sweep=study", f"uri={tracking.uri}"]) == 0
        assert runs_in(tracking.uri) == first
        assert "4 runs, 0 points and 0 files new" in capsys.readouterr().out


def test_the_database_itself_is_a_store(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "direct" / "1", steps=3)
    words = ["sweep=direct", f"uri={database}", "experiment=direct"]
    assert sync.main(words) == 0 and sync.main(words) == 0
    assert runs_in(database, "direct") == {"direct": ("FINISHED", []), "R=1": ("FINISHED", [0.0, 1.0, 2.0])}
    assert "1 run, 0 points and 0 files new" in capsys.readouterr().out.splitlines()[-1]
