"""Compares what a run holds with what it should hold: one finding per thing that is not so.

`examine` is for a run as it lies there (`verify`, the report), `before_going_on` for one that is about to train on,
`at_the_end` for one that has just trained its last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_sweeps.redaction import holds_hidden
from grpo_sweeps.tracking import seal as seals
from grpo_sweeps.tracking.expected import Expected, expected
from grpo_sweeps.tracking.glance import (
    AFRESH,
    Finding,
    NotWhole,
    in_words,
    lost_checkpoints,
    lost_files,
    says_otherwise,
)
from grpo_sweeps.tracking.glance import steps_in_words as words
from grpo_sweeps.tracking.holdings import SAME, Fault, Held, hold
from grpo_sweeps.tracking.lines import METRICS
from grpo_sweeps.tracking.local import CONFIG, read_config
from grpo_sweeps.tracking.seal import FOLDERS, Seal
from grpo_sweeps.tracking.status import FILE_NAME as STATUS
from grpo_sweeps.tracking.status import RecordError, RunStatus, read_status

ATTEMPTS = 5


def examine(
    run_dir: Path, states: bool = False, identity_of: Callable[[Mapping[str, Any]], str] | None = None
) -> list[Finding]:
    """Everything that is wrong with the record of a run.

    Args:
        run_dir: its folder. One that no run has begun in gives nothing.
        states: read the checkpoints' states as well.
        identity_of: the identity of a configuration, to compare with the folder's name.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _examine(run_dir, states, identity_of)
        except FileNotFoundError:  # a merge took a segment away meanwhile
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _examine(
    run_dir: Path, states: bool, identity_of: Callable[[Mapping[str, Any]], str] | None
) -> list[Finding]:  # fmt: skip
    found: list[Finding] = []
    run = run_dir.name
    try:
        status: RunStatus | None = read_status(run_dir)
        assert status is not None
        run = status.name or run
    except RecordError as error:
        status = None
        text = f"{_after_path(error).partition(':')[0]}; the command that made the run makes it again from its records"
        found.append(Finding(run, STATUS, "whole", "gone or damaged", text))
    if status is not None and status.state == "queued" and not status.step:
        return []  # it has not begun
    if status is not None and status.identity not in ("", run_dir.name):
        found.append(Finding(run, STATUS, run_dir.name, status.identity, f"is of the run {status.identity}"))
    config, faults = _config(run, run_dir)
    seal, more = _seal(run, run_dir)
    found += [*faults, *more]
    if seal is not None and seal.keeps and config and identity_of is not None:
        found += _identity(run, run_dir, config, identity_of)
    alive = status is not None and status.state == "running" and not status.stale()
    every, state = _measured(config), status.state if status is not None else "interrupted"
    held = hold(run_dir, seal, every, states)
    found += [_of_fault(run, fault) for fault in held.faults if not (alive and fault.torn)]
    if seal is not None and not alive:
        gone = [name for name in lost_files(run_dir, seal) if name != CONFIG]
        found += [Finding(run, name, "there", "gone", "is gone") for name in gone]
    if status is not None and state != "queued":
        found += _of_status(run, status, held, config, seal, alive)
    elif status is None:
        found += _steps(run, expected(config, seal, _reached(held, seal), False), held)
    checkpoints = _checkpoints(run, run_dir, held, seal)
    if status is not None and not alive and state not in ("finished", "queued"):
        checkpoints = checkpoints or lost_checkpoints(run, run_dir, status, seal)
    return [*found, *checkpoints]


def _config(run: str, run_dir: Path) -> tuple[dict[str, Any], list[Finding]]:
    try:
        config = read_config(run_dir)
    except RecordError as error:
        return {}, [Finding(run, CONFIG, "whole", "damaged", f"cannot be read ({_after_path(error)})")]
    return config, [] if config else [Finding(run, CONFIG, "there", "gone", "is gone")]


def _seal(run: str, run_dir: Path) -> tuple[Seal | None, list[Finding]]:
    try:
        seal = seals.read(run_dir)
    except RecordError as error:
        return None, [Finding(run, seals.FILE_NAME, "whole", "damaged", _after_path(error))]
    if seal is not None and seal.identity not in ("", run_dir.name):
        text = f"is of the run {seal.identity}"
        return None, [Finding(run, seals.FILE_NAME, run_dir.name, seal.identity, text)]
    return seal, []


