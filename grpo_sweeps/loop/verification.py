"""What a run makes sure of before its first update: the Gram is that of the gradients it applies (`verify`), and a
half-type model's spectra are so far from those of the same weights in float32 (`against_float32`).

The second is a measurement of its own: it says what the training dtype does to effective rank, participation ratio and
top-1 fraction, and changes none of them. Both Grams are of the same rollouts. Single entries of K differ by far more
than the spectra do, so that no bound on the entries can stand in for this.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from grpo_sweeps import spectra
from grpo_sweeps.engine.gram import GradientGram, measured_floor, verify_against_autograd
from grpo_sweeps.engine.gram.verify import set_aside
from grpo_sweeps.engine.policy import in_float32
from grpo_sweeps.engine.rollouts import Rollout, same_as
from grpo_sweeps.loop.measured import measured_block
from grpo_sweeps.loop.scoring import row_sums
from grpo_sweeps.loop.setup import VERIFIED_ROWS, Setup, micro_batch_rows
from grpo_sweeps.maths.intervals import mean_interval
from grpo_sweeps.spectra.equal import merged

TOKENS = 128  # of a row of the block that is verified
LARGE_MODEL = 10**9  # trainable parameters from which on two rows' gradients are held at once, not four
QUANTITIES = {
    "effective_rank": spectra.effective_rank,
    "participation_ratio": spectra.participation_ratio,
    "top1_fraction": spectra.top1_fraction,
}
BY_K = "effective_rank"  # of QUANTITIES, told apart by k
ROWS_AT_ONCE = 8  # activations in float32 take twice the room
FEW_GROUPS = 2  # of a large model


def verify(setup: Setup, rollouts: Sequence[Rollout]) -> None:
    """Compare the measured gradient with ordinary autograd and K with separate backwards; set the Gram's floor.

    The rows are the first different rollouts, cut to TOKENS, whatever the micro-batch is: together they have no more
    tokens than one long rollout, and one row alone would say little of the floor. Raises GramCheckError.
    """
    assert setup.gram is not None
    different = list({(o.prompt_ids, o.completion_ids): o for o in rollouts}.values())
    pieces = [piece(rollout) for rollout in different[: verified_rows(setup)]]
    setup.say(f"verifying the Gram of {len(pieces)} rows against separate backwards")
    model, scores = setup.policy.model, functools.partial(row_sums, setup, pieces)
    verify_against_autograd(model, setup.gram, scores, [len(pieces)])
    setup.precision.floor = measured_floor(model, setup.gram, scores, [len(pieces)])


def verified_rows(setup: Setup) -> int:
    size = sum(p.numel() for p in setup.policy.model.parameters() if p.requires_grad)
    return VERIFIED_ROWS if size < LARGE_MODEL else VERIFIED_ROWS // 2


def piece(rollout: Rollout, tokens: int = TOKENS) -> Rollout:
    """At most `tokens` tokens of a rollout: the end of its prompt, then the beginning of its completion."""
    completion = rollout.completion_ids[: max(tokens // 2, tokens - len(rollout.prompt_ids))]
    prompt = rollout.prompt_ids[-max(1, tokens - len(completion)) :]
    return replace(rollout, prompt_ids=prompt, completion_ids=completion, logprobs=rollout.logprobs[: len(completion)])


def against_float32(
    setup: Setup, groups: Sequence[Sequence[Rollout]], weights: Sequence[np.ndarray]
) -> dict[str, float]:  # fmt: skip
    """`float32/...` metrics: relative differences of the training dtype's spectra from float32's.

    groups: the rollouts of each group; weights: (R,) each; a group whose weights are all zero is taken with those of
    k = 1 .. R-1 right rollouts; one whose rollouts are all one text has no spectrum to compare. For each quantity the
    mean difference over groups, its 95% interval and the largest absolute one; `float32/entry` the mean over groups of
    the largest difference of K_ij over sqrt(K_ii K_jj); `float32/k<k>/...` the effective rank's by k. Empty for a
    model in float32 or wider, and, said in the log, where the memory is too small.
    """
    model = setup.policy.model
    if not groups or all(p.dtype not in (torch.bfloat16, torch.float16) for p in model.parameters()):
        return {}
    if sum(p.numel() for p in model.parameters()) >= LARGE_MODEL:
        groups, weights = groups[:FEW_GROUPS], weights[:FEW_GROUPS]
    texts = [np.array(same_as([rollout.completion_ids for rollout in group])) for group in groups]
    several = [g for g, same in enumerate(texts) if same.any()]
    if not several:
        return {}
    groups, weights, texts = [groups[g] for g in several], [weights[g] for g in several], [texts[g] for g in several]
    setup.say(f"comparing the spectra of {len(groups)} groups with those in float32")
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        with set_aside(parameters):
            own = _grams(setup, groups)
            with in_float32(model):
                wide = _grams(setup, groups)
    except torch.OutOfMemoryError:
        setup.say("the memory is too small for the weights in float32: the dtype is not compared")
        return {}
    return _metrics(own, wide, [_weights_of(w_R) for w_R in weights], texts)


def _grams(setup: Setup, groups: Sequence[Sequence[Rollout]]) -> list[np.ndarray]:
    """(R, R) Gram of each group's scores, by a GradientGram of its own; `.grad` is empty afterwards."""
    trainer, R = setup.config.trainer, len(groups[0])
    rows = min(micro_batch_rows(setup), R, ROWS_AT_ONCE)
    config = replace(setup.config, trainer=replace(trainer, micro_batch=rows))
    own = replace(setup, config=config, gram=GradientGram(setup.policy.model))
    found = []
    for rollouts in groups:
        block = measured_block(own, torch.ones(R), functools.partial(_scores, own, rollouts), check=True)
        (measured,) = block.read(own, block.scalars)
        assert measured.gram is not None
        found.append(measured.gram)
        for parameter in setup.policy.model.parameters():
            parameter.grad = None
    return found


