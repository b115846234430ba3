"""Each rollout's gradient of the loss with an advantage a token, written out: no head by blocks, no micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_sweeps.loop.rollouts import Rated
from grpo_sweeps.loop.setup import Setup


def rows_of_loss(setup: Setup, rated: Rated, by_token: Sequence[Tensor]) -> Tensor:
    """(rows, parameters), of -sum_t A_t log pi_t over the number of rows."""
    parameters, rows = [p for p in setup.policy.model.parameters() if p.requires_grad], []
    for rollout, A_T in zip(rated.rollouts, by_token, strict=True):
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logp = torch.log_softmax(setup.policy.model(ids).logits[0], dim=-1)
        start = len(rollout.prompt_ids)
        loss = -sum(A_T[t - start] * logp[t - 1, ids[0, t]] for t in range(start, ids.shape[1])) / len(rated.rollouts)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(rows)


def added_gradient(setup: Setup) -> Tensor:
    """What lies in .grad."""
    return torch.cat([p.grad.flatten() for p in setup.policy.model.parameters() if p.grad is not None])
