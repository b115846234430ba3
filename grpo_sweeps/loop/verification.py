"""What a run makes sure of before its first update, on a small block: the Gram is that of the gradients it applies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from grpo_sweeps.engine.gram import measured_floor, verify_against_autograd
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.loop.scoring import row_sums
from grpo_sweeps.loop.setup import VERIFIED_ROWS, Setup

TOKENS = 128  # of a row of the block that is verified
LARGE_MODEL = 10**9  # trainable parameters from which on two rows' gradients are held at once, not four


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
