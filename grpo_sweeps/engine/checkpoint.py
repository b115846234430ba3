"""Checkpoints: all of a run's state in one folder that appears whole or not at all.

    checkpoints/step_0000025/state.pt        {"state": ..., "random": ...} by torch.save
                             manifest.json   {"format", "step", "size", "sha256"} of state.pt, {"identity"} of the run

A checkpoint is written into a temporary folder beside the others, fsynced, and renamed. Only then do older ones go, and
those of later steps too (the run went back before them). Loading reads only tensors and plain Python values
(`weights_only=True`): a checkpoint from elsewhere runs no code. A damaged one (wrong size or digest, no manifest) is
passed over for the one before it, with a line that says so. Keep at least 2 to have one before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_sweeps.files import TEMPORARY_PREFIX, fsync_directory
from grpo_sweeps.text import show

FORMAT = 1
STATE = "state.pt"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{7,})(?:\.(\d+))?")  # .1, .2: the same step again, after going back
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one sentence that names it and says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `step`: updates done. `random`: for `restore_random_states`."""

    step: int
    state: dict[str, Any]
    random: dict[str, Any]
    path: Path


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's (global) and torch's generators, CUDA's for each device, as plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, [int(k) for k in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators to what `random_states` returned. CUDA states are left out where the device count differs."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"].cpu())
    cuda = states["cuda"]
    if cuda and torch.cuda.is_available():
        if len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([s.cpu() for s in cuda])
        else:
            show(
                f"checkpoint: made with {len(cuda)} CUDA devices, here are {torch.cuda.device_count()}; "
                "CUDA's random state is not restored."
            )


def save(directory: Path | str, step: int, state: dict[str, Any], keep: int = 1, identity: str = "") -> Path:
    """Write directory/step_<step>/ atomically, then remove all but the newest `keep`; returns the folder.

    identity: of the run that it belongs to; empty where nobody is to ask.

    `state` may hold tensors, numbers, strings, None, lists, tuples and dicts, nested; anything else raises TypeError
    here and not when the run goes on. The random states are stored beside it. Raises OSError, and leaves what was there
    as it was, where it cannot be written.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint is kept.")
    _check_plain(state, "state")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    target = _free_name(directory, step)
    aside = directory / f"{TEMPORARY_PREFIX}{target.name}"
    _remove_temporaries(directory)
    try:
        aside.mkdir()
        _write_state({"state": state, "random": random_states()}, aside / STATE)
        size, digest = _measure(aside / STATE)
        manifest = {"format": FORMAT, "step": step, "size": size, "sha256": digest, "identity": identity}
        (aside / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        _fsync_file(aside / MANIFEST)
        fsync_directory(aside)
        os.replace(aside, target)
        fsync_directory(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    found = _checkpoints(directory)
    here = found.index(target)
    for old in found[:here] + found[here + keep :]:  # those of later steps belong to a past that this run has left
        _remove(old)
    return target


def _say(sentence: str) -> None:
    show(f"checkpoint: {sentence}")


def latest(
    directory: Path | str, map_location: Any = "cpu", say: Callable[[str], None] = _say, identity: str = ""
) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None where there is none. `say` gets a sentence for each damaged one.

    identity: of the run that goes on; a checkpoint of another one is passed over as well.
    """
    for path in _checkpoints(Path(directory)):
        try:
            return load(path, map_location, identity)
        except CheckpointError as error:
            say(f"{error} Trying the one before it.")
    return None


def load(path: Path | str, map_location: Any = "cpu", identity: str = "") -> Checkpoint:
    """The content of one checkpoint.

    Raises:
        CheckpointError: where it is damaged, of another format, or of another run than `identity`. One that does not
            say whose it is is taken: older versions did not.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        found = _measure(path / STATE)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("step"), int):
        raise CheckpointError(f"{path} is damaged: {MANIFEST} describes no checkpoint.")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')!r}; this version reads {FORMAT}.")
    if identity and manifest.get("identity", identity) not in ("", identity):
        raise CheckpointError(f"{path} belongs to the run {manifest['identity']}, not to {identity}.")
    if found != (manifest.get("size"), manifest.get("sha256")):
        raise CheckpointError(f"{path} is damaged: {STATE} is not what its manifest describes.")
    try:
        content = torch.load(path / STATE, map_location=map_location, weights_only=True)
        return Checkpoint(step=manifest["step"], state=content["state"], random=content["random"], path=path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors and plain values, and is not loaded.") from error
    except (RuntimeError, EOFError, KeyError, TypeError, OSError) as error:  # a state.pt that others made
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}.") from error


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoint folders, newest first."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append((int(match.group(1)), int(match.group(2) or 0), path))
    return [path for *_, path in sorted(found, reverse=True)]


def _free_name(directory: Path, step: int) -> Path:
    """The folder step_<step>, with the next free number behind it where the step was saved before."""
    again = [p for p in _checkpoints(directory) if int(p.name[5:].partition(".")[0]) == step]
    if not again:
        return directory / f"step_{step:07d}"
    return directory / f"step_{step:07d}.{int(again[0].name.partition('.')[2] or 0) + 1}"


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) not in _PLAIN:
                raise TypeError(f"{where}: a checkpoint's keys are strings or numbers, not {type(key).__name__}.")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]")
    else:
        raise TypeError(f"{where}: a checkpoint holds tensors and plain values, not {type(value).__name__}.")


def _write_state(content: dict[str, Any], path: Path) -> None:
    """torch.save, down to the disk. torch makes a RuntimeError of a full disk, which becomes an OSError again."""
    try:
        with open(path, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path} could not be written: {' '.join(str(cause).split())[:200]}") from error


def _measure(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Take the folder out of sight in one step, then delete it. A kill in between leaves no half checkpoint."""
    grave = path.with_name(f"{TEMPORARY_PREFIX}old-{path.name}")
    os.replace(path, grave)
    shutil.rmtree(grave)


def _remove_temporaries(directory: Path) -> None:
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(path)
