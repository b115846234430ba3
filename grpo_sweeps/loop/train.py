"""One run from its configuration: evaluate, step, record, checkpoint; resumes where its folder's last checkpoint
stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.loop.budget import Budget
from grpo_sweeps.loop.evaluate import evaluate
from grpo_sweeps.loop.inner import take_step
from grpo_sweeps.loop.keep import Keeper
from grpo_sweeps.loop.progress import RunProgress
from grpo_sweeps.loop.results import relative_entropy
from grpo_sweeps.loop.setup import Setup, due, prepare
from grpo_sweeps.loop.watch import Stopped, Watch
from grpo_sweeps.tracking.findings import at_the_end, before_going_on
from grpo_sweeps.tracking.lines import SAMPLER
from grpo_sweeps.tracking.local import LocalRecord, forget_kept_aside, read_metrics, read_status
from grpo_sweeps.tracking.model import write_model
from grpo_sweeps.tracking.seal import Keeps
from grpo_sweeps.tracking.status import FILE_NAME as STATUS
from grpo_sweeps.tracking.status import seconds_since_start
from grpo_sweeps.tracking.symptoms import Course, known
from grpo_sweeps.tracking.weights import came_from

NOT_TRAINED_ON = ("resample/discarded_rollouts", "value/continuations")  # what a step draws beside its own rollouts


def train(config: RunConfig, run_dir: Path, watch: Watch | None = None, name: str = "") -> None:
    """Train to `config.trainer.steps` updates, or until `config.trainer.tokens` are sampled, and leave the local record
    in `run_dir`.

    Args:
        config: the run.
        run_dir: its folder; a checkpoint there is gone on from.
        watch: told of every step and asked whether to stop.
        name: what to call the run in its progress.

    Raises:
        Stopped: when `watch` asked for it; a checkpoint holds every step that was done.
        ConfigError: before the first step, for a model, data or function that cannot be used.
        FloatingPointError: when the run has diverged.
        RewardStopped: when a reward took longer than `reward_timeout` or ended its process.
        GramCheckError: when a measured Gram is inconsistent with the gradient.
        NotWhole: before the first step, where what the folder holds is not what its checkpoint goes on from, so that
            records would be thrown away; after the last one, where the record does not hold every step.
    """
    watch = watch or Watch()
    startup = _startup()
    began = time.perf_counter()
    setup = prepare(config, watch.say)
    startup["time/load"] = time.perf_counter() - began
    try:
        _train(setup, run_dir, watch, name, startup)
    finally:
        setup.close()


def _train(setup: Setup, run_dir: Path, watch: Watch, name: str, startup: dict[str, float]) -> None:
    """The steps that are left. startup: seconds by part, logged with the first of them."""
    config = setup.config
    watch.loaded(setup.data)
    budget = Budget(config.trainer, setup.tally)
    identity, written = _identity(run_dir), to_mapping(config)
    keeper = Keeper(setup, run_dir, watch.note, identity)
    first = done = keeper.resume()
    if done > config.trainer.steps:
        return  # the folder holds a longer run than was asked for
    before_going_on(run_dir, written, done, identity)
    label = name or f"R={config.R} seed={config.seed}"
    with LocalRecord(run_dir) as record, RunProgress(label, budget.steps(done), done) as progress:
        record.begin(identity, _keeps(setup, done))  # what an interrupted run wrote past its checkpoint is done again
        source = {} if config.model.random else came_from(config.model.path, config.model.dtype)
        write_model(run_dir, setup.policy.model.config.to_dict(), config.model.random, source)
        watch.begin(done)
        logged = read_metrics(run_dir).to_dict("records")
        if sentence := _other_sampler(setup, logged, done):
            watch.note(sentence)
        course = _course(config, run_dir, logged)
        try:
            while not budget.over(done):
                step = done
                if due(step, config.trainer.eval_every):
                    _evaluate(setup, record, progress, watch, step)
                before = {"rollouts": _rollouts_before(setup, step), "weights/norm": setup.optimizer.weights_norm()}
                result = take_step(setup, step)
                setup.tally.discarded += sum(int(result.metrics.get(name, 0)) for name in NOT_TRAINED_ON)
                watch.guard()
                record.log_groups(result.groups)
                record.log_completions(result.completions)
                record.log_updates(result.updates)
                metrics = {**result.metrics, **relative_entropy(setup, result.metrics), **before, **budget.take(result)}
                metrics[SAMPLER + setup.sampler.name] = 1.0
                record.log_metrics(step, metrics | (startup | _forms(setup) if step == first else {}))
                done = step + 1
                progress.total = budget.steps(done)
                progress.step(done, result.metrics)
                course.add(metrics)
                for sentence in course.notes(ended=budget.over(done)):
                    watch.note(sentence)
                keeper.after_step(record, done, last=budget.over(done))
                watch(done, progress.total, result.metrics)
            if budget.spent:
                watch.spent(done, budget.sentence(done))
            if config.trainer.eval_every:
                _evaluate(setup, record, progress, watch, done)
        except Stopped:
            keeper.save(record, done)
            raise
    at_the_end(run_dir, written, done)
    forget_kept_aside(run_dir)


def _identity(run_dir: Path) -> str:
    """The run's identity by its status; empty where it has none."""
    return read_status(run_dir).identity if (run_dir / STATUS).is_file() else ""


