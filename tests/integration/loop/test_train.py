"""Whole runs: the record they leave, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import dataclasses
import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from grpo_sweeps.config import ObjectiveConfig, RunConfig
from grpo_sweeps.loop import keep
from grpo_sweeps.loop.train import train
from grpo_sweeps.loop.watch import Stopped, Watch
from grpo_sweeps.models import tiny_path
from grpo_sweeps.tracking.local import read_completions, read_evals, read_groups, read_metrics
from grpo_sweeps.tracking.model import SIZES, read_model
from grpo_sweeps.tracking.symptoms import NAMED
from tests.unit.loop.cut_runs import Interrupted, train_until, without_clock

pytestmark = pytest.mark.integration

MakeConfig = Callable[..., RunConfig]


def record(folder: Path) -> dict[str, Any]:
    """What a run leaves, without the clock."""
    groups = [
        (dataclasses.replace(g, gram=None), None if g.gram is None else g.gram.tobytes()) for g in read_groups(folder)
    ]
    return {
        "metrics": without_clock(read_metrics(folder)).to_csv(index=False),
        "groups": groups,
        "evals": read_evals(folder),
        "completions": read_completions(folder),
    }


def test_the_record_of_a_run(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    assert metrics["step"].tolist() == [0, 1, 2, 3, 4]
    assert metrics.loc[metrics["eval/accuracy"].notna(), "step"].tolist() == [0, 2, 4]
    assert metrics["rollouts"].tolist()[:4] == [0, 16, 32, 48]
    groups = read_groups(tmp_path / "run")
    assert len(groups) == 16
    assert any(g.gram is not None for g in groups)
    assert {r.step for r in read_evals(tmp_path / "run")} == {0, 2, 4}


@pytest.mark.parametrize("random", [False, True])
def test_a_run_keeps_what_it_trained_by_the_models_own_configuration(
    make_config: MakeConfig, tmp_path: Path, random: bool
) -> None:
    """Whatever `model.name` says, which users set freely."""
    config = make_config()
    model = dataclasses.replace(config.model, name="nemotron_mini_4b", path=str(tiny_path()), random=random)
    train(dataclasses.replace(config, model=model, trainer=dataclasses.replace(config.trainer, steps=1)), tmp_path)
    kept, own = read_model(tmp_path), AutoConfig.from_pretrained(tiny_path())
    assert kept["weights"] == ("drawn" if random else "loaded")
    assert kept["model_type"] == "llama" and all(kept[name] == getattr(own, name) for name in SIZES)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(make_config: MakeConfig, tmp_path: Path, stop_after: int) -> None:
    config = make_config()
    train(config, tmp_path / "whole")

    train_until(config, tmp_path / "cut", stop_after)
    train(config, tmp_path / "cut")
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def asked_at(call: int) -> Watch:
    """A watch that is asked to stop at its n-th question."""
    calls = itertools.count(1)
    return Watch(stop=lambda: next(calls) >= call)


@pytest.mark.parametrize("call", range(1, 11))
def test_stopped_anywhere_the_resumed_run_is_the_undisturbed_one(
    make_config: MakeConfig, tmp_path: Path, call: int
) -> None:
    """Four steps and three evaluations of two batches each ask ten times. No step is done twice."""
    config = make_config(reward="dice", trainer={"checkpoint_every": 0})
    train(config, tmp_path / "whole")
    done: list[int] = []
    with pytest.raises(Stopped):
        train(config, tmp_path / "cut", dataclasses.replace(asked_at(call), step=lambda step, *_: done.append(step)))
    train(config, tmp_path / "cut", Watch(step=lambda step, *_: done.append(step)))
    assert done == [1, 2, 3, 4]
    assert record(tmp_path / "cut") == record(tmp_path / "whole")
    assert checkpoints(tmp_path / "cut") == checkpoints(tmp_path / "whole") == ["step_0000004"]


def test_a_stop_saves_nothing_that_is_saved_already(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(trainer={"checkpoint_every": 1, "eval_every": 0})
    with pytest.raises(Stopped):
        train(config, tmp_path, asked_at(2))
    path = tmp_path / "checkpoints" / "step_0000002"
    before = path.stat().st_mtime_ns, path.stat().st_ino
    with pytest.raises(Stopped):
        train(make_config(trainer={"checkpoint_every": 1, "eval_every": 1}), tmp_path, asked_at(1))
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before and checkpoints(tmp_path) == ["step_0000002"]


def test_a_stopped_record_is_compacted_and_not_merged(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(trainer={"steps": 6, "checkpoint_every": 2, "eval_every": 0})
    with pytest.raises(Stopped):
        train(config, tmp_path, asked_at(5))
    segments = sorted(path.name for path in (tmp_path / "grams").glob("segment-*"))
    assert len(segments) == 3 and (tmp_path / "grams" / "journal.jsonl").stat().st_size == 0
    train(config, tmp_path)
    assert len(list((tmp_path / "grams").glob("segment-*"))) == 1


def test_checkpoints_by_the_clock_and_at_the_end(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(trainer={"checkpoint_every": 0, "checkpoint_minutes": 1.0, "keep_checkpoints": 9})
    now = [0.0]
    monkeypatch.setattr(keep.time, "monotonic", lambda: now[0])

    def pass_time(done: int, *_: object) -> None:
        now[0] += 35.0  # a minute has passed after steps 2 and 4

    train(dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, steps=5)), tmp_path / "timed",
          Watch(step=pass_time))  # fmt: skip
    assert checkpoints(tmp_path / "timed") == ["step_0000003", "step_0000005"]
    off = make_config(trainer={"checkpoint_every": 0, "checkpoint_minutes": None})
    train(off, tmp_path / "off", Watch(step=pass_time))
    assert checkpoints(tmp_path / "off") == ["step_0000004"]


def _of_checkpoints(notes: list[str]) -> list[str]:
    """Without what looks wrong with a model that was never trained."""
    return [note for note in notes if not note.startswith(NAMED)]


@pytest.mark.parametrize("first", [1, 2])
def test_a_checkpoint_that_cannot_be_written_costs_nothing(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    config = make_config(trainer={"checkpoint_every": 1})
    train(config, tmp_path / "whole")
    save, tries, notes = keep.checkpoint.save, itertools.count(1), list[str]()

    def full(*args: Any, **kwargs: Any) -> Path:
        if first <= next(tries) < first + 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(keep.checkpoint, "save", full)
    train(config, tmp_path / "full", Watch(note=notes.append))
    assert _of_checkpoints(notes) == [
        f"the checkpoint of step {first} could not be written (No space left on device); the run goes on without it",
        f"checkpoints can be written again, from step {first + 2} on",
    ]
    assert record(tmp_path / "full") == record(tmp_path / "whole")
    assert checkpoints(tmp_path / "full") == checkpoints(tmp_path / "whole")


def test_a_guard_that_raises_keeps_the_step_out_of_the_record(make_config: MakeConfig, tmp_path: Path) -> None:
    calls = itertools.count(1)

    def guard() -> None:
        if next(calls) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(make_config(trainer={"eval_every": 0}), tmp_path, Watch(guard=guard))
    assert read_metrics(tmp_path)["step"].tolist() == [0] and {g.step for g in read_groups(tmp_path)} == {0}


def test_a_damaged_newest_checkpoint_is_noted_and_the_one_before_taken(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(reward="dice", trainer={"checkpoint_every": 1, "keep_checkpoints": 2})
    train(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(config, tmp_path / "cut", asked_at(6))  # three evaluation batches' questions and three steps'
    newest = sorted((tmp_path / "cut" / "checkpoints").iterdir())[-1]
    (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:-50])
    notes: list[str] = []
    train(config, tmp_path / "cut", Watch(note=notes.append))
    (note,) = _of_checkpoints(notes)
    assert newest.name in note and "Trying the one before it" in note
    assert record(tmp_path / "cut") == record(tmp_path / "whole")


def test_a_finished_run_is_taken_further(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path / "further")
    longer = make_config(trainer={"steps": 6})
    train(longer, tmp_path / "further")
    train(longer, tmp_path / "at_once")
    assert record(tmp_path / "further") == record(tmp_path / "at_once")


def tokens_of_steps(folder: Path) -> list[int]:
    """Completion tokens sampled up to and including each step, from the groups' own records."""
    groups = read_groups(folder)
    steps = range(max(g.step for g in groups) + 1)
    return [sum(sum(g.lengths) for g in groups if g.step <= step) for step in steps]


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_budget_of_tokens_ends_a_run_at_the_same_step_killed_or_not(
    make_config: MakeConfig, tmp_path: Path, stop_after: int
) -> None:
    train(make_config(trainer={"steps": 6}), tmp_path / "free")
    sums = tokens_of_steps(tmp_path / "free")
    config = make_config(trainer={"steps": 6, "tokens": sums[2] - 1, "checkpoint_every": 2})
    spent: list[tuple[int, str]] = []
    train(config, tmp_path / "run", Watch(spent=lambda *words: spent.append(words)))
    said = f"finished by trainer.tokens={sums[2] - 1} after step 3: {sums[2]} were sampled"
    assert spent == [(3, said)], "the first step at which the budget is reached, and no earlier one"
    metrics = read_metrics(tmp_path / "run")
    assert metrics["sampled_tokens"].dropna().tolist() == sums[:3] == tokens_of_steps(tmp_path / "run")
    assert metrics.loc[metrics["eval/accuracy"].notna(), "step"].tolist() == [0, 2, 3], "also after the last step"
    assert checkpoints(tmp_path / "run")[-1].startswith("step_") and checkpoints(tmp_path / "run")[-1].endswith("3")

    train_until(config, tmp_path / "cut", stop_after)
    train(config, tmp_path / "cut")
    assert record(tmp_path / "cut") == record(tmp_path / "run")


