"""Plans a set of runs and starts them. A single run, a sweep here and a sweep on SLURM share this; launchers differ in
`start`.

Nothing is written before every run has been composed, checked and compared with what is there: a bad one refuses the
whole sweep. Afterwards one run's failure stops no other: each gives a result, and the table at the end names those
that failed.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_sweeps import paths
from grpo_sweeps.cli import count, say
from grpo_sweeps.config import LaunchConfig, RunConfig, choices_of, flatten, shown, to_mapping
from grpo_sweeps.config.checks import check, check_device, check_functions, check_launch, check_tasks, is_fetched
from grpo_sweeps.config.choices import common
from grpo_sweeps.loop.progress import Ahead, ahead
from grpo_sweeps.sweep import preflight
from grpo_sweeps.sweep.command import command_of
from grpo_sweeps.sweep.execute import RunResult, Signals, execute
from grpo_sweeps.sweep.identity import display_names, identity, is_irrelevant
from grpo_sweeps.sweep.ledger import Decision, status_or_none
from grpo_sweeps.sweep.opening import Opening
from grpo_sweeps.sweep.origin import Origins
from grpo_sweeps.sweep.plan import Plan, PlannedRun, grid, steps_left
from grpo_sweeps.text import show
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.published import refuse_published
from grpo_sweeps.tracking.tracker import BUILT_IN, load
from grpo_sweeps.types import ConfigError

MIRROR_LOG = "mirror.log"


class RunFailed(RuntimeError):
    """A run did not finish. Raised towards Hydra once the others have had their turn; the table has been printed."""

    def __init__(self, results: Sequence[RunResult]) -> None:
        super().__init__("; ".join(f"{result.name}: {result.error}" for result in results))
        self.results = tuple(results)


Start = Callable[[Plan, Opening], list[RunResult]]  # calls Opening.submitted when the runs are with their jobs


def plan(
    configs: Sequence[RunConfig],
    asked: LaunchConfig,
    overrides: Sequence[Sequence[str]],
    command: str = "",
    here: bool = False,
    on_nodes: bool = False,
    gpu_mem_gb: float | None = None,
    choices: Sequence[Mapping[str, str]] = (),
) -> Plan:
    """Plan what to do about the runs of a command (one configuration each, with its overrides). Writes nothing.

    Args:
        here: the runs will be in this process, so their device must be one of this machine's.
        on_nodes: the runs will be jobs of a scheduler, which go on without this process.
        gpu_mem_gb: the memory of one GPU, where the user gives it.
        choices: of each run the chosen file of each group of conf/, which its record keeps; empty where not known.

    Raises:
        ConfigError: for the first run that cannot be run, and for runs that differ only in what cannot change a result.
    """
    check_launch(asked.redo, asked.wait, on_nodes, asked.require_clean and provenance.dirty())
    for config in configs:
        check(config)
    _check_one_place(configs)
    names = display_names(configs, overrides)
    identities = tuple(identity(config) for config in configs)
    kept, notes = _distinct(configs, names, identities)
    for config in _distinct_functions(kept.values()):
        check_functions(config)
    if configs[0].tracking.kind not in BUILT_IN:
        load(configs[0].tracking)  # raises for a bad tracker; a missing MLflow is reported when it copies
    runs, chosen = [], dict(zip(identities, choices, strict=True)) if choices else {}
    for run_id, (config, name) in kept.items():
        run_dir = paths.run_dir(config.runs_dir, config.sweep, run_id)
        refuse_published(run_dir.parent, "no run goes on from them")
        own = chosen.get(run_id, {})
        runs.append(PlannedRun(config, run_id, name, run_dir, Decision("start", "new"), choices=own))
    runs, origins = _with_origins(runs)
    made = Plan(tuple(runs), identities, asked.dry_run, command, tuple(notes), asked.redo, asked.wait).decided()
    due = [run.config for run in made.due]
    if here:
        for device in {config.trainer.device for config in due}:
            check_device(device)
    found = preflight.look(due, gpu_mem_gb)
    if made.dry_run:  # which downloads nothing, and shows the whole grid
        check_tasks([config for config in due if not is_fetched(config)], origins.tasks)
        unread = sorted({f"task={c.task.name}: of a hub, read when the run starts" for c in due if is_fetched(c)})
        return replace(made, notes=(*made.notes, *unread, *found.problems, *found.notes))
    if found.problems:
        raise ConfigError(found.problems[0])
    check_tasks(due, origins.tasks)
    known = [
        replace(run, made_by=origins.of(run.config, data=True)) if run.decision.action != "skip" else run
        for run in made.runs
    ]
    return replace(made, runs=tuple(known), notes=(*made.notes, *found.notes))


def _with_origins(runs: Sequence[PlannedRun]) -> tuple[list[PlannedRun], Origins]:
    """The runs with what would make them now. Problems are loaded only where a record has others to compare with."""
    records = {run.identity: provenance.read_made_by(run.run_dir) for run in runs}
    origins = Origins(made_by.code for made_by in records.values() if made_by.known)
    return [
        replace(run, made_by=origins.of(run.config, data=bool(records[run.identity].data))) for run in runs
    ], origins


def launch(
    plan: Plan, start: Start, jobs_copy: bool = False, params: Mapping[str, Any] | None = None
) -> list[RunResult]:
    """Print the plan, carry it out by `start`, print what failed. Returns one result per run, in the order of the plan.

    Args:
        jobs_copy: the jobs have their own records copied while they run (a tracker that is shared); this process only
            completes the copy at the end.
        params: the launcher's, for the table of a dry run.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once what had been started is recorded.
    """
    if plan.dry_run:
        _print_grid(plan, params or {})
        return [replace(_not_started(run), state="queued") for run in plan.runs]  # looked at: none is a failure
    if jobs_copy and plan.due:
        _prepare_store(plan)
    with Opening(plan) as opening:
        plan = opening.plan
        plan.refuse_changed()
        _print_plan(plan)
        results = {run.identity: _not_started(run) for run in plan.runs}
        for run in plan.due:
            opening.queue(run)
        if plan.due:
            copying = not jobs_copy and plan.wait
            with mirror(plan) if copying else contextlib.nullcontext():
                results |= {result.identity: result for result in start(plan, opening)}
    if plan.due and plan.wait and jobs_copy:
        with mirror(plan):
            pass
    _print_outcome(list(results.values()), plan)
    return list(results.values())


def single(composed: Any, carry_out: Callable[..., list[RunResult]] = launch) -> list[RunResult]:
    """Hydra's task function for one run without -m: the same plan and the same execution as a sweep's."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    if not hydra.launcher._target_.endswith("BasicLauncher"):
        launcher = hydra.runtime.choices["hydra/launcher"]
        raise ConfigError(
            f"hydra/launcher={launcher}: needs -m (without it the run would start on this machine); add -m, or drop it"
        )
    configs, asked = [RunConfig.from_composed(composed)], LaunchConfig.from_composed(composed)
    chosen = [choices_of(hydra.runtime.choices)]
    made = plan(configs, asked, [list(hydra.overrides.task)], command_of(hydra), here=True, choices=chosen)
    return carry_out(made, run_here)


