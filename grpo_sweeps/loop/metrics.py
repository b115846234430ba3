"""The numbers a step logs. Names are TRL's where TRL has one; every one is defined in docs/metrics.md."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.spectra.records import spectral_metrics
from grpo_sweeps.types import GroupRecord

if TYPE_CHECKING:
    from grpo_sweeps.loop.measured import Measured
    from grpo_sweeps.loop.setup import Setup


class StepTimes:
    """Seconds of each phase of a step, the accelerator's queue waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = self.last = self._now()

    def mark(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    @property
    def total(self) -> float:
        return self.last - self.start

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def step_metrics(
    groups: Sequence[GroupRecord],
    rollouts: Sequence[Rollout],
    measured: Mapping[int, Measured],
    grad_norm: float,
    lr: float,
    times: StepTimes,
    scores: bool = True,
) -> dict[str, float]:
    """Metrics of one training step, from its groups and rollouts; scores: those of the unweighted matrix as well."""
    rewards_GR = np.array([g.rewards for g in groups])
    lengths = np.array([o.length for o in rollouts])
    metrics = {
        "reward": float(rewards_GR.mean()),
        "reward_std": float(rewards_GR.std(axis=1).mean()),
        "reward/strict": float(np.mean([g.strict for g in groups])),
        "reward/flexible": float(np.mean([g.flexible for g in groups])),
        "frac_reward_zero_std": float(np.mean([not g.mixed for g in groups])),
        **group_shares(rewards_GR, rollouts),
        "grad_norm": grad_norm,
        "lr": lr,
        # the mean of -log pi over sampled tokens is an unbiased estimate of the entropy, and costs nothing
        "entropy": float(-np.concatenate([o.logprobs for o in rollouts]).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/clipped_ratio": float(np.mean([o.truncated for o in rollouts])),
        "num_tokens": float(sum(len(o.prompt_ids) + o.length for o in rollouts)),
        "step_time": times.total,
        **{f"time/{phase}": seconds for phase, seconds in times.seconds.items()},
    }
    if measured:
        metrics["sampling/logprob_difference"] = _sampler_trainer_gap(groups, rollouts, measured)
    if torch.cuda.is_available():
        metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics | spectral_metrics(groups, scores)


def group_shares(rewards_GR: np.ndarray, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Shares of the step's groups: mixed; of equal rewards, right (1 or more) or wrong (0 or less); of one text."""
    G, R = rewards_GR.shape
    texts = [{o.completion_ids for o in rollouts[g * R : (g + 1) * R]} for g in range(G)]
    mixed_G = rewards_GR.max(axis=1) > rewards_GR.min(axis=1)
    return {
        "groups/mixed": float(mixed_G.mean()),
        "groups/all_right": float((~mixed_G & (rewards_GR[:, 0] >= 1)).mean()),
        "groups/all_wrong": float((~mixed_G & (rewards_GR[:, 0] <= 0)).mean()),
        "groups/same_text": float(np.mean([len(different) == 1 for different in texts])),
    }


def relative_entropy(setup: Setup, metrics: Mapping[str, float]) -> dict[str, float]:
    """`entropy/normalized`: the entropy over that of a uniform policy, log of the head's rows."""
    head = setup.policy.model.get_output_embeddings()
    rows = len(head.weight) if head is not None else 0
    return {"entropy/normalized": metrics["entropy"] / math.log(rows)} if rows > 1 else {}


def _sampler_trainer_gap(
    groups: Sequence[GroupRecord], rollouts: Sequence[Rollout], measured: Mapping[int, Measured]
) -> float:
    """Mean absolute difference a token between a rollout's log-probability in sampling and in scoring."""
    gaps = []
    for g, part in measured.items():
        R = groups[g].R
        for r, rollout in enumerate(rollouts[g * R : (g + 1) * R]):
            gaps.append(abs(part.logprob_sums[r] - float(rollout.logprobs.astype(np.float64).sum())) / rollout.length)
    return float(np.mean(gaps))
