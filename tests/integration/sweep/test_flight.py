"""The flight check, and six planted faults: each named by `check`, by the run's status and log, and by the report."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps import check, run
from grpo_sweeps.models import tiny_path
from grpo_sweeps.report.__main__ import main as report
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.remarks import wrong
from grpo_sweeps.sweep import flight, preflight
from grpo_sweeps.sweep.ledger import Decision
from grpo_sweeps.sweep.plan import Plan, PlannedRun
from grpo_sweeps.tracking.status import RunStatus, read_status
from tests.composing import run_config

pytestmark = pytest.mark.integration

PLANTED = """
def never(completion, problem, seed):
    return 0.0

def centred(rewards_GR):
    return rewards_GR - rewards_GR.mean(dim=1, keepdim=True)

def odd(completion, problem, seed):
    return float(seed % 2)

def broken(completion, problem, seed):
    raise ZeroDivisionError("my reward divides by 0")
"""
BASE = (
    "tracking=local", "trainer.device=cpu", "trainer.steps=2", "trainer.prompts=2", "trainer.eval_every=0", "R=2",
    "reward=custom", "reward._target_=planted.odd", "seed=1",
)  # fmt: skip
LIMIT = "rollout.max_new_tokens=8"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory beside a module of planted functions and a folder for what is temporary."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    for name in ("temporary", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def left(place: Path) -> list[str]:
    """What the check left behind; torch has a cache of its own among what is temporary."""
    return [p.name for p in (place / "here").iterdir()] + [p.name for p in (place / "temporary").glob("grpo*")]


def tiny_with(folder: Path, change: Callable[[Path], None]) -> str:
    """A copy of the embedded model with one thing changed; its path."""
    shutil.copytree(tiny_path(), folder)
    change(folder)
    return str(folder)


def _other_end(folder: Path) -> None:
    """Says that "~" ends a completion, which the model was never taught to write."""
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("~")
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {"eos_token_id": end}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "~"}))


def _not_a_number(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def fault(name: str, place: Path) -> tuple[list[str], str]:
    """(overrides that plant it, the words that name it)"""
    model = place / "model"
    plant: dict[str, Callable[[], tuple[list[str], str]]] = {
        "reward 0": lambda: (["reward._target_=planted.never", LIMIT], "every reward is 0 (reward planted.never, 8"),
        "limit": lambda: (
            ["reward=exact_match", LIMIT],
            "100% of 8 completions are cut at rollout.max_new_tokens=8 (none ended",
        ),
        "no end token": lambda: (
            [f"model.path={tiny_with(model, _other_end)}", "rollout.max_new_tokens=64", "task.stop=[]"],
            "none of 8 completions drew an end token or a stop string within rollout.max_new_tokens=64",
        ),
        "equal answers": lambda: (["rollout.temperature=0.01"], "all 2 rollouts are the same text"),
        "one rollout": lambda: (
            ["R=1", LIMIT, "estimator._target_=planted.centred", "trainer.prompts=4"], "R=1: a group of one rollout",
        ),
        "not finite": lambda: (
            [f"model.path={tiny_with(model, _not_a_number)}"],
            "the weights model.layers.1.mlp.up_proj.weight hold values that are not finite",
        ),
    }  # fmt: skip
    return plant[name]()


def words_for(overrides: list[str]) -> list[str]:
    """The base less what the overrides say."""
    keys = {word.partition("=")[0] for word in overrides}
    keys |= {"reward._target_"} if "reward" in keys else set()
    return [word for word in BASE if word.partition("=")[0] not in keys] + overrides


FAULTS = ("reward 0", "limit", "no end token", "equal answers", "one rollout", "not finite")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_all_three(name: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides, words = fault(name, place)
    command = words_for(overrides)
    assert check.main(command) == 1
    page = " ".join(capfd.readouterr().out.split())
    assert words in page.partition("What looks wrong")[2]
    assert left(place) == []

    code = run.main(command)
    (run_dir,) = Path("runs/adhoc").glob("*/")
    status = read_status(run_dir)
    said = " ".join([*status.notes, status.error or ""])
    assert words in said and words in (run_dir / "log.txt").read_text()
    assert (code, status.state) == ((2, "failed") if name == "not finite" else (0, "finished"))

    sweep = load_sweep("adhoc", "runs", keep_parts=False)
    lines = wrong(sweep)
    assert any(words in line for line in lines)


def test_one_rollout_under_a_known_baseline_is_a_bad_command(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for main in (check.main, run.main):
        assert main(["R=1", "tracking=local"]) == 2
        assert "R=1: the baseline of estimator=grpo needs at least R=2" in capfd.readouterr().err
    assert left(place) == []


def test_check_of_a_good_run(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in BASE if not word.startswith("trainer.prompts=")]
    assert check.main([*words, "trainer.prompts=4"]) == 0
    out = capfd.readouterr().out
    lines = out.splitlines()
    assert "Nothing looks wrong." in out and len(lines) <= 60 and max(map(len, lines)) <= 100
    for part in ("sample", "backward", "update", "new tokens/s", "memory", "mixed", "null", "expected", "disk"):
        assert part in out
    assert "step 1    step 2" in out and "before the first update (8 rollouts of 4 prompts)" in " ".join(out.split())
    assert left(place) == [], "no folder of runs, no store, no temporary folder"


def test_the_page_tells_what_is_free_and_what_the_checkpoints_take(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tuple(planned(place, R=R) for R in ("2", "4"))
    plan = Plan(runs, tuple(run.identity for run in runs))
    monkeypatch.setattr(preflight, "free_bytes", lambda runs_dir: 5_000_000_000)
    one = preflight.checkpoint_bytes(runs[0].config, preflight.model_folder(runs[0].config.model))
    kept = runs[0].config.trainer.keep_checkpoints + 1
    assert one > 0
    line = " ".join(" ".join(flight.disk(plan)).split())
    assert line.startswith("disk ") and "runs_dir=runs: 5.0 GB are free" in line
    assert (
        f"checkpoints of one run take about {one * kept / 1e9:.3g} GB, of all 2 runs {2 * one * kept / 1e9:.3g}" in line
    )
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda config, folder: 0)
    line = " ".join(" ".join(flight.disk(plan)).split())
    assert line.endswith("5.0 GB are free; what the checkpoints take is not known")


def planned(place: Path, **changes: Any) -> PlannedRun:
    words = [word for word in BASE if word.partition("=")[0] not in changes]
    config = run_config(*words, *(f"{key}={value}" for key, value in changes.items()))
    return PlannedRun(config, "0" * 12, f"R={config.R}", place / "nowhere", Decision("start", "new"))


def test_the_second_step_goes_on_from_the_checkpoint(place: Path) -> None:
    """Its numbers are those of two steps without a stop."""
    from grpo_sweeps.loop.train import train
    from grpo_sweeps.tracking.local import read_metrics

    planned_run = planned(place)
    flown = flight.take_off(planned_run, place / "temporary")
    assert [len(flown.rows), flown.failure, len(flown.walls)] == [2, "", 2]
    (log,) = (place / "temporary").rglob("log.txt")
    assert log.read_text().count("starts on") == 2 and "stopped after step 1" in log.read_text()
    train(flight.checked(planned_run.config, place), place / "whole")
    whole = read_metrics(place / "whole")
    for name in ("reward", "entropy", "grad_norm", "spectral/effective_rank", "completions/mean_length"):
        assert [row[name] for row in flown.rows] == whole[name].tolist()


def test_only_the_checkpoint_that_is_read_is_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes for a real model: the second step, from which nobody goes on, leaves none."""
    from grpo_sweeps.engine import checkpoint

    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda folder, step, *a, **k: saved.append(step) or save(folder, step, *a, **k)
    )
    flown = flight.take_off(planned(place, **{"trainer.steps": 5}), place / "temporary")
    assert (saved, flown.failure, len(flown.rows)) == ([1], "", 2)


