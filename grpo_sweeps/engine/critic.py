"""A learned value: a linear head on the policy's last hidden state, with a separate backward and optimiser.

The hidden states come without gradient, so that the value's loss moves only the head: neither the policy's gradient nor
the Gram of its rows has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_sweeps.estimators.token_level import gae


class Critic:
    """V(s_t) = <v, h_t> + b, with h_t (width,) the hidden state from which token t is predicted.

    It begins as V = 0. AdamW fits it at rate `lr` to the returns of a step's tokens, `updates` times per step.
    """

    def __init__(self, width: int, device: torch.device, lr: float, updates: int) -> None:
        self.head = nn.Linear(width, 1, device=device, dtype=torch.float32)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()
        self.updates = updates
        self.adamw = torch.optim.AdamW(self.head.parameters(), lr=lr, weight_decay=0.0)

    @torch.no_grad()
    def values(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Each rollout's hidden states (T, width) -> its values (T,), float64 on the CPU."""
        return [self.head(h_TH).squeeze(1).double().cpu() for h_TH in features]

    def fit(self, features: Sequence[Tensor], returns: Sequence[Tensor]) -> dict[str, float]:
        """Least squares over all tokens, each counted once.

        Returns:
            How good the head was before: `critic/loss`, the mean squared error, and `critic/explained_variance`, 1 less
            the variance of the errors over that of the returns, left out where the returns do not vary.
        """
        h_NH = torch.cat(list(features))
        targets_N = torch.cat(list(returns)).to(h_NH)
        found: dict[str, float] = {}
        for update in range(self.updates):
            error_N = self.head(h_NH).squeeze(1) - targets_N
            loss = error_N.square().mean()
            if update == 0:
                found = {"critic/loss": loss.item()} | _explained(error_N.detach(), targets_N)
            self.adamw.zero_grad()
            loss.backward()
            self.adamw.step()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"head": dict(self.head.state_dict()), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.adamw.load_state_dict(state["adamw"])


def credit(rewards: Tensor, values: Sequence[Tensor], gamma: float, lam: float) -> list[Tensor]:
    """The generalised advantages of each rollout's tokens, (T,) float64 each: `token_level.gae` with the reward,
    (rows,), paid with the last token, and the values (T,) of each row."""
    lengths = torch.tensor([len(v_T) for v_T in values])
    mask_BT = torch.arange(int(lengths.max())) < lengths[:, None]
    rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    rewards_BT[torch.arange(len(values)), lengths - 1] = rewards.double().cpu()
    values_BT = nn.utils.rnn.pad_sequence([v_T.double() for v_T in values], batch_first=True)
    A_BT = torch.from_numpy(
        gae(rewards_BT[None].numpy(), values_BT[None].numpy(), mask_BT[None].numpy(), gamma, lam)[0]
    )
    return [A_T[:length] for A_T, length in zip(A_BT, lengths.tolist(), strict=True)]


def _explained(error_N: Tensor, targets_N: Tensor) -> dict[str, float]:
    variance = float(targets_N.double().var(correction=0))
    if not variance > 0:
        return {}
    return {"critic/explained_variance": 1 - float(error_N.double().var(correction=0)) / variance}
