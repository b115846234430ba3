"""seal.json: what a run's record held at its last checkpoint, so that a file which is lost or changed later is noticed.

    {"format": 1, "identity": ..., "checkpoint": steps, "keeps": [...], "files": {name: [bytes, sha256]}, "crc32": ...}

Written when a run begins, after each checkpoint and at the end, atomically. metrics.jsonl only grows: its entry is of
its first bytes. A merge that was killed leaves entries of segments that are gone; those that are there have to be as
they were. Runs of versions that did not write the file are held to what their configuration says. Light: the status
table reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_sweeps.files import write_text
from grpo_sweeps.tracking.lines import METRICS, is_whole
from grpo_sweeps.tracking.status import RecordError

FILE_NAME = "seal.json"
FORMAT = 1
SEGMENT = re.compile(r"segment-(\d+)_steps-(\d+)-(\d+)\.parquet")
FOLDERS = ("grams", "completions", "evals", "updates")
ALONE = ("config.yaml", "model.json")
BLOCK = 1 << 20


@dataclass(frozen=True)
class Keeps:
    """What a run keeps from one of its steps on: settings that may differ when it is gone on with.

    first: the step. completions, updates, evals: every so many steps; 0 = never. parameters: trainable ones, a record
    each per measured update. problems: of an evaluation.
    """

    first: int
    completions: int
    updates: int
    evals: int
    parameters: int
    problems: int


@dataclass(frozen=True)
class Seal:
    """What a record held. `files`: size and SHA-256 by the name below the run's folder; checkpoint: steps in the newest
    one that was written, 0 before the first."""

    identity: str = ""
    checkpoint: int = 0
    keeps: tuple[Keeps, ...] = ()
    files: dict[str, tuple[int, str]] = field(default_factory=dict)


def digest(path: Path, size: int | None = None) -> tuple[int, str]:
    """Bytes and SHA-256 of a file, or of its first `size` bytes."""
    found, read = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK if size is None else min(BLOCK, size - read)):
            found.update(block)
            read += len(block)
    return read, found.hexdigest()


def names(run_dir: Path) -> list[str]:
    """The files that a seal covers, of those that are there."""
    found = [name for name in (*ALONE, METRICS) if (run_dir / name).is_file()]
    for folder in FOLDERS:
        if (run_dir / folder).is_dir():
            found += sorted(f"{folder}/{p.name}" for p in (run_dir / folder).iterdir() if SEGMENT.fullmatch(p.name))
    return found


def write(run_dir: Path, seal: Seal) -> None:
    """Replace the run's seal atomically."""
    content = {"format": FORMAT, **asdict(seal)}
    text = json.dumps(content, sort_keys=True)
    write_text(run_dir / FILE_NAME, json.dumps({**content, "crc32": zlib.crc32(text.encode())}, sort_keys=True) + "\n")


def read(run_dir: Path) -> Seal | None:
    """The run's seal; None where there is none, or one of a later version.

    Raises:
        RecordError: one sentence, for a damaged one.
    """
    path = run_dir / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        claimed = content.pop("crc32")
        if zlib.crc32(json.dumps(content, sort_keys=True).encode()) != claimed:
            raise ValueError("it is not what its checksum belongs to")
        return _seal(content) if content["format"] == FORMAT else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {' '.join(str(error).split())[:200]}.") from error


def _seal(content: dict[str, Any]) -> Seal:
    if not is_whole(content["checkpoint"]):
        raise ValueError("its checkpoint is no number of steps")
    files = {str(name): (int(size), str(sha)) for name, (size, sha) in content["files"].items()}
    keeps = tuple(Keeps(**one) for one in content["keeps"])
    return Seal(str(content["identity"]), content["checkpoint"], keeps, files)


def rewrite(run_dir: Path, name: str, text: str, private: bool = False) -> None:
    """Replace a file that a seal may cover, and its entry there. A kill in between leaves a seal without that entry.
    private: for its owner alone.
    """
    try:
        seal = read(run_dir)
    except RecordError:
        seal = None  # what is wrong with it is said by whoever looks
    if seal is not None:
        others = {key: value for key, value in seal.files.items() if key != name}
        write(run_dir, replace(seal, files=others))
    write_text(run_dir / name, text, private)
    if seal is not None:
        write(run_dir, replace(seal, files=others | {name: digest(run_dir / name)}))


class Sealer:
    """Keeps one run's seal while its record is written. Each file is read once, metrics.jsonl what is new of it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        try:
            self.seal = read(run_dir) or Seal()
        except RecordError:
            self.seal = Seal()  # whoever goes on from it has been told
        self._known: dict[str, tuple[tuple[int, int, int], tuple[int, str]]] = {}
        self._metrics, self._read = hashlib.sha256(), 0

    def begin(self, identity: str, keeps: Keeps, checkpoint: int) -> None:
        """The run goes on from a step: what it keeps from there on, and that the seal is of what is there now."""
        before = tuple(one for one in self.seal.keeps if one.first < keeps.first)
        same = before and asdict(before[-1]) == asdict(keeps) | {"first": before[-1].first}
        self.seal = Seal(identity, checkpoint, before if same else (*before, keeps))
        self.write()

    def drop(self, checkpoint: int | None = None) -> None:
        """Forget the files, before some of them are cut: a kill in between leaves no seal that they break.

        checkpoint: steps in the one that the run goes on from.
        """
        done = self.seal.checkpoint if checkpoint is None else checkpoint
        self.seal = Seal(self.seal.identity, done, self.seal.keeps)
        write(self.run_dir, self.seal)
        self._metrics, self._read = hashlib.sha256(), 0

    def write(self, checkpoint: int | None = None) -> None:
        """Seal what is there. checkpoint: steps in the newest one, where a new one was written."""
        done = self.seal.checkpoint if checkpoint is None else checkpoint
        files = {name: self._digest(name) for name in names(self.run_dir)}
        self.seal = Seal(self.seal.identity, done, self.seal.keeps, files)
        write(self.run_dir, self.seal)

    def _digest(self, name: str) -> tuple[int, str]:
        path = self.run_dir / name
        if name == METRICS:
            with open(path, "rb") as file:
                file.seek(self._read)
                while block := file.read(BLOCK):
                    self._metrics.update(block)
                    self._read += len(block)
            return self._read, self._metrics.hexdigest()
        stat = path.stat()
        look = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if self._known.get(name, (None,))[0] != look:
            self._known[name] = look, digest(path)
        return self._known[name][1]