def test_a_checkpoint_that_is_not_found_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_sweeps.engine import checkpoint

    monkeypatch.setattr(checkpoint, "latest", lambda *_, **__: None)
    flown = flight.take_off(planned(place, **{"rollout.max_new_tokens": 4}), place / "temporary")
    assert flown.wrong[0] == "the run failed in resuming: it stands at step 1 after 2 steps"


def test_a_failure_names_the_part(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = words_for(["reward._target_=planted.broken", LIMIT])
    assert check.main(command) == 1
    page = " ".join(capfd.readouterr().out.split())
    assert "the run failed in the reward: ZeroDivisionError: my reward divides by 0" in page
    assert "my reward divides by 0 (reward planted.broken failed on rollout 0 of problem arithmetic-" in page
    assert left(place) == []


def test_the_heaviest_run_of_a_sweep(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", "R=2,4", "trainer.prompts=2,1", *BASE[:3], *BASE[4:5], *BASE[6:], LIMIT]
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=1"]
    for words in (sweep, [*sweep, *launcher]):
        check.main(words)
        out = " ".join(capfd.readouterr().out.split())
        assert "Flight check of R=4 seed=1 prompts=2, the heaviest of 4 runs" in out
        assert "all 4 runs" in out and ("GPU-hours" in out) == (words is not sweep)
        assert "up to" not in out
    assert left(place) == []


def test_a_budget_of_tokens_makes_every_count_a_most(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluated = ("trainer.eval_every=1", "trainer.eval_problems=2", "trainer.eval_samples=1")
    check.main(["-m", "trainer.tokens=100", "trainer.prompts=2,1", *BASE[:3], *evaluated, *BASE[5:], LIMIT])
    out = " ".join(capfd.readouterr().out.split())
    assert re.search(r"expected this run up to [^:]+: [^,:]+ before its first step, up to 2 steps of", out)
    assert "s, up to 3 evaluations of" in out and "; all 2 runs up to" in out


def test_heaviest_weighs_rollouts_limit_and_model(place: Path) -> None:
    runs = [planned(place, R=R, **{"rollout.max_new_tokens": n}) for R, n in ((2, 8), (4, 8), (2, 24))]
    assert flight.heaviest(runs) is runs[2] and flight.heaviest(runs[:2]) is runs[1]
    hub = planned(place, **{"model.path": "owner/not_here", "rollout.max_new_tokens": 32})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight.preflight, "model_folder", lambda model: None if "owner" in model.path else tiny_path())
        assert flight.heaviest([*runs, hub]) is hub


def test_bad_commands(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["dry_run=true", "tracking=local"], "dry_run=true: grpo_sweeps.check tries a run"),
        (["trainer.lrr=1"], "trainer.lrr=1: no such key; did you mean trainer.lr?"),
        (["R=2,4"], "add -m"),
    ):
        assert check.main(words) == 2
        assert says in capfd.readouterr().err
    assert check.main(["--help"]) == 0
    assert "dry_run=true" in capfd.readouterr().out
    assert run.main(["--help"]) == 0
    assert "python -m grpo_sweeps.check" in capfd.readouterr().out
    assert left(place) == []


def test_failed_part_is_the_innermost_of_the_last_traceback() -> None:
    frame = '  File "x.py", line 3, in {}\n    call()\n'
    trace = "Traceback (most recent call last):\n"
    log = trace + frame.format("save") + "\n" + trace + "".join(map(frame.format, ("prepare", "load_policy", "inner")))
    assert flight.failed_part(log) == "loading the model"
    assert flight.failed_part("no traceback") == ""


def test_a_report_begins_with_it_in_one_line_an_arm(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["-m", "seed=1,2", "reward._target_=planted.never", LIMIT]
    assert run.main(words_for(command)) == 0
    capfd.readouterr()
    sweep = load_sweep("adhoc", "runs", keep_parts=False)
    lines = wrong(sweep)
    (zero,) = [line for line in lines if "every reward is 0" in line]
    assert zero.startswith("R=2 seed=1") and " and 1 more of 2 runs (numbers of the first): every reward is 0" in zero
    assert report(["sweep=adhoc"]) == 0
    assert capfd.readouterr().out.startswith(f"looks wrong: {lines[0]}")
    page = Path("reports/adhoc/index.html").read_text()
    box = page.index('<h2 id="wrong">What looks wrong</h2>')
    assert box < page.index("<nav") and box < page.index('id="table"') and "every reward is 0 (reward planted" in page
    monkeypatch.setattr("grpo_sweeps.report.build.wrong", lambda sweep: ["<script>"])
    assert report(["sweep=adhoc"]) == 0 and "<li>&lt;script&gt;</li>" in Path("reports/adhoc/index.html").read_text()
    monkeypatch.setattr("grpo_sweeps.report.build.wrong", lambda sweep: [])
    assert report(["sweep=adhoc"]) == 0 and 'id="wrong"' not in Path("reports/adhoc/index.html").read_text()


def test_a_resumed_run_does_not_say_it_again(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = words_for(["reward._target_=planted.never", LIMIT])
    assert run.main(command) == 0
    assert run.main([word for word in command if not word.startswith("trainer.steps")] + ["trainer.steps=4"]) == 0
    (path,) = Path("runs/adhoc").glob("*/")
    status: RunStatus = read_status(path)
    assert [note for note in status.notes if "every reward is 0" in note] == [
        note for note in status.notes if note.startswith("looks wrong after step 2 (reward 0): every reward is 0")
    ]
    assert (path / "log.txt").read_text().count("every reward is 0") == 1
