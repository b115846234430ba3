"""One step of group-relative policy gradient, on one page: sample, reward, advantage, backward, update.

The objective of a step is sum_i w_i log pi(o_i | x_i), ascended. Departures from the GRPO of DeepSeekMath
(arXiv 2402.03300), as in arXiv 2606.29238:

- one update for each batch of rollouts, so the ratio to the sampling policy is 1: no clipping (a clip ratio would be
  0 and the surrogate's value 0 at every step: reward and gradient norm are what to watch). Steps of several updates,
  with ratios, clipping or KL in the loss, are `inner.inner_step`;
- no KL term and no reference model, unless objective.kl_place=reward takes the KL off the rewards;
- advantage and aggregation are separate choices (`estimator`, `aggregation`); the defaults are the paper's Eq 15 and
  the plain sum over a rollout's tokens;
- the policy is the model at the sampling temperature: logits are divided by it in sampling and in scoring alike;
- a group whose weights are all zero (equal rewards under a group baseline) has no gradient: it is left out of the
  backward and counted in `frac_reward_zero_std`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.optim import learning_rate
from grpo_sweeps.engine.rollouts import Rollout, same_as
from grpo_sweeps.estimators import row_weights
from grpo_sweeps.loop.drawing import draw
from grpo_sweeps.loop.float32 import against_float32
from grpo_sweeps.loop.geometry import apply_update
from grpo_sweeps.loop.gradient_noise import gradient_noise
from grpo_sweeps.loop.measured import Measured, measured_block, read_block
from grpo_sweeps.loop.metrics import StepTimes, step_metrics
from grpo_sweeps.loop.penalty import less_kl
from grpo_sweeps.loop.schedule import due
from grpo_sweeps.loop.scoring import blocks, micro_batches, row_sums
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.loop.verification import verify
from grpo_sweeps.types import Completion, GroupRecord, Problem, RowKind, UpdateRecord, Verdict


@dataclass(frozen=True)
class Rated:
    """A step's rollouts with what was made of them, before the backward. Lists of length G R, group after group.

    metrics: what the step says of how they were drawn and rewarded, where that is not the plain way.
    """

    problems: list[Problem]
    rollouts: list[Rollout]
    verdicts: list[Verdict]
    rewards_GR: Tensor
    advantages_GR: Tensor
    weights_GR: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def rows(self, g: int) -> slice:
        R = self.rewards_GR.shape[1]
        return slice(g * R, (g + 1) * R)

    def rollouts_of(self, groups: list[int]) -> list[Rollout]:
        return [o for g in groups for o in self.rollouts[self.rows(g)]]


@dataclass(frozen=True)
class StepResult:
    metrics: dict[str, float]
    groups: list[GroupRecord]
    completions: list[Completion]
    updates: list[UpdateRecord] = field(default_factory=list)


def training_step(setup: Setup, step: int) -> StepResult:
    """Sample, reward, differentiate and update once.

    Raises:
        FloatingPointError: when the gradient is not finite.
        ValueError: when a reward or an advantage is not a finite number.
        grpo_sweeps.engine.gram.GramCheckError: when a Gram disagrees with the gradient it belongs to.
    """
    times = StepTimes()
    rated = rollouts_with_advantages(setup, step)
    times.mark("sample")
    before = before_the_first_step(setup, rated, step, times)
    measured = backward(setup, rated, step)
    times.mark("backward")
    lr = learning_rate(setup.config.trainer, step)
    update = apply_update(setup, step, lr)
    times.mark("update")
    groups = [record(rated, measured, step, g) for g in range(len(rated.problems))]
    metrics = step_metrics(groups, rated.rollouts, measured, update.grad_norm, lr, times, setup.config.analysis.scores)
    metrics |= before | rated.metrics | update.metrics | gradient_noise(setup, step, groups, update.grad_norm)
    return StepResult(metrics, groups, completions(setup, rated, step), update.records)


def rollouts_with_advantages(setup: Setup, step: int) -> Rated:
    """R rollouts for each of the step's prompts, their rewards, advantages and row weights."""
    config = setup.config
    drawn = draw(setup, step)
    groups = drawn.groups
    rollouts = [o for group in groups for o in group.rollouts]
    rewards_GR = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    lengths_GR = torch.tensor([o.length for o in rollouts]).view_as(rewards_GR)
    rewards_GR, metrics = less_kl(setup, rollouts, rewards_GR)
    advantages = _checked(setup.estimator(rewards_GR.numpy(), lengths_GR.numpy()), rewards_GR, config.estimator.target)
    weights = row_weights(advantages, lengths_GR.numpy(), config.aggregation, config.rollout.max_new_tokens)
    return Rated(
        [group.problem for group in groups],
        rollouts,
        [v for group in groups for v in group.verdicts],
        rewards_GR,
        torch.from_numpy(advantages),
        torch.from_numpy(weights),
        drawn.metrics | metrics,
    )


