"""A quick look at whether a run's record is whole: sizes and names of files, and the last lines of metrics.jsonl.

For the status table and the plan of a sweep, which look at hundreds of runs. `findings` reads everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_sweeps.tracking import seal as seals
from grpo_sweeps.tracking.checkpoints import FOLDER, checkpoints, usable
from grpo_sweeps.tracking.lines import METRICS, last_lines
from grpo_sweeps.tracking.seal import FOLDERS, SEGMENT, Seal
from grpo_sweeps.tracking.status import RecordError, RunStatus

AFRESH = "put back what is missing, or redo=failed makes the run afresh and keeps what is there in .replaced/"


class NotWhole(RecordError):
    """A run's record is not what it should hold: one sentence that says what is missing and what to do.

    trained: whether that was found after the last step; otherwise nothing has been done yet.
    """

    def __init__(self, sentence: str, trained: bool = False) -> None:
        super().__init__(sentence)
        self.trained = trained


@dataclass(frozen=True)
class Finding:
    """One thing that a run should hold and does not, or holds and should not.

    run: its name. what: the file or folder. expected, found: in a few words, for a table. text: goes on after `what`.
    """

    run: str
    what: str
    expected: str
    found: str
    text: str

    @property
    def sentence(self) -> str:
        """ "R=4 seed=0: metrics.jsonl lacks the training of steps 3 to 7" """
        return f"{self.run}: {self.what} {self.text}"


def steps_in_words(steps: Iterable[int]) -> str:
    """ "step 3", "steps 3, 7 to 9", at most eight parts of it."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in parts[:8]] + (["..."] if len(parts) > 8 else [])
    one = len(parts) == 1 and parts[0][0] == parts[0][1]
    return f"step{'' if one else 's'} {', '.join(words)}"


def glance(run_dir: Path, status: RunStatus, lines: Sequence[Mapping[str, Any]] | None = None) -> list[Finding]:
    """What is wrong at first sight with the record of a run that is not running now.

    lines: the last ones of its metrics.jsonl, where they have been read.
    """
    run = status.name or run_dir.name
    try:
        seal = seals.read(run_dir)
    except RecordError as error:
        return [Finding(run, seals.FILE_NAME, "whole", "damaged", f"is damaged ({_tail(error)})")]
    if seal is None and not any((run_dir / folder).is_dir() for folder in FOLDERS):
        return []  # nothing of a run, or nothing but lines that no record belongs to
    found = _sizes(run, run_dir, seal) if seal is not None else []
    if seal is None or METRICS in seal.files:
        known = last_lines(run_dir / METRICS)[0] if lines is None else lines
        found += _last_step(run, run_dir, status, seal, known)
    found += _folders(run, run_dir, status, seal)
    if status.state != "finished":
        found += lost_checkpoints(run, run_dir, status, seal)
    return found


def _sizes(run: str, run_dir: Path, seal: Seal) -> list[Finding]:
    found = [Finding(run, name, "there", "gone", "is gone") for name in lost_files(run_dir, seal) if name != METRICS]
    for name, (size, _) in seal.files.items():
        try:
            here = (run_dir / name).stat().st_size
        except OSError:
            continue
        if (here < size) if name == METRICS else (here != size and "/" in name):
            text = "is cut off" if here < size else "was changed since it was written"
            found.append(Finding(run, name, f"{size} bytes", f"{here} bytes", text))
    return found


def lost_files(run_dir: Path, seal: Seal) -> list[str]:
    """Files of the seal that are gone, but for segments that have been merged into a later one."""
    gone = [name for name in seal.files if not (run_dir / name).is_file()]
    return [name for name in gone if not _merged(run_dir, name)]