def run_here(plan: Plan, opening: Opening) -> list[RunResult]:
    """Execute the due runs one after the other in this process. Ctrl-C and SIGTERM end the current run and start no
    other."""
    opening.submitted()  # each run's status names this process
    results: list[RunResult] = []
    with interruptible() as interrupts:
        signals = Signals(interrupted=lambda: interrupts.heard)
        for run, ahead_of_it in zip(plan.due, _ahead(plan), strict=True):
            with ahead(ahead_of_it):
                results.append(execute(run.frozen, run.run_dir, name=run.name, command=plan.command, signals=signals))
            ended = results[-1].state
            if ended == "interrupted" or interrupts.heard:
                left = len(plan.due) - len(results)
                more = "goes on from its last checkpoint when the command is given again"
                say(f"interrupted: {run.name} {more if ended == 'interrupted' else 'is ' + ended}"
                    + (f"; {left} more not started" if left else ""))  # fmt: skip
                raise KeyboardInterrupt
            free_memory()
    return results


def _ahead(plan: Plan) -> list[Ahead]:
    """Of each due run what its progress says of the sweep."""
    rows = [run.config.R * run.config.groups for run in plan.due]
    work = [one * steps_left(run) for one, run in zip(rows, plan.due, strict=True)]
    return [Ahead(at + 1, len(rows), rows[at], sum(work[at + 1 :])) for at in range(len(rows))]


def exit_code(results: Sequence[RunResult]) -> int:
    """0 when all went well, 2 when nothing failed but configurations with which no run could begin, else 1."""
    bad = [result for result in results if is_bad(result)]
    if bad and all(result.config_error for result in bad):
        return 2
    return 1 if bad else 0


def is_bad(result: RunResult) -> bool:
    """True for a run that did not finish; False also for one that waits or runs (in a job, for another command)."""
    return not result.ok and result.state not in ("queued", "running")


def mirror(plan: Plan) -> Any:
    """A context in which another process has the tracker copy the sweep's local records (with tracking=local: nothing
    does)."""
    from grpo_sweeps.tracking.mirror import Follower

    config = plan.runs[0].config
    log = Path(config.runs_dir) / config.sweep / MIRROR_LOG
    return Follower(config.sweep, config.runs_dir, config.tracking, log)


def _prepare_store(plan: Plan) -> None:
    """Make experiment and tables before the first of many jobs does. A server that is down stops nothing."""
    from grpo_sweeps.tracking.mirror import initialise

    problem = initialise(plan.runs[0].config.tracking)
    if problem:
        say(f"tracking: {problem} The runs go on without it; python -m grpo_sweeps.sync completes the copy later")


