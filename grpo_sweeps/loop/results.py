"""What a step leaves: the metrics that it logs, its group records and the completions that are kept.

Names of metrics are TRL's where TRL has one; every one is defined in docs/metrics.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.rollouts import Rollout, same_as
from grpo_sweeps.loop.setup import due
from grpo_sweeps.maths.objective import Surrogate
from grpo_sweeps.spectra.records import spectral_metrics
from grpo_sweeps.types import Completion, GroupRecord, RowKind, UpdateRecord

if TYPE_CHECKING:
    from grpo_sweeps.loop.measured import Measured
    from grpo_sweeps.loop.rollouts import Rated
    from grpo_sweeps.loop.setup import Setup


@dataclass(frozen=True)
class StepResult:
    metrics: dict[str, float]
    groups: list[GroupRecord]
    completions: list[Completion]
    updates: list[UpdateRecord] = field(default_factory=list)


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


class RatioTally:
    """What a step of several updates says of its ratios: how far the policy moved, what was clipped, what the KL is.

    Sums over all updates of a step. Tokens are counted, or rollouts where a rollout has one ratio."""

    def __init__(self, ratio: str) -> None:
        self.ratio = ratio
        self.ratios: list[Tensor] = []
        self.low: list[Tensor] = []
        self.high: list[Tensor] = []
        self.k: list[Tensor] = []

    def add(self, found: Surrogate, mask_BT: Tensor, k_BT: Tensor | None) -> None:
        """One micro-batch of one update."""
        counted_BT = mask_BT & (mask_BT.cumsum(dim=1) == 1) if self.ratio == "sequence" else mask_BT
        self.ratios.append(found.ratio_BT[counted_BT])
        self.low.append(found.low_BT[counted_BT])
        self.high.append(found.high_BT[counted_BT])
        if k_BT is not None:
            self.k.append(k_BT[mask_BT])

    def metrics(self) -> dict[str, float]:
        """TRL's names. Nothing where no group took part; no clip ratio where nothing is ever clipped."""
        if not self.ratios:
            return {}
        ratios = torch.cat(self.ratios)
        found = {
            "importance_ratio/mean": float(ratios.mean()),
            "importance_ratio/min": float(ratios.min()),
            "importance_ratio/max": float(ratios.max()),
        }
        if self.ratio != "none":
            low, high = (torch.cat(clipped).double() for clipped in (self.low, self.high))
            found["clip_ratio/low_mean"], found["clip_ratio/high_mean"] = float(low.mean()), float(high.mean())
            found["clip_ratio/region_mean"] = float((low + high).mean())
        if self.k:
            found["kl"] = float(torch.cat(self.k).mean())
        return found


def step_metrics(
    groups: Sequence[GroupRecord],
    rollouts: Sequence[Rollout],
    measured: Mapping[int, Measured],
    grad_norm: float,
    lr: float,
    times: StepTimes,
    scores: bool = True,
    judged: bool = True,
) -> dict[str, float]:
    """Metrics of one training step, from its groups and rollouts; scores: those of the unweighted matrix as well;
    judged: the task has verdicts."""
    rewards_GR = np.array([g.rewards for g in groups])
    lengths = np.array([o.length for o in rollouts])
    metrics = {
        "reward": float(rewards_GR.mean()),
        "reward_std": float(rewards_GR.std(axis=1).mean()),
        **(shares_right(groups) if judged else {}),
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
    if times.seconds.get("sample"):
        metrics["sampling/tokens_per_second"] = float(lengths.sum()) / times.seconds["sample"]
    if measured:
        metrics["sampling/logprob_difference"] = _sampler_trainer_gap(groups, rollouts, measured)
    if torch.cuda.is_available():
        metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics | spectral_metrics(groups, scores)


def shares_right(groups: Sequence[GroupRecord]) -> dict[str, float]:
    names = ("strict", "flexible")
    return {f"reward/{name}": float(np.mean([getattr(group, name) for group in groups])) for name in names}


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


def record(rated: Rated, measured: dict[int, Measured], step: int, g: int, kind: RowKind = "scores") -> GroupRecord:
    rows, part = rated.rows(g), measured.get(g)
    sampled = [float(o.logprobs.astype(np.float64).sum()) for o in rated.rollouts[rows]]
    return GroupRecord(
        step=step,
        group=g,
        prompt_id=rated.problems[g].id,
        R=rated.rewards_GR.shape[1],
        rewards=tuple(rated.rewards_GR[g].tolist()),
        advantages=tuple(rated.advantages_GR[g].tolist()),
        weights=tuple(rated.weights_GR[g].tolist()),
        lengths=tuple(o.length for o in rated.rollouts[rows]),
        # a group that took no part was not scored: the sampler's own sums stand in
        logprob_sums=tuple(part.logprob_sums.tolist()) if part else tuple(sampled),
        strict=tuple(v.strict for v in rated.verdicts[rows]),
        flexible=tuple(v.flexible for v in rated.verdicts[rows]),
        rows=kind,
        gram=part.gram if part else None,
        floor=part.floor if part else 0.0,
        gram_by=(part.gram_by or {}) if part else {},
        same_as=same_as([o.completion_ids for o in rated.rollouts[rows]]),
        cut=tuple(o.truncated for o in rated.rollouts[rows]),
    )


def completions(setup: Setup, rated: Rated, step: int) -> list[Completion]:
    """Every so many steps the completions of one group are kept whole, to be read: the first from which something is
    learnt and whose rewards differ, where the step has such a group."""
    if not due(step, setup.config.analysis.keep_completions_every):
        return []
    g = _worth_reading(rated)
    rows, problem = rated.rows(g), rated.problems[g]
    return [
        Completion(
            step=step,
            group=g,
            prompt_id=problem.id,
            rollout=r,
            prompt=setup.prompt(problem),
            text=rollout.text,
            reward=float(rated.rewards_GR[g, r]),
            advantage=float(rated.advantages_GR[g, r]),
            strict=verdict.strict,
            flexible=verdict.flexible,
            length=rollout.length,
            truncated=rollout.truncated,
        )
        for r, (rollout, verdict) in enumerate(zip(rated.rollouts[rows], rated.verdicts[rows], strict=True))
    ]


def _worth_reading(rated: Rated) -> int:
    """The first group with advantages and different rewards, else with advantages, else the first of all."""
    taught_G = (rated.advantages_GR != 0).any(dim=1)
    mixed_G = rated.rewards_GR.amax(dim=1) > rated.rewards_GR.amin(dim=1)
    return max(range(len(rated.problems)), key=lambda g: (bool(taught_G[g]), bool(mixed_G[g])))
