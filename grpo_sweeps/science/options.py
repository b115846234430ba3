"""What the command `theory` takes."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_sweeps.cli import key


@dataclass(frozen=True)
class TheoryOptions:
    """The command's keys."""

    policies: int = key(2, "how many policies, with seeds from `seed` on")
    prompts: int = key(4, "prompts per policy")
    seed: int = key(0, "of policies and draws")
    draws: int = key(20_000, "draws per Monte Carlo check")
    steps: int = key(200, "drawn steps per point of the figures")
    out: str = key("reports/theory", "where tables, figures and page go", "FOLDER")
