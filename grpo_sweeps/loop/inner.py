"""A step of several updates, or of another loss than the plain one: ratios, clipping, KL to the initial policy.

    sample as ever; value the prefixes, where that is done by continuations
    score every rollout once under the policy that sampled it, and under the reference
    inner_updates times: for each of the minibatches (whole groups): backward of the loss, update
    fit the learned value, where there is one

The loss is `objective.surrogate` plus beta times the KL estimate, each token weighted by the aggregation's factor with
the minibatch's normaliser. What is measured are rows of the loss: row i is the gradient of rollout i's own terms, so
that the rows of a group add up to its gradient. Each group is measured once, in the first pass over the step's
rollouts: those of the first minibatch at the policy that sampled, where the ratio is 1, the others after the updates
before theirs. docs/objective.md has the equations.

A group whose advantages are all zero has no gradient unless there is KL in the loss, and takes no part; one of which
every token is clipped when it is its turn has none either, and counts as not measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.critic import Critic, credit
from grpo_sweeps.engine.optim import learning_rate
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.estimators import row_weights
from grpo_sweeps.loop.continuations import step_credit
from grpo_sweeps.loop.measured import Block, Measured, keep_stack, measured_block, stacks
from grpo_sweeps.loop.own_metrics import own_metrics
from grpo_sweeps.loop.results import RatioTally, StepResult, StepTimes, completions, record, step_metrics
from grpo_sweeps.loop.rollouts import Rated, rollouts_with_advantages
from grpo_sweeps.loop.room import measure_room
from grpo_sweeps.loop.scoring import blocks, features, micro_batches, scored, spread, token_log_probs
from grpo_sweeps.loop.setup import Setup, due
from grpo_sweeps.loop.step import before_the_first_step, training_step
from grpo_sweeps.loop.update import Update, apply_update, gradient_noise
from grpo_sweeps.maths.objective import kl, kl_slope, surrogate


def take_step(setup: Setup, step: int) -> StepResult:
    """One step of the run's objective. Raises as `training_step`."""
    return training_step(setup, step) if setup.config.objective.on_policy else inner_step(setup, step)


@dataclass(frozen=True)
class Terms:
    """What the loss of a step is made of, beside the policy.

    cuts: the groups of each minibatch. factors_GR: the aggregation's factor of each row, within its minibatch.
    old, reference: each rollout's log-probabilities (its length,) under the policy that sampled and under the
    reference, by group; empty where the first backward gives the former, or there is no KL in the loss.
    credit: with values along the way each rollout's advantages by token (its length,), in the order of the rows;
    features and returns are what a critic is fitted to.
    """

    rated: Rated
    cuts: list[list[int]]
    factors_GR: Tensor
    old: dict[int, list[Tensor]] = field(default_factory=dict)
    reference: dict[int, list[Tensor]] = field(default_factory=dict)
    credit: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    returns: list[Tensor] = field(default_factory=list)


def inner_step(setup: Setup, step: int) -> StepResult:
    """Sample, reward, and update `inner_updates` x `minibatches` times. Raises as `training_step`."""
    config, times, tally = setup.config, StepTimes(), RatioTally(setup.config.objective.ratio)
    rated = rollouts_with_advantages(setup, step)
    times.mark("sample")
    measure_room(setup, rated.rollouts, times)
    valued = step_credit(setup, rated.problems, rated.rollouts, rated.advantages_GR.flatten(), step)
    if valued.by_token:
        times.mark("continuations")
    terms = prepare_terms(setup, rated, valued.by_token)
    rated = terms.rated
    times.mark("score")
    before = before_the_first_step(setup, rated, step, times)
    lr, updates = learning_rate(config.trainer, step), list[Update]()
    measured: dict[int, Measured] = {}
    for inner in range(config.objective.inner_updates):
        measuring = inner == 0 and setup.gram is not None and due(step, config.analysis.every)
        for groups in terms.cuts:
            found = backward_of_loss(setup, terms, groups, tally, step, measuring)
            measured |= found if inner == 0 else {}
            times.mark("backward")
            # what it does to the weights is measured of the first update, the one from the policy that sampled
            updates.append(Update(setup.optimizer.step(lr)) if updates else apply_update(setup, step, lr))
            times.mark("update")
    of_critic: dict[str, float] = {}
    if setup.critic is not None:
        of_critic = setup.critic.fit(terms.features, terms.returns)
        times.mark("critic")
    records = [record(rated, measured, step, g, "loss") for g in range(len(rated.problems))]
    at_sampling = {g: measured[g] for g in terms.cuts[0] if g in measured}
    grad_norm = sum(update.grad_norm for update in updates) / len(updates)
    logged = config.analysis.scores, config.task.judged
    metrics = step_metrics(records, rated.rollouts, at_sampling, grad_norm, lr, times, *logged)
    metrics |= own_metrics(setup, records)
    metrics |= before | rated.metrics | valued.metrics | tally.metrics() | of_critic | updates[0].metrics
    metrics |= setup.stack.take()
    metrics |= gradient_noise(setup, step, records, grad_norm)
    return StepResult(metrics, records, completions(setup, rated, step), updates[0].records)


