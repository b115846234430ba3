"""The credit of one run: its last checkpoint -> completions and values -> tables, figure, page and manifest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_sweeps.credit.page import (
    credit_frame,
    profile_frame,
    profile_plot,
    quantities,
    render_page,
    segments,
    shares_frame,
    unit_of,
)
from grpo_sweeps.credit.sampling import Plan, Sampled, choose, draw
from grpo_sweeps.credit.shares import LEAST_CONTINUATIONS, Shares, shares
from grpo_sweeps.engine.policy import resolve_device
from grpo_sweeps.loop.keep import Keeper
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.paths import sweep_names, working_directory_kept
from grpo_sweeps.publish.drawing import rendered
from grpo_sweeps.publish.formats import csv
from grpo_sweeps.publish.page import files_of, now, versions, with_manifest, write
from grpo_sweeps.redaction import redact
from grpo_sweeps.sweep.named import find_run, frozen_config
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.checkpoints import FOLDER
from grpo_sweeps.tracking.status import RunStatus
from grpo_sweeps.types import ConfigError, Problem

if TYPE_CHECKING:
    from grpo_sweeps.credit.__main__ import CreditOptions

PROBLEMS = ("train", "held_out")
NOTHING = "All rewards of each problem are equal: there is no variance to share."


@dataclass(frozen=True)
class Result:
    """What was found, and the page's path."""

    shares: Shares
    page: Path


def check(options: CreditOptions) -> None:
    """Raise ConfigError for the first option out of range."""
    least = {"prompts": 2, "rollouts": 1, "continuations": LEAST_CONTINUATIONS, "every": 1, "seed": 0}
    for key, value in least.items():
        if getattr(options, key) < value:
            raise ConfigError(f"credit: {key}={getattr(options, key)}: {value} or more is needed")
    if options.problems not in PROBLEMS:
        raise ConfigError(f"credit: problems={options.problems}: allowed are {', '.join(PROBLEMS)}")


def build(options: CreditOptions, command: str, say: Callable[[str], None]) -> Result:
    """Sample, estimate and write everything.

    Raises:
        ConfigError: for options, a run or a checkpoint that cannot be used.
        OSError: where the folder cannot be written.
    """
    check(options)
    start = time.perf_counter()
    runs_dir = Path(options.runs_dir)
    if not options.sweep:
        raise ConfigError(f"credit: sweep= is needed; choose one of {', '.join(sweep_names(runs_dir)) or '(none)'}")
    run_dir, status = find_run("credit", runs_dir, options.sweep, options.run)
    setup, step = load_run(run_dir, status, options.device, say)
    problems = _problems(setup, options)
    say(f"run {run_dir.name} ({status.name}, {status.state}): checkpoint of step {step}")
    plan = Plan(options.rollouts, options.continuations, options.every, options.seed)
    with working_directory_kept():  # the rewards are the run's
        sampled = draw(setup, problems, plan)
    setup.close()
    found = shares(sampled.values, sampled.starts)
    seconds = time.perf_counter() - start
    say(f"{sampled.drawn} continuations of {sampled.prefixes} prefixes in {seconds:.0f} s")
    out = Path(options.out or Path("reports") / options.sweep / "credit")
    files = _files(options, command, setup, sampled, found, _head(options, setup, run_dir, status, step))
    write(out, with_manifest(files, _manifest(options, command, run_dir, status, step, sampled, seconds)))
    return Result(found, out / "index.html")


def _problems(setup: Setup, options: CreditOptions) -> list[Problem]:
    problems = setup.data.train if options.problems == "train" else setup.data.held_out
    if len(problems) < options.prompts:
        raise ConfigError(
            f"credit: prompts={options.prompts}: the task has {len(problems)} {options.problems} problems; allowed are "
            "as many at most"
        )
    return choose(problems, options.prompts, options.seed)


def _setting(options: CreditOptions, sampled: Sampled) -> str:
    kind = "training" if options.problems == "train" else "held-out"
    unit = "token" if options.every == 1 else f"{options.every} tokens"
    return (
        f"{len(sampled.problems)} {kind} problems, {options.rollouts} completions of each; a value every {unit} from "
        f"{options.continuations} continuations."
    )


