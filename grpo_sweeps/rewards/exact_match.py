"""Rewards of 1 for a right answer and 0 otherwise: nothing in between, and no credit for part of a number.

What counts as an answer is defined in `rewards/parsing.py`.
"""

from __future__ import annotations

from grpo_sweeps.rewards.parsing import verdict
from grpo_sweeps.types import Problem


def strict(completion: str, problem: Problem, seed: int = 0) -> float:
    """1.0 when the strict answer equals the reference, else 0.0; `seed` is ignored."""
    return float(verdict(completion, problem.answer).strict)


def flexible(completion: str, problem: Problem, seed: int = 0) -> float:
    """1.0 when the flexible answer equals the reference, else 0.0; `seed` is ignored."""
    return float(verdict(completion, problem.answer).flexible)
