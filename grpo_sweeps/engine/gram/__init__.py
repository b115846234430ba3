"""Exact Grams of per-rollout gradients in one backward. Public: GradientGram, its errors, verify_against_autograd.

uses -> recorder (linear, norm, embedding) -> patch -> gram: what is claimed, what measures it, how it is fed, the block
delivery, recompute                            what keeps a block cheap for the host
layout, measurement, verify, large_group       rows and groups, results and checks, groups beyond one micro-batch
torch_private, kernels/                        what torch has no public way for, and what CUDA cards run
"""

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
