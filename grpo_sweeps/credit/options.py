"""What the command `credit` takes. Loads neither torch nor the engine: --help and a bad word are answered at once."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_sweeps.cli import key


@dataclass(frozen=True)
class CreditOptions:
    """The command's keys."""

    sweep: str = key("", "the sweep of the run", "NAME", required=True)
    run: str = key("", "the run whose checkpoint is taken", "IDENTITY", unset="the sweep's one run")
    problems: str = key("train", "the problems to answer", "train|held_out")
    prompts: int = key(8, "how many of them")
    rollouts: int = key(2, "completions per problem")
    continuations: int = key(32, "continuations per prefix")
    every: int = key(1, "tokens per segment: the values stand at its ends")
    seed: int = key(0, "of problems, completions and continuations")
    device: str = key("auto", "where the model runs", "auto|cpu|cuda|cuda:N")
    runs_dir: str = key("runs", "where the runs are", "FOLDER")
    out: str = key("", "where the page goes", "FOLDER", unset="reports/SWEEP/credit")