def prepare_terms(setup: Setup, rated: Rated, by_token: Sequence[Tensor] = ()) -> Terms:
    """Cut the groups into minibatches, weigh their rows, score the rollouts under the policy that sampled.

    by_token: each rollout's advantages where continuations gave them.
    """
    config, G = setup.config, len(rated.problems)
    size = G // config.objective.minibatches
    cuts = [list(range(start, start + size)) for start in range(0, G, size)]
    lengths_GR = np.reshape([o.length for o in rated.rollouts], rated.rewards_GR.shape)
    ones_GR, longest = np.ones(lengths_GR.shape), config.rollout.max_new_tokens
    factors = [row_weights(ones_GR[cut], lengths_GR[cut], config.aggregation, longest) for cut in cuts]
    factors_GR = torch.from_numpy(np.concatenate(factors)) * rated.counts_GR
    terms = Terms(replace(rated, weights_GR=rated.advantages_GR * factors_GR), cuts, factors_GR)
    if by_token:
        terms = _credited(terms, by_token)
    if setup.critic is not None:
        terms = _with_values(setup, setup.critic, terms)
    if config.objective.updates > 1:
        terms = replace(terms, old=_scored_groups(setup, terms))
    if config.objective.kl_in_loss:
        terms = replace(terms, reference=_scored_groups(setup, terms, reference=True))
    return terms


def _with_values(setup: Setup, critic: Critic, terms: Terms) -> Terms:
    """Each token's own advantage, from the critic's values."""
    objective, rated = setup.config.objective, terms.rated
    found = features(setup, rated.rollouts)
    values = critic.values(found)
    by_token = credit(rated.advantages_GR.flatten(), values, objective.gae_gamma, objective.gae_lambda)
    returns = [A_T + v_T for A_T, v_T in zip(by_token, values, strict=True)]
    return replace(_credited(terms, by_token), features=found, returns=returns)


def _credited(terms: Terms, by_token: Sequence[Tensor]) -> Terms:
    """The record's advantage of a rollout is its tokens' mean."""
    rated = terms.rated
    means_GR = torch.stack([A_T.mean() for A_T in by_token]).view_as(rated.advantages_GR)
    rated = replace(rated, advantages_GR=means_GR, weights_GR=means_GR * terms.factors_GR)
    return replace(terms, rated=rated, credit=list(by_token))


def _scored_groups(setup: Setup, terms: Terms, reference: bool = False) -> dict[int, list[Tensor]]:
    """Log-probabilities of the groups that take part, cut as `backward_of_loss` cuts them: without an update in between
    it finds the same numbers, and ratios of exactly 1."""
    found: dict[int, list[Tensor]] = {}
    R = setup.config.R
    for cut in terms.cuts:
        for groups in blocks(setup, terms.rated, taking_part(setup, terms, cut)):
            rollouts = terms.rated.rollouts_of(groups)
            if reference:
                assert setup.reference is not None
                with setup.reference.opened() as model:
                    values = scored(setup, rollouts, model)
            else:
                values = scored(setup, rollouts)
            found |= {g: values[j * R : (j + 1) * R] for j, g in enumerate(groups)}
    return found


def taking_part(setup: Setup, terms: Terms, groups: Sequence[int]) -> list[int]:
    """Those of the groups that have a gradient."""
    everything = setup.config.objective.kl_in_loss
    groups = [g for g in groups if bool((terms.factors_GR[g] != 0).any())]  # not all of them masked
    if terms.credit:
        return [g for g in groups if everything or any(bool(A_T.any()) for A_T in terms.credit[terms.rated.rows(g)])]
    return [g for g in groups if everything or bool((terms.rated.weights_GR[g] != 0).any())]