def _merged(run_dir: Path, name: str) -> bool:
    folder, _, file = name.partition("/")
    match = SEGMENT.fullmatch(file)
    if match is None or not (run_dir / folder).is_dir():
        return False
    number, first, last = map(int, match.groups())
    others = [SEGMENT.fullmatch(path.name) for path in (run_dir / folder).iterdir()]
    spans = [tuple(map(int, other.groups())) for other in others if other is not None]
    return any(n > number and a <= first and last <= b for n, a, b in spans)


def _last_step(
    run: str, run_dir: Path, status: RunStatus, seal: Seal | None, lines: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Whether metrics.jsonl reaches the step that the status says, or in a run that goes on, its checkpoint.

    One that was killed just when it went back to its checkpoint may have a status of a later step.
    """
    steps = [line["step"] for line in lines if "reward" in line]
    held = max(steps) + 1 if steps else 0
    if held == 0 and not status.step:
        return []
    if not (run_dir / METRICS).exists():
        return [Finding(run, METRICS, f"{status.step} steps", "gone", "is gone")]
    if status.state != "finished" and seal is not None:
        return [] if held >= seal.checkpoint else [behind_checkpoint(run, seal, held)]
    if held < status.step or (status.state == "finished" and held > max(status.step, status.total)):
        return [says_otherwise(run, status, held)]
    return []


def behind_checkpoint(run: str, seal: Seal, held: int) -> Finding:
    """The finding that the lines of metrics do not reach the checkpoint."""
    text = f"holds {held} steps, and the last checkpoint is of step {seal.checkpoint}"
    return Finding(run, METRICS, f"{seal.checkpoint} steps", f"{held} steps", text)


def says_otherwise(run: str, status: RunStatus, held: int) -> Finding:
    """The finding that the records hold another number of steps than the status says."""
    text = f"holds {held} steps, and status.json says {status.step}"
    return Finding(run, METRICS, f"{status.step} steps", f"{held} steps", text)


def _folders(run: str, run_dir: Path, status: RunStatus, seal: Seal | None) -> list[Finding]:
    """Of a finished run whether grams/ reaches from the first step to the last, by the names of its segments."""
    if status.state != "finished" or not status.step or (seal is not None and not seal.keeps):
        return []
    folder = run_dir / "grams"
    if not folder.is_dir():
        return [Finding(run, "grams/", f"{status.step} steps", "gone", "is gone")]
    matches = [SEGMENT.fullmatch(path.name) for path in folder.iterdir()]
    spans = [(int(match[2]), int(match[3])) for match in matches if match is not None]
    journal = folder / "journal.jsonl"
    if journal.exists() and journal.stat().st_size:
        return []
    if min((a for a, _ in spans), default=1) > 0 or max((b for _, b in spans), default=-1) < status.step - 1:
        held = " and ".join(f"{a} to {b}" for a, b in sorted(spans)) or "none"
        return [Finding(run, "grams/", f"steps 0 to {status.step - 1}", held, f"holds of the steps: {held}")]
    return []


def lost_checkpoints(run: str, run_dir: Path, status: RunStatus, seal: Seal | None) -> list[Finding]:
    """Whether a run that is to go on has a checkpoint of its own to go on from, where one was written."""
    recorded = any((run_dir / folder).is_dir() for folder in FOLDERS)
    written = seal.checkpoint if seal is not None else status.step if status.state == "finished" and recorded else 0
    if not written or usable(run_dir, status.identity) is not None:
        return []
    others = sorted({one.identity for one in checkpoints(run_dir) if one.identity not in ("", status.identity)})
    there = f"those of the run {', '.join(others)}" if others else "damaged" if checkpoints(run_dir) else "none"
    text = f"holds no checkpoint to go on from ({there}; the last one written was of step {written})"
    return [Finding(run, f"{FOLDER}/", f"step {written}", there, text)]


def _tail(error: object) -> str:
    return " ".join(str(error).split()).rpartition(" is damaged: ")[2].rstrip(".")


def in_words(found: Sequence[Finding]) -> str:
    """The first finding without the run's name, and how many more there are."""
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0].what} {found[0].text}{more}"
