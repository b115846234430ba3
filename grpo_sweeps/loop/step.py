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

from collections.abc import Callable

import torch

from grpo_sweeps.engine.optim import learning_rate
from grpo_sweeps.loop.measured import Measured, keep_stack, measured_block, stacks
from grpo_sweeps.loop.own_metrics import own_metrics
from grpo_sweeps.loop.results import StepResult, StepTimes, completions, record, step_metrics
from grpo_sweeps.loop.rollouts import Rated, rollouts_with_advantages
from grpo_sweeps.loop.room import measure_room
from grpo_sweeps.loop.scoring import blocks, micro_batches, row_sums
from grpo_sweeps.loop.setup import Setup, due
from grpo_sweeps.loop.update import apply_update, gradient_noise
from grpo_sweeps.loop.verification import against_float32, verify


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
    measure_room(setup, rated.rollouts, times)
    before = before_the_first_step(setup, rated, step, times)
    measured = backward(setup, rated, step)
    times.mark("backward")
    lr = learning_rate(setup.config.trainer, step)
    update = apply_update(setup, step, lr)
    times.mark("update")
    groups = [record(rated, measured, step, g) for g in range(len(rated.problems))]
    logged = setup.config.analysis.scores, setup.config.task.judged
    metrics = step_metrics(groups, rated.rollouts, measured, update.grad_norm, lr, times, *logged)
    metrics |= own_metrics(setup, groups)
    metrics |= (
        before
        | rated.metrics
        | update.metrics
        | setup.stack.take()
        | gradient_noise(setup, step, groups, update.grad_norm)
    )
    return StepResult(metrics, groups, completions(setup, rated, step), update.records)


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
    found: list[tuple[list[int], Callable[[], list[Measured]]]] = []
    parts = blocks(setup, rated, taking_part)
    together = measuring and stacks(setup, step, parts)
    for groups in parts:
        check = len(groups) == 1 or due(step, config.analysis.check_every)
        read = (
            _measured_backward(setup, rated, groups, check, together)
            if measuring
            else _plain_backward(setup, rated, groups)
        )
        found.append((groups, read))
    # Reading waits for the device, which has the next micro-batch to go on with as long as nothing is read.
    return {g: one for groups, read in found for g, one in zip(groups, read(), strict=True)}


def _measured_backward(
    setup: Setup, rated: Rated, groups: list[int], check: bool, together: bool
) -> Callable[[], list[Measured]]:
    """Whole groups with unit weights on the rows; GradientGram applies the weights where the gradients are formed."""
    rollouts, descent = rated.rollouts_of(groups), -rated.weights_GR[groups].flatten()  # the optimiser descends
    block = measured_block(setup, descent, lambda rows: row_sums(setup, rollouts[rows]), check, together)

    def read() -> list[Measured]:
        if together:
            keep_stack(setup, block.m, rollouts, descent, loss=False)
        return block.read(setup, block.scalars)

    return read


def _plain_backward(setup: Setup, rated: Rated, groups: list[int]) -> Callable[[], list[Measured]]:
    rollouts, weights, sums = rated.rollouts_of(groups), rated.weights_GR[groups].flatten(), []
    for rows in micro_batches(setup, len(rollouts)):
        scores_B = row_sums(setup, rollouts[rows])
        (-(weights[rows].to(scores_B) * scores_B).sum()).backward()
        sums.append(scores_B.detach())
    return lambda: [Measured(sums_R) for sums_R in torch.cat(sums).double().cpu().view(len(groups), -1).numpy()]