def test_a_budget_beyond_the_last_step_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    spent: list[int] = []
    train(make_config(trainer={"tokens": 10**9}), tmp_path, Watch(spent=lambda done, _: spent.append(done)))
    assert len(tokens_of_steps(tmp_path)) == 4 and not spent


def test_what_is_discarded_or_continued_counts_too(make_config: MakeConfig, tmp_path: Path) -> None:
    objective = ObjectiveConfig(resample=True, resample_rounds=2)
    train(make_config(trainer={"tokens": 10**9, "eval_every": 0}, objective=objective), tmp_path)
    metrics = read_metrics(tmp_path)
    own, beside = tokens_of_steps(tmp_path), metrics["resample/discarded_tokens"].cumsum()
    assert beside.iloc[-1] > 0 and metrics["sampled_tokens"].tolist() == pytest.approx(list(own + beside))


def test_asking_for_fewer_steps_leaves_the_run_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path / "run")
    before = record(tmp_path / "run")
    train(make_config(trainer={"steps": 2}), tmp_path / "run")
    assert record(tmp_path / "run") == before


@pytest.mark.parametrize(("R", "groups"), [(2, 8), (4, 4), (8, 2)])
def test_equal_rollouts_a_step(make_config: MakeConfig, tmp_path: Path, R: int, groups: int) -> None:
    """Four groups at R = 4 are 16 rollouts at every R, of problems in the same order."""
    config = make_config(R=R, budget="rollouts", trainer={"steps": 2, "eval_every": 0})
    train(config, tmp_path / "run")
    recorded = read_groups(tmp_path / "run")
    assert [g.group for g in recorded] == 2 * list(range(groups)) and {g.R for g in recorded} == {R}
    assert len({g.prompt_id for g in recorded}) == 2 * groups
    assert read_metrics(tmp_path / "run")["rollouts"].tolist() == [0, 16]


def test_weights_that_are_no_longer_finite_are_not_kept(make_config: MakeConfig, tmp_path: Path) -> None:
    """The last update's overflow would else be found by whoever goes on from it."""
    config = make_config(trainer={"lr": 1e308, "steps": 1, "eval_every": 0, "max_grad_norm": 0.0})
    with pytest.raises(FloatingPointError, match=r"the weights \S+ are not finite after step 1: the run has diverged"):
        train(config, tmp_path / "far", Watch(note=lambda sentence: None))
    assert not list((tmp_path / "far").glob("checkpoints/step_*"))


def test_a_gradient_that_is_not_finite_is_named_and_no_fault_of_the_gram(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(trainer={"lr": 1e19, "steps": 4, "eval_every": 0, "max_grad_norm": 0.0})
    with pytest.raises(FloatingPointError, match=r"the gradient's norm is (nan|inf): the run has diverged"):
        train(config, tmp_path / "far", Watch(note=lambda sentence: None))
