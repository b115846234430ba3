"""What makes a run changes between two commands, or between its end by kill -9 and the next: nothing is mixed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.config import RunConfig
from grpo_sweeps.models import tiny_path
from grpo_sweeps.sweep.execute import execute, result_of
from grpo_sweeps.sweep.launch import exit_code
from grpo_sweeps.sweep.origin import Origin, Stale
from grpo_sweeps.tracking import digests, provenance
from grpo_sweeps.tracking.digests import Code
from grpo_sweeps.tracking.status import read_status, write_status
from grpo_sweeps.types import Problem, TaskData
from tests.unit.sweep.conftest import ROOT, frozen_config

pytestmark = pytest.mark.integration

Run = Callable[..., int]
Statuses = Callable[..., dict[str, Any]]
REWARD = "from own_words import GOOD\n\ndef reward(completion, problem, seed):\n    return float(GOOD in completion)\n"


def only_run(place: Path) -> Path:
    (found,) = (place / "runs" / "adhoc").glob("*/status.json")
    return found.parent


def forget(*modules: str) -> None:
    """The next command is another process, which imports the files as they are then."""
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def own_reward(workplace: Path) -> Iterator[Path]:
    """A reward of the user's own that imports a second file."""
    (workplace / "own_reward.py").write_text(REWARD)
    (workplace / "own_words.py").write_text("GOOD = 'yes'\n")
    forget("own_reward", "own_words")
    yield workplace
    forget("own_reward", "own_words")


OWN = ("reward=custom", "reward._target_=own_reward.reward")


VERDICT = "from own_words import GOOD\n\ndef right(completion, problem):\n    return GOOD in completion\n"