def _identity(
    run: str, run_dir: Path, config: Mapping[str, Any], identity_of: Callable[[Mapping[str, Any]], str]
) -> list[Finding]:
    if holds_hidden(config):
        return []  # the identity is that of the configuration with its secrets
    try:
        identity = identity_of(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [Finding(run, CONFIG, "whole", "damaged", f"is no configuration ({' '.join(str(error).split())})")]
    if identity == run_dir.name:
        return []
    return [Finding(run, CONFIG, run_dir.name, identity, f"is that of another run ({identity})")]


def _measured(config: Mapping[str, Any]) -> Callable[[int], bool]:
    analysis = config.get("analysis")
    every = analysis.get("every") if isinstance(analysis, Mapping) else None
    return lambda step: isinstance(every, int) and bool(every) and step % every == 0


def _of_fault(run: str, fault: Fault) -> Finding:
    return Finding(run, fault.name, "whole", "cut short" if fault.torn else "damaged", fault.reason)


def _of_status(
    run: str, status: RunStatus, held: Held, config: Mapping[str, Any], seal: Seal | None, alive: bool
) -> list[Finding]:
    """What the status says against what is there, and what is there against the configuration."""
    found = []
    reached, finished = _reached(held, None), status.state == "finished"
    if finished and status.step < status.total:
        text = f"says finished at step {status.step} of {status.total}"
        found.append(Finding(run, STATUS, f"{status.total} steps", f"{status.step} steps", text))
    asked = _get(config, "trainer", "steps")
    if finished and seal is not None and seal.keeps and isinstance(asked, int) and not status.reached(asked):
        text = f"says finished at step {status.step}, and {CONFIG} asks for {asked}"
        found.append(Finding(run, STATUS, f"{asked} steps", f"{status.step} steps", text))
    if not isinstance(asked, int):
        return found  # too little is known of what it should hold
    if (finished and reached != status.step) or (seal is None and not alive and status.step > reached):
        found.append(says_otherwise(run, status, reached))
    steps = status.step if finished else reached if alive else _reached(held, seal)
    steps = max(steps, status.step) if seal is None and not alive else steps
    found += _steps(run, expected(config, seal, steps, finished), held)
    if not alive and not finished and status.state != "failed":
        found += _half_a_step(run, held, steps)
    return found


def _reached(held: Held, seal: Seal | None) -> int:
    """Steps up to the last one of which there is a line, or a checkpoint."""
    return max(max(held.trained, default=-1) + 1, seal.checkpoint if seal is not None else 0)


def _steps(run: str, want: Expected, held: Held) -> list[Finding]:
    """The records of the steps that were done."""
    every = range(want.steps)
    found = []
    if lost := [step for step in every if step not in held.trained]:
        found.append(_lacks(run, METRICS, f"{want.steps} steps", want.steps - len(lost), "the training of", lost))
    if not any(held.rows.values()) and want.completions is None:
        return found  # lines alone, which no record was ever written beside
    if want.groups is not None:
        lost = [step for step in every if held.count("grams", step) < (want.groups or 0)]
        if lost:
            have = sum(held.count("grams", step) for step in every)
            found.append(_lacks(run, "grams/", f"{want.steps * want.groups} groups", have, "groups of", lost))
    bare = [step for step in held.bare if step < want.steps]
    if bare and want.gram_every:
        count = sum(held.bare.values())
        found.append(_lacks(run, "grams/", "a Gram per measured group", f"{count} without", "Grams of", bare))
    for name, wanted, what in (("completions", want.completions, "completions"), ("updates", want.updates, "records")):
        if wanted and (lost := [step for step, rows in wanted.items() if held.count(name, step) != rows]):
            have = sum(held.count(name, step) for step in wanted)
            found.append(_lacks(run, f"{name}/", f"{sum(wanted.values())} {what}", have, f"{what} of", lost))
    return [*found, *_evaluations(run, want, held), *(_agreement(run, held) if want.updates is not None else ())]


def _agreement(run: str, held: Held) -> list[Finding]:
    """Whether records and lines of metrics are of the same run, where no seal says so."""
    found = []
    for folder, (metric, *_) in SAME.items():
        if steps := held.differing(folder):
            text = f"holds other records of {words(steps)} than {metric} in {METRICS} was made from"
            found.append(Finding(run, f"{folder}/", "as logged", "others", text))
    if steps := held.strangers():
        text = f"holds completions of groups that {words(steps)} did not have"
        found.append(Finding(run, "completions/", "of the groups in grams/", "others", text))
    return found


def _evaluations(run: str, want: Expected, held: Held) -> list[Finding]:
    if want.evals is None:
        return []
    most = max((held.count("evals", step) for step in want.evals), default=0)  # where the number is not known
    wanted = {step: max(1, most) if n is None else n for step, n in want.evals.items()}
    found, total = [], len(wanted)
    if lost := [step for step, n in wanted.items() if held.count("evals", step) < n]:
        of = "problems evaluated before"
        found.append(_lacks(run, "evals/", f"{total} evaluations", total - len(lost), of, lost))
    if lost := [step for step in wanted if step not in held.evaluated]:
        found.append(_lacks(run, METRICS, f"{total} evaluations", total - len(lost), "the evaluation before", lost))
    return found


def _lacks(run: str, what: str, wanted: str, have: object, of: str, steps: list[int]) -> Finding:
    return Finding(run, what, wanted, str(have), f"lacks {of} {words(steps)}")


def _half_a_step(run: str, held: Held, steps: int) -> list[Finding]:
    """Records of steps that have no line of metrics: of an interrupted run, whose last lines may be lost."""
    later = {step: name for name in FOLDERS if name != "evals" for step in held.rows.get(name, {}) if step >= steps}
    later |= {step: "evals" for step in held.rows.get("evals", {}) if step >= steps and step not in held.evaluated}
    if not later:
        return []
    text = (
        f"holds nothing of {words(later)}, of which {later[min(later)]}/ does: it was cut, or the run killed just then"
    )
    return [Finding(run, METRICS, f"lines of {words(later)}", "none", text)]


def _checkpoints(run: str, run_dir: Path, held: Held, seal: Seal | None) -> list[Finding]:
    found = []
    for one in held.checkpoints:
        if one.fault:
            found.append(Finding(run, one.name, "whole", "damaged", one.fault))
        elif one.identity not in ("", run_dir.name) and seal is not None and seal.identity == run_dir.name:
            found.append(Finding(run, one.name, run_dir.name, one.identity, f"belongs to the run {one.identity}"))
    return found


def before_going_on(run_dir: Path, config: Mapping[str, Any], done: int, identity: str = "") -> None:
    """Check the record of the steps that a checkpoint holds, before training goes on from it.

    Args:
        run_dir: the run's folder.
        config: its configuration in the written form.
        done: steps in the checkpoint that was found; 0 where there is none.
        identity: the run's; "" where nobody knows it.

    Raises:
        NotWhole: where training would throw records away or go on from some that are not whole.
    """
    name = f"R={config.get('R')} seed={config.get('seed')}"
    status = None
    try:
        status = read_status(run_dir)
        name = status.name or name
        seal = seals.read(run_dir)
    except RecordError as error:
        if status is not None:
            raise NotWhole(f"{_after_path(error)}; {AFRESH}") from error
        seal = seals.read(run_dir)
    if not done:
        known = status or RunStatus("interrupted", identity=identity)
        if found := lost_checkpoints(name, run_dir, known, seal):
            raise NotWhole(f"{in_words(found)}; {AFRESH}")
        return
    held = hold(run_dir, seal, _measured(config))
    said = ("cut off", "belongs to")
    unusable = [one for one in held.faults if "segment-" in one.name or any(word in one.reason for word in said)]
    found = [_of_fault(name, fault) for fault in unusable]
    found += _steps(name, expected(config, seal, done, False), held)
    if found:
        raise NotWhole(f"{in_words(found)}; {AFRESH}")


def at_the_end(run_dir: Path, config: Mapping[str, Any], steps: int) -> None:
    """Check the whole record of a run that has done its last step. Raises NotWhole."""
    name = f"R={config.get('R')} seed={config.get('seed')}"
    try:
        seal = seals.read(run_dir)
    except RecordError as error:
        raise NotWhole(f"its record is not whole: {_after_path(error)}; {AFRESH}", trained=True) from error
    held = hold(run_dir, seal, _measured(config))
    found = [_of_fault(name, fault) for fault in held.faults]
    found += _steps(name, expected(config, seal, steps, True), held)
    if found:
        raise NotWhole(f"its record is not whole: {in_words(found)}; {AFRESH}", trained=True)


def _get(config: Mapping[str, Any], part: str, key: str) -> Any:
    found = config.get(part)
    return found.get(key) if isinstance(found, Mapping) else None


def _after_path(error: object) -> str:
    """What an error says of a file, without the file's place."""
    text = " ".join(str(error).split()).rstrip(".")
    path, _, rest = text.partition(" ")
    return rest if "/" in path else text