def _head(options: CreditOptions, setup: Setup, run_dir: Path, status: RunStatus, step: int) -> dict[str, str]:
    config = setup.config
    parts = [
        f"sweep {options.sweep}", f"run {run_dir.name}", status.name, f"after {step} updates ({status.state})",
        f"model {config.model.name}", f"task {config.task.name}", f"reward {config.reward.target}",
        f"temperature {config.rollout.temperature:g}", f"at most {config.rollout.max_new_tokens} tokens",
    ]  # fmt: skip
    return {
        "title": f"Credit of {unit_of(options.every)}s",
        "subtitle": " · ".join(part.removeprefix("reward grpo_sweeps.") for part in parts),
        "unit": unit_of(options.every),
    }


def _files(
    options: CreditOptions, command: str, setup: Setup, sampled: Sampled, found: Shares, head: dict[str, str]
) -> dict[str, bytes]:
    """All files but the manifest, by name."""
    rows, setting = segments(sampled, setup.policy.tokenizer), _setting(options, sampled)
    plot = profile_plot(found, options.every, setting)
    images = rendered([plot])
    head |= {
        "setting": setting,
        "remark": "" if found.variance.mean > 0 else NOTHING,
        "command": redact(command),
        "made": f"Commit {provenance.commit() or 'unknown'}, seed {options.seed}.",
    }
    prompts = [setup.prompt(problem) for problem in sampled.problems]
    texts = {
        "index.html": render_page(head, found, sampled, rows, quantities(found, options.every), prompts, plot, images),
        "credit.csv": csv(credit_frame(sampled, rows)),
        "profile.csv": csv(profile_frame(found, options.every)),
        "shares.csv": csv(shares_frame(found, options.every)),
    }
    return files_of(texts, images)


def _manifest(
    options: CreditOptions, command: str, run_dir: Path, status: RunStatus, step: int, sampled: Sampled, seconds: float
) -> dict[str, Any]:  # fmt: skip
    """The manifest: which run, code, command and random numbers. It names no host and no user."""
    return {
        "run": {
            "sweep": options.sweep, "identity": run_dir.name, "name": status.name, "state": status.state,
            "step": step, "total": status.total, "commit": status.commit, "dirty": status.dirty,
            "command": redact(status.command),
        },
        "commit": provenance.commit(), "dirty": provenance.dirty(), "versions": versions(), "command": redact(command),
        "options": {key: value for key, value in asdict(options).items() if key not in ("out", "runs_dir")},
        "seeds": "row_seed(seed, 'credit rollout' or 'credit value', problem, ...) of engine/rollouts.py",
        "problems": [problem.id for problem in sampled.problems],
        "prefixes": sampled.prefixes, "continuations": sampled.drawn, "seconds": round(seconds, 1),
        "made": now(),
    }  # fmt: skip


def load_run(run_dir: Path, status: RunStatus, device: str, note: Callable[[str], None]) -> tuple[Setup, int]:
    """The run with the parameters of its newest complete checkpoint, and the number of updates behind them.

    Raises:
        ConfigError: without such a checkpoint, and for what `prepare` refuses.
    """
    if not any((run_dir / FOLDER).glob("step_*")):
        raise _without_checkpoint(run_dir, status)
    config = frozen_config("credit", run_dir)
    try:
        resolve_device(device)
    except ConfigError as error:
        raise ConfigError(f"credit: {str(error).removeprefix('trainer.')}") from None
    config = dataclasses.replace(
        config,
        trainer=dataclasses.replace(config.trainer, device=device),
        analysis=dataclasses.replace(config.analysis, every=0),  # nothing is differentiated
    )
    setup = prepare(config)
    step = Keeper(setup, run_dir, note).resume()
    if not step:
        raise _without_checkpoint(run_dir, status)
    return setup, step


def _without_checkpoint(run_dir: Path, status: RunStatus) -> ConfigError:
    return ConfigError(
        f"credit: run={run_dir.name} ({status.state} at step {status.step}): no whole checkpoint in "
        f"{run_dir / FOLDER}; choose a run that has one"
    )
