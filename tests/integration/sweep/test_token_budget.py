"""`trainer.tokens` from the command line: two arms of different lengths, killed, given again, lost and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_sweeps import verify
from grpo_sweeps.report.__main__ import main as report
from grpo_sweeps.run import main
from grpo_sweeps.sweep.recover import recover
from grpo_sweeps.tracking.status import RunStatus, read_status

pytestmark = pytest.mark.integration
TOKENS = 300
WORDS = ("-m", "R=4", "rollout.max_new_tokens=8,24", "trainer=fixed_policy", f"trainer.tokens={TOKENS}",
         "trainer.steps=20", "trainer.prompts=2", "trainer.eval_every=2", "trainer.eval_problems=2",
         "trainer.eval_samples=2", "sweep=budget", "tracking=local")  # fmt: skip


def statuses(runs: Path) -> dict[str, RunStatus]:
    found = [read_status(file.parent) for file in (runs / "budget").glob("*/status.json")]
    return {status.name: status for status in found}


def test_arms_of_different_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "dry_run=true"]) == 0
    assert "  up to 20  " in capfd.readouterr().out
    assert main(list(WORDS)) == 0
    found = statuses(tmp_path / "runs")
    assert {status.ended_by for status in found.values()} == {"trainer.tokens"}
    assert {status.state for status in found.values()} == {"finished"}
    short, long = (found[f"R=4 seed=0 max_new_tokens={n}"] for n in (8, 24))
    assert short.step == short.total > long.step == long.total >= 2
    err = capfd.readouterr().err
    assert f"step {long.step}/{long.step}  " in err and f"step {short.step}/{short.step}  " in err
    for folder in (tmp_path / "runs" / "budget").glob("*/status.json"):
        lines = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
        sums = [line["sampled_tokens"] for line in lines if "sampled_tokens" in line]
        assert sums[-2] < TOKENS <= sums[-1] and len(sums) == read_status(folder.parent).step
        assert "finished by trainer.tokens=300 after step" in (folder.parent / "log.txt").read_text()
    more = [word.replace("steps=20", "steps=30") for word in WORDS]
    assert main(more) == 0, "more steps make no longer run"
    assert f"finished already ({short.step} steps, by trainer.tokens)" in capfd.readouterr().err
    assert verify.main(["sweep=budget"]) == 0

    lost = next(iter((tmp_path / "runs" / "budget").glob("*/status.json")))
    before = read_status(lost.parent)
    lost.unlink()
    assert recover(lost.parent)
    made = read_status(lost.parent)
    assert (made.state, made.step, made.total, made.ended_by) == ("finished", before.step, before.step, before.ended_by)

    capfd.readouterr()
    assert report(["sweep=budget"]) == 0
    page = (tmp_path / "reports" / "budget" / "index.html").read_text(encoding="utf-8")
    steps = ", ".join(map(str, sorted((short.step, long.step))))
    said = f"The runs differ in their number of steps: {steps}; a budget (trainer.tokens) ended 2 of 2 runs."
    assert said in page and "not whole" not in page and "interrupted" not in page
