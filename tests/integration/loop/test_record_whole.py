"""A run knows what it should hold: what is lost, cut or another run's is named, and nothing is thrown away."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps import verify
from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.loop.train import train
from grpo_sweeps.loop.watch import Stopped, Watch
from grpo_sweeps.paths import run_dir as run_dir_of
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.sweep.execute import RunResult, execute
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.sweep.ledger import Decision, decide
from grpo_sweeps.sweep.overview import collect
from grpo_sweeps.sweep.recover import NOTE, recover
from grpo_sweeps.tracking import findings, provenance
from grpo_sweeps.tracking.glance import NotWhole
from grpo_sweeps.tracking.status import RunStatus, read_status, write_status
from tests.unit.loop.cut_runs import Interrupted

pytestmark = pytest.mark.integration

MakeConfig = Callable[..., RunConfig]


@dataclasses.dataclass(frozen=True)
class Place:
    """One run on the disk, and the commands that a person would give about it."""

    config: RunConfig

    @property
    def dir(self) -> Path:
        return run_dir_of(self.config.runs_dir, "test", identity(self.config))

    def with_steps(self, steps: int) -> Place:
        return Place(dataclasses.replace(self.config, trainer=dataclasses.replace(self.config.trainer, steps=steps)))

    def run(self) -> RunResult:
        return execute(to_mapping(self.config), self.dir)

    def decision(self, redo: str | None = None) -> Decision:
        return decide(self.dir, self.config.trainer.steps, redo, provenance.commit())

    def verify(self, *words: str) -> int:
        return verify.main([f"runs_dir={self.config.runs_dir}", "sweep=test", *words])

    def remarks(self) -> list[str]:
        return [line for line in missing(load_sweep("test", self.config.runs_dir)) if "not whole" in line]

    def lacks(self) -> list[str]:
        (row,) = collect(Path(self.config.runs_dir), "test")
        return [one.sentence for one in row.lacks]

    def segment(self, folder: str) -> Path:
        return sorted((self.dir / folder).glob("segment-*"))[0]

    def content(self) -> dict[str, bytes]:
        """Every file of the records, byte for byte."""
        files = [self.dir / "metrics.jsonl", *(p for f in ("grams", "evals") for p in (self.dir / f).iterdir())]
        return {str(path.relative_to(self.dir)): path.read_bytes() for path in files}


@pytest.fixture
def place(make_config: MakeConfig, tmp_path: Path) -> Place:
    settings = {"checkpoint_every": 2, "keep_checkpoints": 2}
    return Place(dataclasses.replace(make_config(trainer=settings), runs_dir=str(tmp_path / "runs")))


def interrupt(place: Place, step: int) -> None:
    """Stop the run after so many steps, with a checkpoint, as SIGTERM does."""
    done = [0]
    place.dir.mkdir(parents=True)
    begun = RunStatus("interrupted", place.dir.name, "R=4 seed=0", "test", 0, 4, commit=provenance.commit())
    write_status(place.dir, begun)
    (place.dir / "config.yaml").write_text(json.dumps(to_mapping(place.config)))
    watch = Watch(step=lambda n, *_: done.__setitem__(0, n), stop=lambda: done[0] >= step, note=lambda sentence: None)
    with pytest.raises(Stopped):
        train(place.config, place.dir, watch)
    write_status(place.dir, dataclasses.replace(begun, step=step))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def without_lines(path: Path, first: int, last: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:first] + lines[last:]))


def says_more(place: Place) -> None:
    write_status(place.dir, dataclasses.replace(read_status(place.dir), step=9, total=9))


LOSSES: dict[str, tuple[Callable[[Place], Any], str]] = {
    "metrics deleted": (lambda p: (p.dir / "metrics.jsonl").unlink(), "metrics.jsonl"),
    "metrics cut": (lambda p: without_lines(p.dir / "metrics.jsonl", 4, 99), "metrics.jsonl"),
    "metrics holed": (lambda p: without_lines(p.dir / "metrics.jsonl", 2, 3), "metrics.jsonl"),
    "grams deleted": (lambda p: shutil.rmtree(p.dir / "grams"), "grams/"),
    "evals deleted": (lambda p: shutil.rmtree(p.dir / "evals"), "evals/"),
    "completions deleted": (lambda p: shutil.rmtree(p.dir / "completions"), "completions/"),
    "updates deleted": (lambda p: shutil.rmtree(p.dir / "updates"), "updates/"),
    "status says more": (says_more, "holds 4 steps, and status.json says 9"),
    "segment cut": (lambda p: os.truncate(p.segment("grams"), 500), "grams/segment"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_named_by_every_command(place: Place, loss: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert place.run().state == "finished" and place.verify() == 0
    assert place.decision().why == "finished" and place.lacks() == place.remarks() == []
    do, said = LOSSES[loss]
    do(place)
    capfd.readouterr()
    assert place.verify() == 1
    told = capfd.readouterr()
    assert said in told.out and "R=4 seed=0" in told.out and "redo=failed" in told.err
    assert any(said in line for line in place.lacks())
    assert len(place.remarks()) == 1 or loss == "segment cut"  # which the report says of a run that it leaves out
    found = place.decision()
    assert (found.action, found.why) == ("skip", "failed") and "its record is not whole" in found.reason
    assert place.decision("failed").action == "redo"


def test_a_flipped_bit_is_seen_by_verify_and_the_report(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.run()
    for path in (place.segment("grams"), place.dir / "metrics.jsonl", place.dir / "config.yaml"):
        before = path.read_bytes()
        flip(path, len(before) // 2)
        assert place.verify() == 1 and path.name in capfd.readouterr().out
        assert len(place.remarks()) == 1
        path.write_bytes(before)
    state = sorted((place.dir / "checkpoints").glob("*/state.pt"))[-1]
    flip(state, 5000)
    assert place.verify() == 1 and "its state is not what its manifest describes" in capfd.readouterr().out


def test_what_does_no_harm_is_not_named(place: Place, tmp_path: Path) -> None:
    place.run()
    for path in place.dir.rglob("*"):
        os.utime(path, (1, 1))
    (place.dir / "notes.txt").write_text("mine")
    (place.dir / "grams" / ".nfs0001").write_text("a file system's")
    shutil.rmtree(place.dir / "checkpoints")  # of a finished run: nothing is computed from them
    assert place.verify() == 0 and place.lacks() == place.remarks() == []
    shutil.copytree(tmp_path / "runs", tmp_path / "elsewhere")
    assert verify.main([f"runs_dir={tmp_path / 'elsewhere'}"]) == 0


def test_records_of_versions_without_a_seal_are_held_to_their_counts(place: Place) -> None:
    """No seal, no checksums of lines, no records of updates."""
    place.run()
    (place.dir / "seal.json").unlink()
    shutil.rmtree(place.dir / "updates")
    lines = [json.loads(line) for line in (place.dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["crc32"]
    (place.dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert place.verify() == 0 and place.lacks() == place.remarks() == [] and place.decision().why == "finished"
    shutil.rmtree(place.dir / "grams")
    assert place.verify() == 1 and place.lacks() and place.remarks() and place.decision().why == "failed"


def test_deleted_checkpoints_and_more_steps_throw_nothing_away(place: Place) -> None:
    place.run()
    before = place.content()
    shutil.rmtree(place.dir / "checkpoints")
    longer = place.with_steps(6)
    found = longer.decision()
    assert (found.action, found.why) == ("skip", "failed")
    assert "no checkpoint to go on from (none; the last one written was of step 4)" in found.reason
    assert longer.decision("failed").action == "redo"
    result = longer.run()  # a job that was queued before
    assert result.state == "failed" and not result.ok and "redo=failed makes the run afresh" in str(result.error)
    assert place.content() == before
    assert read_status(place.dir).state == "interrupted" and read_status(place.dir).step == 4


def test_the_run_goes_on_once_its_checkpoints_are_back(place: Place, tmp_path: Path) -> None:
    place.run()
    shutil.move(place.dir / "checkpoints", tmp_path / "kept")
    longer = place.with_steps(6)
    assert longer.run().state == "failed"
    shutil.move(tmp_path / "kept", place.dir / "checkpoints")
    assert longer.decision().action == "continue" and longer.run().state == "finished" and longer.verify() == 0


def test_another_runs_checkpoints_are_not_gone_on_from(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    other = Place(dataclasses.replace(place.config, seed=1))
    interrupt(place, 2)
    interrupt(other, 3)
    before = place.content()
    shutil.rmtree(place.dir / "checkpoints")
    shutil.copytree(other.dir / "checkpoints", place.dir / "checkpoints")
    assert place.verify(f"run={place.dir.name}") == 1
    assert f"belongs to the run {other.dir.name}" in capfd.readouterr().out
    assert f"those of the run {other.dir.name}" in place.decision().reason
    assert place.run().state == "failed" and place.content() == before


def test_records_of_a_like_run_are_told_apart(place: Place) -> None:
    """Of the same size and settings, in no seal: by their own word, and by what the lines of metrics say of them."""
    other = Place(dataclasses.replace(place.config, seed=1))
    for one in (place, other):
        one.run()
        (one.dir / "seal.json").unlink()
    for folder, metric in (("grams", "reward"), ("evals", "eval/accuracy_greedy"), ("updates", "update/norm")):
        held = findings.hold(place.dir, None, lambda step: True)
        assert held.differing(folder) == [] == held.strangers(), metric
    for folder in ("updates", "completions", "grams"):
        shutil.rmtree(place.dir / folder)
        shutil.copytree(other.dir / folder, place.dir / folder)
    held = findings.hold(place.dir, None, lambda step: True)
    assert [fault.reason for fault in held.faults] == 3 * [f"belongs to the run {other.dir.name}"]
    assert held.differing("updates") == [0] and held.differing("grams") and not held.strangers()
    shutil.rmtree(place.dir / "completions")
    third = Place(dataclasses.replace(place.config, seed=2))
    third.run()
    shutil.copytree(third.dir / "completions", place.dir / "completions")
    assert findings.hold(place.dir, None, lambda step: True).strangers() == [0]


def test_a_damaged_segment_is_said_before_training(place: Place) -> None:
    interrupt(place, 3)
    flip(place.segment("grams"), 600)
    before = place.content()
    result = place.run()
    assert result.state == "failed" and "grams/segment" in str(result.error) and "put back" in str(result.error)
    assert place.content() == before and "step 4/4" not in (place.dir / "log.txt").read_text()


@pytest.mark.parametrize("what", ["metrics.jsonl", "grams", "evals"])
def test_lost_records_are_said_before_training(place: Place, what: str) -> None:
    interrupt(place, 3)
    path = place.dir / what
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    result = place.run()
    assert result.state == "failed" and what in str(result.error)
    assert not path.exists() and sorted(p.name for p in (place.dir / "checkpoints").iterdir())[-1] == "step_0000003"


def test_records_that_go_while_it_trains_fail_the_run(place: Place) -> None:
    def lose(done: int, *_: Any) -> None:
        if done == 3:
            shutil.rmtree(place.dir / "grams")
            (place.dir / "grams").mkdir()

    with pytest.raises(NotWhole, match="its record is not whole: grams/ lacks groups of step") as caught:
        train(place.config, place.dir, Watch(step=lose, note=lambda sentence: None))
    assert caught.value.trained


@pytest.mark.parametrize("content", [None, b"", b'{"state": "fin'])
def test_a_lost_status_of_a_finished_run_is_recovered(place: Place, content: bytes | None) -> None:
    place.run()
    lost = place.dir / "status.json"
    lost.unlink()
    if content is not None:
        lost.write_bytes(content)
    assert "its status was lost" in place.decision().reason
    assert recover(place.dir) and not recover(place.dir)
    status = read_status(place.dir)
    assert (status.state, status.step, status.total, status.identity) == ("finished", 4, 4, place.dir.name)
    assert NOTE in status.notes and (place.dir / "status.json.damaged").exists() == (content is not None)


def test_a_lost_status_of_an_interrupted_run_lets_it_go_on(place: Place) -> None:
    interrupt(place, 3)
    source = provenance.snapshot("run")
    provenance.write(place.dir, source)
    (place.dir / "status.json").unlink()
    found = place.decision()
    assert found.action == "continue" and "its records say: was interrupted at step 3 of 4" in found.reason
    assert recover(place.dir) and place.run().state == "finished" and place.verify() == 0


def test_a_kill_on_the_way_back_to_the_checkpoint_is_no_loss(place: Place) -> None:
    """The status still says the later step, and the records of it are gone."""
    interrupt(place, 2)
    status = read_status(place.dir)
    write_status(
        place.dir, dataclasses.replace(status, state="running", step=3, pid=2**22 + 1, host=os.uname().nodename)
    )
    assert place.lacks() == [] and place.verify() == 0 and place.decision().action == "continue"
    assert place.run().state == "finished" and place.verify() == 0


def test_what_is_done_again_is_kept_aside_until_the_run_has_ended(place: Place) -> None:
    """A kill after step 3, one past the checkpoint."""

    def killed(done: int, *_: Any) -> None:
        if done == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(place.config, place.dir, Watch(step=killed, note=lambda sentence: None))
    seen: list[list[str]] = []
    aside = place.dir / ".before"
    train(place.config, place.dir, Watch(step=lambda *_: seen.append(sorted(p.name for p in aside.rglob("*.jsonl")))))
    assert seen[0] and "metrics.jsonl" in seen[0] and not aside.exists()


def test_the_help_tells_verify_from_its_neighbours(capfd: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--help"]) == 0
    told = capfd.readouterr().out
    assert "`check`" in told and "dry_run" in told and "Exit codes" in told


def test_a_bad_run_is_one_sentence(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.run()
    capfd.readouterr()
    assert place.verify("run=nothing") == 2 and "no such run" in capfd.readouterr().err
    assert place.verify("json=true") == 0 and json.loads(capfd.readouterr().out) == []