def _check_one_place(configs: Sequence[RunConfig]) -> None:
    """Require one folder and tracker: one lock, one list of jobs and one copy serve all runs of a command."""
    for key in ("sweep", "runs_dir", "tracking"):
        values = list(dict.fromkeys(getattr(config, key) for config in configs))
        if len(values) > 1:
            given = ",".join(str(value) for value in values[:3]) if key != "tracking" else "..."
            raise ConfigError(f"{key}={given}: the same for all runs of a command is needed; give one command for each")


def _distinct(
    configs: Sequence[RunConfig], names: Sequence[str], identities: Sequence[str]
) -> tuple[dict[str, tuple[RunConfig, str]], list[str]]:
    """{identity: run and its name} without repetitions (x=1,1), and a note about each; refuses runs that share an
    identity but not their configuration."""
    seen: dict[str, tuple[RunConfig, str]] = {}
    notes = []
    for config, name, run_id in zip(configs, names, identities, strict=True):
        first = seen.setdefault(run_id, (config, name))
        if first[0] is config:
            continue
        if first[0] == config:
            notes.append(f"{name}: given twice, runs once")
            continue
        one, other = flatten(to_mapping(first[0])), flatten(to_mapping(config))
        keys = [key for key in one if one[key] != other.get(key) and is_irrelevant(key, config)]
        if keys == ["trainer.steps"]:
            raise ConfigError(
                f"trainer.steps={one[keys[0]]},{other[keys[0]]}: with trainer.schedule={config.trainer.schedule} a "
                f"longer run is the shorter one taken further, so both are the same run; give the larger number"
            )
        raise ConfigError(
            f"{keys[0]}={shown(one[keys[0]])},{shown(other[keys[0]])}: cannot be an axis of a sweep, because it "
            f"does not change a run's result "
            "and both values are the same run; give one value"
        )
    return seen, notes


def _distinct_functions(kept: Iterable[tuple[RunConfig, str]]) -> list[RunConfig]:
    """One run for each different set of what `check_functions` looks at: the others need no check."""
    found = {}
    for c, _ in kept:
        own = c.task.verdict, c.objective.continuations
        found[repr((c.task.function, c.reward, c.estimator, *own))] = c
    return list(found.values())


def _not_started(run: PlannedRun) -> RunResult:
    """The result, read from the disk, of a run that this command does not start or has only handed over."""
    status, total = status_or_none(run.run_dir), run.config.trainer.steps
    step = status.step if status else 0
    why = run.decision.why
    if why == "finished":
        return RunResult(run.identity, run.name, "finished", str(run.run_dir), step, total)
    if why in ("failed", "stale", "changed"):
        why = "stale" if why == "changed" else why
        return RunResult(run.identity, run.name, why, str(run.run_dir), step, total, run.decision.reason)
    state = "running" if why == "alive" and status and status.state == "running" else "queued"
    return RunResult(run.identity, run.name, state, str(run.run_dir), step, total)


def _print_plan(plan: Plan) -> None:
    _print_head(plan)
    for run in plan.runs:
        say(f"  {run.decision.action:<8}  {run.name}  {run.run_dir}  {run.decision.reason}")
    for note in plan.notes:
        say(f"  {note}")


def _print_head(plan: Plan) -> None:
    skipped = len(plan.runs) - len(plan.due)
    line = f"sweep {plan.folder.name}: {count(len(plan.runs))}, {len(plan.due)} to do"
    line += f", {skipped} skipped" if skipped else ""
    say(line + (" (dry run: nothing is started)" if plan.dry_run else ""))
    if len(plan.runs) > 1 and (same := common(run.frozen for run in plan.runs)):
        say(f"  all: {same}")


def _print_grid(plan: Plan, params: Mapping[str, Any]) -> None:
    """Print the grid of a dry run on the standard output."""
    _print_head(plan)
    for line in [*grid(plan, params), *plan.notes]:
        show(line)


def _print_outcome(results: Sequence[RunResult], plan: Plan) -> None:
    bad = [result for result in results if is_bad(result)]
    going = sum(result.state in ("queued", "running") for result in results)
    runs = count(len(results))
    if going and (bad or plan.due):
        say(f"{going} of {runs} queued or running: neither finished nor failed")
    if not bad:
        if plan.due and not going:
            say(f"{len(results)} of {runs} finished")
        return
    say(f"{len(bad)} of {runs} did not finish:")
    width = max(len(result.name) for result in bad)
    for result in bad:
        say(f"  {result.name:<{width}}  {result.state}  {result.error or 'no reason recorded'}  log: {result.log}")


@dataclass
class _Interrupts:
    """Keeps whether Ctrl-C or SIGTERM came, because a library's bare `except` may swallow the KeyboardInterrupt."""

    heard: bool = False


@contextmanager
def interruptible() -> Iterator[_Interrupts]:
    """A context in which SIGTERM (`kill`, a cancelled allocation) leaves the state `interrupted`, as Ctrl-C does."""
    interrupts = _Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def interrupt(signum: int, frame: object) -> None:
        interrupts.heard = True
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a process in the background may ignore it
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_memory() -> None:
    """Give a finished run's memory back before the next one starts in the same process."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
