"""Exact Grams of per-rollout gradients in one backward. Public: GradientGram, its errors, verify_against_autograd."""

from grpo_sweeps.engine.gram.gram import GradientGram
from grpo_sweeps.engine.gram.large_group import LargeGroup
from grpo_sweeps.engine.gram.layout import GramError
from grpo_sweeps.engine.gram.measurement import GramCheckError, Measurement
from grpo_sweeps.engine.gram.verify import Verification, measured_floor, verify_against_autograd

__all__ = [
    "GradientGram",
    "GramCheckError",
    "GramError",
    "LargeGroup",
    "Measurement",
    "Verification",
    "measured_floor",
    "verify_against_autograd",
]
