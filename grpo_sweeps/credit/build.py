"""The credit of one run: checkpoint -> completions and values -> tables, figure, page and manifest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_sweeps.credit.figure import profile_plot
from grpo_sweeps.credit.options import Options
from grpo_sweeps.credit.page import render_page
from grpo_sweeps.credit.runs import find_run, load_run
from grpo_sweeps.credit.sampling import Plan, Sampled, choose, draw
from grpo_sweeps.credit.shares import Shares, shares
from grpo_sweeps.credit.tables import credit_frame, profile_frame, quantities, segments, shares_frame, unit_of
from grpo_sweeps.credit.values import LEAST_CONTINUATIONS
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.report.drawing import render
from grpo_sweeps.report.formats import csv
from grpo_sweeps.report.manifest import public, versions
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.atomic import write_bytes
from grpo_sweeps.tracking.status import RunStatus
from grpo_sweeps.types import ConfigError, Problem

PROBLEMS = ("train", "held_out")
NOTHING = "All rewards of each problem are equal: there is no variance to share."


@dataclass(frozen=True)
class Result:
    """What was found, and the page's path."""

    shares: Shares
    page: Path


def check(options: Options) -> None:
    """Raise ConfigError for the first option out of range."""
    least = {"prompts": 2, "rollouts": 1, "continuations": LEAST_CONTINUATIONS, "every": 1, "seed": 0}
    for key, value in least.items():
        if getattr(options, key) < value:
            raise ConfigError(f"credit: {key}={getattr(options, key)}: {value} or more is needed")
    if options.problems not in PROBLEMS:
        raise ConfigError(f"credit: problems={options.problems}: allowed are {', '.join(PROBLEMS)}")


def build(options: Options, command: str, say: Callable[[str], None]) -> Result:
    """Sample, estimate and write everything.

    Raises:
        ConfigError: for options, a run or a checkpoint that cannot be used.
        OSError: where the folder cannot be written.
    """
    check(options)
    start = time.perf_counter()
    run_dir, status = find_run(Path(options.runs_dir), options.sweep, options.run)
    setup, step = load_run(run_dir, status, options.device, say)
    problems = _problems(setup, options)
    say(f"run {run_dir.name} ({status.name}, {status.state}): checkpoint of step {step}")
    plan = Plan(options.rollouts, options.continuations, options.every, options.seed)
    sampled = draw(setup, problems, plan)
    found = shares(sampled.values, sampled.starts)
    seconds = time.perf_counter() - start
    say(f"{sampled.drawn} continuations of {sampled.prefixes} prefixes in {seconds:.0f} s")
    out = Path(options.out or Path("reports") / options.sweep / "credit")
    files = _files(options, command, setup, sampled, found, _head(options, setup, run_dir, status, step))
    record = _manifest(options, command, run_dir, status, step, sampled, seconds, [*files, "manifest.json"])
    files["manifest.json"] = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_bytes(out / name, content)
    return Result(found, out / "index.html")


def _problems(setup: Setup, options: Options) -> list[Problem]:
    problems = setup.data.train if options.problems == "train" else setup.data.held_out
    if len(problems) < options.prompts:
        raise ConfigError(
            f"credit: prompts={options.prompts}: the task has {len(problems)} {options.problems} problems; allowed are "
            "as many at most"
        )
    return choose(problems, options.prompts, options.seed)


def _setting(options: Options, sampled: Sampled) -> str:
    kind = "training" if options.problems == "train" else "held-out"
    unit = "token" if options.every == 1 else f"{options.every} tokens"
    return (
        f"{len(sampled.problems)} {kind} problems, {options.rollouts} completions of each; a value every {unit} from "
        f"{options.continuations} continuations."
    )


def _head(options: Options, setup: Setup, run_dir: Path, status: RunStatus, step: int) -> dict[str, str]:
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
    options: Options, command: str, setup: Setup, sampled: Sampled, found: Shares, head: dict[str, str]
) -> dict[str, bytes]:
    """Everything but the manifest."""
    rows, setting = segments(sampled, setup.policy.tokenizer), _setting(options, sampled)
    plot = profile_plot(found, options.every, setting)
    images = render(plot)
    head |= {
        "setting": setting,
        "remark": "" if found.variance.mean > 0 else NOTHING,
        "command": public(command),
        "made": f"Commit {provenance.commit() or 'unknown'}, seed {options.seed}.",
    }
    prompts = [setup.prompt(problem) for problem in sampled.problems]
    texts = {
        "index.html": render_page(head, found, sampled, rows, quantities(found, options.every), prompts, plot, images),
        "credit.csv": csv(credit_frame(sampled, rows)),
        "profile.csv": csv(profile_frame(found, options.every)),
        "shares.csv": csv(shares_frame(found, options.every)),
    }
    files = {name: text.encode("utf-8") for name, text in texts.items()}
    return files | {name: data for name, data in images.items() if not name.endswith(".svg")}


def _manifest(
    options: Options, command: str, run_dir: Path, status: RunStatus, step: int, sampled: Sampled, seconds: float,
    files: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Which run, which code, which command, which random numbers. No host, no user."""
    return {
        "run": {
            "sweep": options.sweep, "identity": run_dir.name, "name": status.name, "state": status.state,
            "step": step, "total": status.total, "commit": status.commit, "dirty": status.dirty,
            "command": public(status.command),
        },
        "commit": provenance.commit(), "dirty": provenance.dirty(), "versions": versions(), "command": public(command),
        "options": {key: value for key, value in asdict(options).items() if key not in ("out", "runs_dir")},
        "seeds": "row_seed(seed, 'credit rollout' or 'credit value', problem, ...) of engine/sampler.py",
        "problems": [problem.id for problem in sampled.problems],
        "prefixes": sampled.prefixes, "continuations": sampled.drawn, "seconds": round(seconds, 1),
        "made": datetime.now(UTC).isoformat(timespec="seconds"), "files": sorted(files),
    }  # fmt: skip