@pytest.mark.parametrize("key", ["task", "reward.functions.a"])
def test_an_edited_verdict_is_refused_until_redo(
    run: Run, own_reward: Path, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    (own_reward / "own_reward.py").write_text(VERDICT)
    several = ("reward=several", "+reward.functions.a._target_=grpo_sweeps.rewards.verdicts.correct",
               "+reward.functions.a.verdict=own_reward.right")  # fmt: skip
    words = ("reward=correct", "task.verdict=own_reward.right") if key == "task" else several
    assert run(*words) == 0
    functions = provenance.read_made_by(only_run(own_reward)).functions
    assert set(functions[f"{key}.verdict=own_reward.right"]) == {"own_reward", "own_words"}
    (own_reward / "own_words.py").write_text("GOOD = 'no'\n")
    forget("own_reward", "own_words")
    assert run(*words) == 2
    said = capfd.readouterr().err
    named = [f"{key}.verdict=own_reward.right" for key in (("task", "reward") if key == "task" else (key,))]
    assert f" {' and '.join(named)}: own_words has changed" in said and said.count("own_words has changed") == 1
    forget("own_reward", "own_words")
    assert run(*words, "redo=stale") == 0


@pytest.mark.parametrize("file", ["own_reward.py", "own_words.py"])
@pytest.mark.parametrize("more", [(), ("trainer.steps=5",)])
def test_an_edited_reward_is_refused_until_redo(
    run: Run, own_reward: Path, capfd: pytest.CaptureFixture[str], file: str, more: tuple[str, ...]
) -> None:
    """Fault 1c: "finished already", and with more steps one run whose rewards are of both versions."""
    assert run(*OWN) == 0
    run_dir = only_run(own_reward)
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    edited = (own_reward / file).read_text()
    (own_reward / file).write_text(f"# a comment\n{edited}")
    forget("own_reward", "own_words")
    assert run(*OWN) == 0, "a comment changes nothing"
    (own_reward / file).write_text(edited.replace("'yes'", "'no'").replace("float(", "2 * float("))
    forget("own_reward", "own_words")
    capfd.readouterr()
    assert run(*OWN, *more) == 2
    said = capfd.readouterr().err
    assert f"reward._target_=own_reward.reward: {file.removesuffix('.py')} has changed" in said
    assert "stale: finished at step 3" in said and "redo=stale" in said and str(run_dir.name) in said
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
    assert run(*OWN, *more, "redo=stale") == 0
    assert run(*OWN, *more) == 0
    assert len(list((own_reward / "runs" / "adhoc" / ".replaced").iterdir())) == 1


def test_one_changed_run_starts_none_of_the_others(run: Run, own_reward: Path, statuses: Statuses) -> None:
    assert run("R=2", *OWN) == 0
    (own_reward / "own_words.py").write_text("GOOD = 'no'\n")
    forget("own_reward", "own_words")
    assert run("-m", "R=2,4,8", *OWN) == 2
    assert len(statuses()) == 1
    assert run("-m", "R=2,4,8", "dry_run=true", *OWN) == 0
    assert run("-m", "R=2,4,8", "redo=stale", *OWN) == 0
    assert len(statuses()) == 3


def jsonl(folder: Path, word: str) -> None:
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        lines = [json.dumps({"question": f"{word} {split} {i}?", "answer": f"#### {i}"}) for i in range(80)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("more", [(), ("trainer.steps=5",)])
def test_replaced_data_are_refused(
    run: Run, workplace: Path, capfd: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """Fault 1b: ids of GSM8K's problems are positions, so that others have the same names."""
    words = ("task=gsm8k", f"task.path={workplace / 'data'}", "trainer.eval_problems=8")
    jsonl(workplace / "data", "old")
    assert run(*words) == 0
    assert run(*words) == 0
    jsonl(workplace / "data", "new")
    capfd.readouterr()
    assert run(*words, *more) == 2
    said = capfd.readouterr().err
    assert "task: its training problems have changed (80 problems, now 80 problems)" in said
    assert "its held-out problems have changed" in said and "redo=stale" in said
    jsonl(workplace / "data", "old")
    assert run(*words, *more) == 0, "put back what made it"


@pytest.mark.parametrize("more", [(), ("trainer.steps=5",)])
def test_a_replaced_model_is_refused(
    run: Run, workplace: Path, capfd: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """Fault 1d: the folder behind model.path holds another architecture, or other weights of the same one."""
    folder = workplace / "model"
    shutil.copytree(tiny_path(), folder)
    words = (f"model.path={folder}",)
    assert run(*words) == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=7))
    (folder / "README.md").write_text("other words")
    os.utime(folder / "model.safetensors")
    assert run(*words) == 0, "the same model"
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    capfd.readouterr()
    assert run(*words, *more) == 2
    assert "model.path: config.json, model.safetensors have changed" in capfd.readouterr().err


@pytest.fixture
def checkout(workplace: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A copy of the package without git, and the run command from it in a process of its own."""
    copy = workplace / "checkout"
    for name in ("grpo_sweeps", "hydra_plugins", "conf", "sweeps"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "local"))

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(workplace / "site"), str(copy)])}
        command = [sys.executable, "-m", "grpo_sweeps.run", "tracking=local", "trainer.steps=3", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    return call


def edit(place: Path, name: str, old: str, new: str) -> None:
    path = place / "checkout" / "grpo_sweeps" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_edited_estimator_does_not_go_on_with_a_killed_run(
    checkout: Callable[..., subprocess.CompletedProcess[str]], workplace: Path
) -> None:
    """Faults 1a and 1e: no commit tells the two apart, and it was one run of two estimators, exit 0."""
    words = ("seed=2", "estimator=grpo")  # which is killed after its first step
    assert checkout(*words).returncode == -9
    run_dir = only_run(workplace)
    (run_dir / "checkpoints" / "step_0000001").mkdir(parents=True)  # the status, a second behind, knows of no step
    assert read_status(run_dir).commit is None and provenance.read_made_by(run_dir).known
    edit(workplace, "estimators/group.py", "\nimport numpy", "\n# a comment\nimport numpy")
    edit(workplace, "report/remarks.py", "ALLOW =", "MORE = 1\nALLOW =")
    assert checkout(*words).returncode == -9, "neither a comment nor the report's code makes it another run"
    edit(workplace, "estimators/group.py", ".mean(", ".max(")
    refused = checkout(*words)
    assert refused.returncode == 1, refused.stderr
    assert "stale: running at step 0 of 3 by other code of the package (commit unknown, code " in refused.stderr
    assert "redo=stale makes it afresh" in refused.stderr


def test_a_finished_run_of_other_code_is_skipped_with_a_line(
    run: Run, workplace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run() == 0
    monkeypatch.setattr(digests, "_package", [Code("b" * 16, "c" * 16)])
    capfd.readouterr()
    assert run() == 0
    commit = (provenance.commit() or "unknown")[:7]
    made = provenance.read_made_by(only_run(workplace)).package[:7]
    line = f"finished already (3 steps), by other code of the package (commit {commit}, code {made}; "
    assert f"{line}now commit {commit}, code bbbbbbb)" in capfd.readouterr().err
    assert run("trainer.steps=5") == 1
    assert "stale: finished at step 3 of 3 by other code of the package" in capfd.readouterr().err
    assert run("redo=stale") == 0


def test_a_record_of_before_goes_on_and_says_from_where_it_is_known(
    run: Run, own_reward: Path, statuses: Statuses
) -> None:
    assert run(*OWN) == 0
    source = only_run(own_reward) / "source.json"
    source.write_text(json.dumps({key: one for key, one in json.loads(source.read_text()).items() if key != "made_by"}))
    assert not provenance.read_made_by(source.parent).known
    assert run(*OWN, "trainer.steps=5") == 0
    assert provenance.read_made_by(source.parent).since == 3
    assert run(*OWN, "trainer.steps=6") == 0
    assert provenance.read_made_by(source.parent).since == 3
    (own_reward / "own_words.py").write_text("GOOD = 'no'\n")
    forget("own_reward", "own_words")
    assert run(*OWN) == 2


def test_a_task_that_gives_others_each_time_is_told_so(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = workplace / "one"
    assert execute(frozen_config(), run_dir).ok
    origin = Origin(RunConfig.from_mapping(frozen_config()), run_dir)
    assert origin.start() == ""
    origin.loaded(TaskData([Problem("a", "1", "1")], []))
    assert provenance.read_made_by(run_dir).data["train"].startswith("1 problems, "), "what was not known is written"
    with pytest.raises(Stale, match="must give the same problems each time"):
        origin.loaded(TaskData([Problem("a", "2", "1")], []))


def test_another_commit_of_the_same_code_goes_on(run: Run, workplace: Path, statuses: Statuses) -> None:
    assert run() == 0
    (status,) = statuses().values()
    write_status(only_run(workplace), replace(status, state="interrupted", step=2, commit="0" * 40))
    assert run() == 0


def test_a_job_finds_at_its_start_what_changed_while_it_waited(
    workplace: Path, own_reward: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is frozen at submission; the files that the job imports are not."""
    frozen = {**frozen_config(), "reward": {"_target_": "own_reward.reward"}}
    monkeypatch.syspath_prepend(str(workplace))
    run_dir = workplace / "runs" / "adhoc" / "one"
    assert execute(frozen, run_dir).ok
    write_status(run_dir, replace(read_status(run_dir), state="interrupted", step=1))
    records = (run_dir / "metrics.jsonl").read_text()
    (own_reward / "own_words.py").write_text("GOOD = 'no'\n")
    forget("own_reward", "own_words")
    result = execute(frozen, run_dir)
    assert (result.state, result.config_error, result.step) == ("stale", True, 1)
    assert result.error == read_status(run_dir).error and result_of(run_dir) == result
    assert exit_code([result]) == 2
    assert result.error.startswith("stale: reward._target_=own_reward.reward: own_words has changed; redo=stale makes")
    assert (run_dir / "metrics.jsonl").read_text() == records
    (own_reward / "own_words.py").write_text("GOOD = 'yes'\n")
    forget("own_reward", "own_words")
    assert execute(frozen, run_dir).ok


def test_the_package_is_compared_at_the_start_too(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = workplace / "one"
    assert execute(frozen_config(), run_dir).ok
    write_status(run_dir, replace(read_status(run_dir), state="queued", step=0))
    monkeypatch.setattr(digests, "_package", [Code("b" * 16, "c" * 16)])
    result = execute(frozen_config(), run_dir)
    assert result.state == "stale" and "the package's code has changed (commit" in str(result.error)


@pytest.mark.parametrize("launcher", ["basic", "submitit_local"])
def test_every_launcher_writes_what_made_its_runs(
    run: Run, own_reward: Path, statuses: Statuses, launcher: str
) -> None:
    assert run("-m", "R=2,4", *OWN, f"hydra/launcher={launcher}") == 0
    made = [provenance.read_made_by(path.parent) for path in own_reward.glob("runs/adhoc/*/status.json")]
    assert len(made) == 2 and made[0] == made[1]
    assert made[0].data["train"].startswith("8192 problems, ") and "model.safetensors" in made[0].weights
    assert list(made[0].functions["reward._target_=own_reward.reward"]) == ["own_reward", "own_words"]
    assert made[0].code == digests.of_package()


def test_a_copied_folder_is_not_gone_on_with(run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run's folder under the identity of another."""
    assert run("R=2") == 0
    assert run("R=4") == 0
    one, other = sorted((workplace / "runs" / "adhoc").glob("*/status.json"))
    shutil.rmtree(other.parent)
    shutil.copytree(one.parent, other.parent)
    capfd.readouterr()
    assert run("-m", "R=2,4", "trainer.steps=5") == 1
    assert f"its folder holds the record of run {one.parent.name}" in capfd.readouterr().err