def backward_of_loss(
    setup: Setup, terms: Terms, groups: list[int], tally: RatioTally, step: int, measuring: bool
) -> dict[int, Measured]:
    """Add the gradient of the minibatch's loss to .grad, micro-batch by micro-batch; measure its groups where asked.

    Returns:
        For each group that took part its `Measured`.
    """
    found: list[tuple[list[int], Callable[[], list[Measured]]]] = []
    cut = blocks(setup, terms.rated, taking_part(setup, terms, groups))
    together = measuring and stacks(setup, step, cut)
    for block in cut:
        rows = LossRows(setup, terms, block, tally)
        if measuring:
            check = len(block) == 1 or due(step, setup.config.analysis.check_every)
            one = measured_block(setup, torch.ones(len(rows.rollouts), dtype=torch.float64), rows, check, together)
            found.append((block, functools.partial(_measured_rows, setup, one, rows, together)))
        else:
            for part in micro_batches(setup, len(rows.rollouts)):
                rows(part).sum().backward()
            found.append((block, functools.partial(_plain_rows, rows, len(block))))
    # Reading waits for the device, which has the next micro-batch to go on with as long as nothing is read.
    return {g: part for block, read in found for g, part in zip(block, read(), strict=True)}


def _measured_rows(setup: Setup, block: Block, rows: LossRows, together: bool) -> list[Measured]:
    if together:
        keep_stack(setup, block.m, rows.rollouts, rows.advantages_B * rows.factors_B, loss=True)
    return [_without_empty(part) for part in block.read(setup, rows.sums())]


def _plain_rows(rows: LossRows, groups: int) -> list[Measured]:
    return [Measured(sums_R) for sums_R in rows.sums().double().cpu().view(groups, -1).numpy()]


def _without_empty(part: Measured) -> Measured:
    """A Gram of zeros is that of a group without a gradient."""
    return part if part.gram is None or part.gram.any() else replace(part, gram=None, gram_by=None, floor=0.0)


class LossRows:
    """The losses of some groups' rollouts: `rows(slice)` is (B,), to be differentiated, each from its own row alone.

    Its value is -sum_t c_t log pi_t with the detached coefficients c, and not the loss itself; its gradient is the
    loss's.
    """

    def __init__(self, setup: Setup, terms: Terms, groups: list[int], tally: RatioTally) -> None:
        self.setup, self.tally = setup, tally
        self.rollouts: list[Rollout] = terms.rated.rollouts_of(groups)
        self.advantages_B = terms.rated.advantages_GR[groups].flatten()
        self.factors_B = terms.factors_GR[groups].flatten()
        self.credit = [A_T for g in groups for A_T in terms.credit[terms.rated.rows(g)]]
        self.old = [values_T for g in groups for values_T in terms.old.get(g, ())]
        self.reference = [values_T for g in groups for values_T in terms.reference.get(g, ())]
        self._sums: list[Tensor] = []

    def __call__(self, rows: slice) -> Tensor:
        objective = self.setup.config.objective
        logp_BT, mask_BT = token_log_probs(self.setup, self.rollouts[rows])
        now_BT = logp_BT.detach()
        old_BT = spread(self.old[rows], mask_BT) if self.old else now_BT
        advantages_B, factors_B = (t[rows].to(logp_BT.device) for t in (self.advantages_B, self.factors_B))
        advantages = (
            spread([A_T.to(mask_BT.device) for A_T in self.credit[rows]], mask_BT) if self.credit else advantages_B
        )
        clipping = objective.ratio, objective.clip_low, objective.clip_high
        found = surrogate(now_BT, old_BT, advantages, factors_B, mask_BT, *clipping)
        coefficients_BT, k_BT = found.coefficients_BT, None
        if self.reference:
            to_reference = (now_BT, spread(self.reference[rows], mask_BT), mask_BT, objective.kl_estimator)
            k_BT = kl(*to_reference)
            coefficients_BT = coefficients_BT - objective.kl_beta * factors_B[:, None] * kl_slope(*to_reference)
        self.tally.add(found, mask_BT, k_BT)
        self._sums.append(now_BT.sum(dim=1))
        return -(coefficients_BT.to(logp_BT.dtype) * logp_BT).sum(dim=1)

    def sums(self) -> Tensor:
        """Log-probability of each rollout, of the rows that were called."""
        return torch.cat(self._sums)