def _scores(setup: Setup, rollouts: Sequence[Rollout], rows: slice) -> torch.Tensor:
    return row_sums(setup, rollouts[rows])


def _weights_of(weights_R: np.ndarray) -> np.ndarray:
    """(S, R): the group's own weights, or those of k = 1 .. R-1 right rollouts where it has none."""
    if weights_R.any():
        return weights_R[None]
    R = len(weights_R)
    right = np.arange(R)[None] < np.arange(1, R)[:, None]
    return right - right.mean(axis=1, keepdims=True)


def _metrics(
    own: Sequence[np.ndarray], wide: Sequence[np.ndarray], weights: Sequence[np.ndarray], texts: Sequence[np.ndarray]
) -> dict[str, float]:
    metrics = {"float32/groups": float(len(own))}
    values = [
        [spectra.singular_values(*merged(gram, w_SR, np.broadcast_to(same_R, w_SR.shape))) for gram in (K, exact)]
        for K, exact, w_SR, same_R in zip(own, wide, weights, texts, strict=True)
    ]
    for name, quantity in QUANTITIES.items():
        found = [[np.atleast_1d(quantity(one_SR)) for one_SR in both] for both in values]
        differences = [ours / theirs - 1 for ours, theirs in found]
        interval = mean_interval([d.mean() for d in differences])
        largest = float(max(np.abs(d).max() for d in differences))
        metrics |= {f"float32/{name}": interval.mean, f"float32/{name}_largest": largest}
        if interval.known:
            metrics |= {f"float32/{name}_low": interval.low, f"float32/{name}_high": interval.high}
        if name == BY_K:
            metrics |= _by_k(weights, differences, [theirs for _, theirs in found])
    entries = [np.abs(a - b) / np.sqrt(np.outer(b.diagonal(), b.diagonal())) for a, b in zip(own, wide, strict=True)]
    return metrics | {"float32/entry": float(np.mean([e.max() for e in entries]))}


def _by_k(
    weights: Sequence[np.ndarray], differences: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> dict[str, float]:
    """`float32/k<k>/...` by the number k of rollouts of positive weight, the right ones under a reward of 0 or 1."""
    k = np.concatenate([(w_SR > 0).sum(axis=1) for w_SR in weights])
    difference, value = np.concatenate(differences), np.concatenate(values)
    metrics: dict[str, float] = {}
    for one in np.unique(k).tolist():
        own = difference[k == one]
        metrics |= {
            f"float32/k{one}/groups": float(len(own)), f"float32/k{one}/value": float(value[k == one].mean()),
            f"float32/k{one}/{BY_K}": float(own.mean()), f"float32/k{one}/{BY_K}_largest": float(np.abs(own).max()),
        }  # fmt: skip
    return metrics