def _checked(values: object, rewards_GR: Tensor, estimator: str) -> np.ndarray:
    """The advantages. Estimators may be a user's own: what they return is checked where it arrives."""
    shape = tuple(rewards_GR.shape)
    if not isinstance(values, np.ndarray) or values.shape != shape:
        found = values.shape if isinstance(values, np.ndarray) else type(values).__name__
        raise ValueError(f"estimator {estimator} gave {found}: an array or tensor of shape {shape} is needed")
    if not np.isfinite(values).all():
        raise ValueError(f"estimator {estimator} gave {values[~np.isfinite(values)][0]}: finite numbers are needed")
    return values


def before_the_first_step(setup: Setup, rated: Rated, step: int, times: StepTimes) -> dict[str, float]:
    """Verify the Gram and, where asked, compare the dtype with float32; the metrics of that."""
    if step > 0 or setup.gram is None:
        return {}
    verify(setup, rated.rollouts)
    times.mark("verify")
    mixed_first = sorted(range(len(rated.problems)), key=lambda g: not bool(rated.weights_GR[g].any()))
    chosen = mixed_first[: setup.config.analysis.compare_float32]
    if not chosen:
        return {}
    groups = [rated.rollouts_of([g]) for g in chosen]
    found = against_float32(setup, groups, [rated.weights_GR[g].numpy() for g in chosen])
    times.mark("float32")
    return found


def backward(setup: Setup, rated: Rated, step: int) -> dict[int, Measured]:
    """Add the gradient of -sum_i w_i log pi(o_i) to .grad, micro-batch by micro-batch, and measure each group.

    Returns:
        For each group that took part its `Measured`.
    """
    config = setup.config
    measuring = setup.gram is not None and due(step, config.analysis.every)
    everything = measuring and config.analysis.groups == "all"
    taking_part = [g for g, w_R in enumerate(rated.weights_GR) if everything or bool((w_R != 0).any())]
    measured: dict[int, Measured] = {}
    for groups in blocks(setup, taking_part):
        check = len(groups) == 1 or due(step, config.analysis.check_every)
        part = _measured_backward(setup, rated, groups, check) if measuring else _plain_backward(setup, rated, groups)
        measured.update(zip(groups, part, strict=True))
    return measured


def _measured_backward(setup: Setup, rated: Rated, groups: list[int], check: bool) -> list[Measured]:
    """Whole groups with unit weights on the rows; GradientGram applies the weights where the gradients are formed."""
    rollouts, descent = rated.rollouts_of(groups), -rated.weights_GR[groups].flatten()  # the optimiser descends
    m, sums = measured_block(setup, descent, lambda rows: row_sums(setup, rollouts[rows]), check)
    return read_block(setup, m, sums)


def _plain_backward(setup: Setup, rated: Rated, groups: list[int]) -> list[Measured]:
    rollouts, weights, sums = rated.rollouts_of(groups), rated.weights_GR[groups].flatten(), []
    for rows in micro_batches(setup, len(rollouts)):
        scores_B = row_sums(setup, rollouts[rows])
        (-(weights[rows].to(scores_B) * scores_B).sum()).backward()
        sums.append(scores_B.detach().double().cpu())
    sums_GR = torch.cat(sums).numpy().reshape(len(groups), -1)
    return [Measured(sums_R) for sums_R in sums_GR]


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
