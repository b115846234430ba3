"""python -m grpo_sweeps.status: the table, JSON, stale runs, errors."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.status import collect, main
from grpo_sweeps.tracking.status import RunStatus, write_status

DEAD = 2**22 + 1


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A sweep with a run of each kind."""
    import os

    now, host = time.time(), socket.gethostname()
    kinds: dict[str, dict[str, Any]] = {
        "R=2 seed=0": {"state": "finished", "step": 4},
        "R=4 seed=0": {"state": "running", "step": 2, "pid": os.getpid()},
        "R=8 seed=0": {"state": "running", "step": 1, "pid": DEAD},
        "R=16 seed=0": {"state": "queued", "step": 0, "pid": DEAD},
        "R=32 seed=0": {"state": "failed", "step": 0, "error": "RuntimeError: \x1b[31mboom"},
    }
    for index, (name, fields) in enumerate(kinds.items()):
        run_dir = tmp_path / "mine" / f"id{index}"
        run_dir.mkdir(parents=True)
        write_status(run_dir, RunStatus(name=name, sweep="mine", total=4, host=host, heartbeat=now, **fields))
        lines = [{"step": step, "time": 10.0 * step, "reward": 0.25 * step, "spectral/effective_rank": 1.0 + step}
                 for step in range(fields["step"])]  # fmt: skip
        lines.append({"step": fields["step"], "time": 99.0, "eval/accuracy": 0.1})
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "rew')
    (tmp_path / "mine" / "broken").mkdir()
    (tmp_path / "mine" / "broken" / "status.json").write_text("{")
    return tmp_path


def test_rows(runs: Path) -> None:
    rows = {row.name or row.identity: row for row in collect(runs, "mine")}
    assert {name: row.state for name, row in rows.items()} == {
        "R=2 seed=0": "finished", "R=4 seed=0": "running", "R=8 seed=0": "interrupted", "R=16 seed=0": "not started",
        "R=32 seed=0": "failed", "broken": "unreadable",
    }  # fmt: skip
    assert rows["R=4 seed=0"].reward == 0.25 and rows["R=4 seed=0"].effective_rank == 2.0
    assert rows["R=4 seed=0"].left_s == pytest.approx(20.0)  # two steps left at ten seconds each
    assert rows["R=2 seed=0"].left_s is None
    assert rows["R=16 seed=0"].reward is None
    assert list(rows)[:3] == ["R=2 seed=0", "R=4 seed=0", "R=8 seed=0"]


def test_table_and_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"runs_dir={runs}"]) == 0
    text = capsys.readouterr().out
    assert "sweep mine: 6 runs" in text and "1 not started" in text and str(runs / "mine" / "id0" / "log.txt") in text
    assert main([f"runs_dir={runs}", "sweep=mine", "json=true"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 6 and {row["total"] for row in rows} == {0, 4}


def test_terminal_table_hides_control_characters(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from grpo_sweeps.status import _print_rich

    _print_rich(collect(runs))
    assert "\x1b[31m" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runs_dir=/nowhere"], "runs_dir=/nowhere: no such folder"),
        (["sweep=other"], "sweep=other: not in"),
        (["sweeps=mine"], "sweeps=mine: not understood; allowed are sweep=NAME"),
        (["json=yes"], "json=yes: true or false is expected"),
    ],
)
def test_errors_are_one_sentence(
    runs: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"runs_dir={runs}", *words]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_heavy_packages_stay_out(runs: Path) -> None:
    program = (
        "import sys; from grpo_sweeps.status import main; code = main([sys.argv[1]]); "
        "print(code, sorted({'torch', 'mlflow', 'pandas', 'hydra'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program, f"runs_dir={runs}"], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