def _keeps(setup: Setup, first: int) -> Keeps:
    """What the run keeps from step `first` on."""
    analysis, trainer = setup.config.analysis, setup.config.trainer
    parameters = sum(p.requires_grad for _, p in setup.policy.model.named_parameters())
    problems = len({problem.id for problem in setup.data.held_out[: trainer.eval_problems]})
    every = analysis.keep_completions_every, analysis.update_every, trainer.eval_every
    return Keeps(first, *every, parameters=parameters, problems=problems)


_started: list[float] = []  # seconds that the process had lived when its first run began


def _startup() -> dict[str, float]:
    """`time/start` of the process's first run: imports, configuration, the record's folder."""
    lived = seconds_since_start()
    if _started or lived is None:
        return {}
    _started.append(lived)
    return {"time/start": lived}


def _forms(setup: Setup) -> dict[str, float]:
    """`gram_forms/NAME`: share of the weights that this form has measured since the start; see `engine.gram.linear`."""
    taken = setup.gram.forms_taken if setup.gram is not None else {}
    return {f"gram_forms/{form}": count / sum(taken.values()) for form, count in taken.items()}


def _other_sampler(setup: Setup, logged: Sequence[Mapping[Any, Any]], done: int) -> str:
    """A sentence where the last step that was done was drawn by another engine."""
    names = [
        [str(name) for name, value in row.items() if str(name).startswith(SAMPLER) and value == 1] for row in logged
    ]
    last = next((found[0].removeprefix(SAMPLER) for found in reversed(names) if found), setup.sampler.name)
    if last == setup.sampler.name:
        return ""
    return f"rollouts are sampled by {setup.sampler.name} from step {done} on, and were by {last} before"


def _course(config: RunConfig, run_dir: Path, logged: Sequence[Mapping[Any, Any]]) -> Course:
    """The run up to its checkpoint, as it was logged, and what its status says of it already."""
    course = Course(to_mapping(config))
    for row in logged:
        course.add(known(row))
    if (run_dir / STATUS).is_file():
        course.said(read_status(run_dir).notes)
    return course


def _rollouts_before(setup: Setup, step: int) -> float:
    """Rollouts drawn for training before `step`, discarded ones and continuations too: what an evaluation before that
    step has behind it."""
    return float(step * setup.config.groups * setup.config.R + setup.tally.discarded)


def _evaluate(setup: Setup, record: LocalRecord, progress: RunProgress, watch: Watch, step: int) -> None:
    metrics, records = evaluate(setup, step, watch.check)
    record.log_evals(records)
    record.log_metrics(step, {**metrics, "rollouts": _rollouts_before(setup, step)})
    progress.evaluated(step, metrics)
