"""python tools/made_sweep.py [runs=100] [steps=1000] [metrics=20] [groups=4] [R=4] [seed=0] [sweep=made] [runs_dir=DIR]

Writes the records of a sweep that was never trained, as a finished one leaves them, Grams included: to time `report`,
`status` and `sync` on a size that takes days to train. The numbers are random and mean nothing.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import Completion, EvalRecord, GroupRecord

OPTIONS = {"runs": 100, "steps": 1000, "metrics": 20, "groups": 4, "R": 4, "seed": 0}
DIMENSIONS = 64  # of the made-up gradients: their Grams have full rank
EVAL_EVERY = 250
COMPACT_EVERY = 200  # steps, as checkpoints do
NAMED = (
    "reward", "reward_std", "frac_reward_zero_std", "grad_norm", "entropy", "completions/mean_length", "learning_rate",
    "step_time", "num_tokens", "rollouts", "spectral/groups", "spectral/effective_rank", "spectral/top1_fraction",
    "spectral/stable_rank",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    numbers, words = dict(OPTIONS), {"sweep": "made", "runs_dir": "runs"}
    for word in argv:
        key, _, value = word.partition("=")
        if key in numbers and value.isdigit():
            numbers[key] = int(value)
        elif key in words and value:
            words[key] = value
        else:
            allowed = ", ".join([*(f"{key}=NUMBER" for key in numbers), *(f"{key}=..." for key in words)])
            print(f"{word}: not understood; allowed are {allowed}", file=sys.stderr)
            return 2
    folder = Path(words["runs_dir"]) / words["sweep"]
    if folder.exists():
        print(f"{folder}: it is there already; remove it, or give another sweep=", file=sys.stderr)
        return 2
    started = time.monotonic()
    for seed in range(numbers["runs"]):
        make_run(folder, seed, numbers)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {numbers['runs']} runs, {size / 1e6:.0f} MB, made in {time.monotonic() - started:.0f} s")
    return 0


def config(sweep: str, seed: int, numbers: dict[str, int]) -> RunConfig:
    """What such a run would have been configured with."""
    return RunConfig.from_mapping({
        "R": numbers["R"], "seed": seed, "sweep": sweep, "aggregation": "sum", "runs_dir": "runs",
        "model": {"name": "tiny", "path": "embedded"},
        "task": {"_target_": "grpo_sweeps.tasks.arithmetic.arithmetic", "name": "arithmetic"},
        "reward": {"_target_": "grpo_sweeps.rewards.exact_match.strict"},
        "estimator": {"_target_": "grpo_sweeps.estimators.group.grpo"}, "rollout": {}, "analysis": {},
        "trainer": {"steps": numbers["steps"], "prompts": numbers["groups"], "eval_every": EVAL_EVERY},
        "tracking": {"kind": "mlflow"},
    })  # fmt: skip


def make_run(folder: Path, seed: int, numbers: dict[str, int]) -> None:
    """One run's folder."""
    made = config(folder.name, seed, numbers)
    run = folder / identity(made)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(to_mapping(made), sort_keys=False))
    (run / "log.txt").write_text("made up, not trained\n")
    rng = np.random.default_rng([numbers["seed"], seed])
    with LocalRecord(run) as record:
        for step in range(numbers["steps"]):
            record.log_groups([group(rng, step, g, numbers["R"]) for g in range(numbers["groups"])])
            record.log_metrics(step, metrics(rng, step, numbers))
            if step % 10 == 0:
                record.log_completions([Completion(step, f"p{step}", 0, "q", "#### 1", 1.0, 0.5, True, True, 3, False)])
            if step % EVAL_EVERY == 0:
                evaluate(record, rng, step)
            if step % COMPACT_EVERY == COMPACT_EVERY - 1:
                record.compact()
        evaluate(record, rng, numbers["steps"])
    now = time.time()
    status = RunStatus("finished", run.name, f"R={made.R} seed={seed}", folder.name, numbers["steps"], numbers["steps"])
    write_status(run, replace(status, host="made", heartbeat=now, started=now - 1, ended=now, dirty=False,
                              commit=provenance.commit(), versions=provenance.versions()))  # fmt: skip


def evaluate(record: LocalRecord, rng: np.random.Generator, step: int) -> None:
    """An evaluation before `step`."""
    drawn = rng.random(32) < 0.3
    record.log_evals([EvalRecord(step, f"h{i}", 1, int(d), int(d), bool(d), bool(d)) for i, d in enumerate(drawn)])
    record.log_metrics(step, {"eval/accuracy_greedy": float(drawn.mean())})


def metrics(rng: np.random.Generator, step: int, numbers: dict[str, int]) -> dict[str, Any]:
    """As many numbers as asked for, the known names first."""
    names = [*NAMED, *(f"made/{i}" for i in range(numbers["metrics"]))][: numbers["metrics"]]
    values = dict(zip(names, rng.random(len(names)).tolist(), strict=True))
    return values | {"rollouts": float(step * numbers["groups"] * numbers["R"])}


def group(rng: np.random.Generator, step: int, g: int, R: int) -> GroupRecord:
    """A mixed group with a Gram."""
    rewards = rng.permutation([0.0] * (R // 2) + [1.0] * (R - R // 2))
    rows = rng.standard_normal((R, DIMENSIONS))
    advantages = tuple((rewards - rewards.mean()).tolist())
    right = tuple(bool(reward) for reward in rewards)
    return GroupRecord(
        step=step, group=g, prompt_id=f"p{(step * 7 + g) % 512}", R=R, rewards=tuple(rewards.tolist()),
        advantages=advantages, weights=advantages, lengths=(8,) * R, logprob_sums=(-4.0,) * R, strict=right,
        flexible=right, rows="scores", gram=rows @ rows.T, floor=1e-7, same_as=tuple(range(R)),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
