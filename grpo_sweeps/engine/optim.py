"""AdamW with float32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grpo_sweeps.config import TrainerConfig
from grpo_sweeps.engine.update_geometry import UpdateGeometry


class MasterAdamW:
    """AdamW on float32 copies of the parameters that are in a half type.

    At a learning rate of 1e-6 an update is far below the spacing of bfloat16 numbers: applied to the bfloat16 weights
    it would be rounded away. Parameters in float32 or float64 are their own masters.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], config: TrainerConfig) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters: list[Tensor] = [
            p if p.dtype in (torch.float32, torch.float64) else p.detach().float().clone() for p in self.parameters
        ]
        self.max_grad_norm = config.max_grad_norm
        self.adamw = torch.optim.AdamW(
            self.masters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, foreach=True
        )

    @torch.no_grad()
    def step(self, lr: float, geometry: UpdateGeometry | None = None) -> float:
        """Clip, update at learning rate `lr`, clear the gradients. `geometry` is told what it does to the weights.

        Returns:
            The norm of the gradient before clipping.

        Raises:
            FloatingPointError: if that norm is not finite; nothing has been updated then.
        """
        norm = float(self._grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}: the run has diverged; lower trainer.lr")
        if geometry is not None:
            geometry.gradient(p.grad for p in self.parameters if p.grad is not None)
        scale = 1.0
        if self.max_grad_norm > 0 and norm > self.max_grad_norm:
            scale = self.max_grad_norm / norm
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is None:
                continue
            grad = parameter.grad.mul_(scale)
            if master is not parameter:
                master.grad = grad.float()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if geometry is None:
            self.adamw.step()
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                _copy_back(parameter, master)
        else:
            self._step_one_by_one(geometry)
        self.zero_grad()
        return norm

    def _step_one_by_one(self, geometry: UpdateGeometry) -> None:
        """The same update, to the bit, one parameter at a time: AdamW treats every entry by itself."""
        (group,) = self.adamw.param_groups
        everything = group["params"]
        try:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                before = master.detach().clone()
                stored = before if master is parameter else parameter.detach().clone()
                group["params"] = [master]
                self.adamw.step()
                _copy_back(parameter, master)
                geometry.parameter(before, master, stored, parameter)
        finally:
            group["params"] = everything

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's moments, and the master copies of half-precision parameters (empty where there are none)."""
        own = [m for m, p in zip(self.masters, self.parameters, strict=True) if m is not p]
        return {"adamw": self.adamw.state_dict(), "masters": own}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        own = [m for m, p in zip(self.masters, self.parameters, strict=True) if m is not p]
        for master, saved in zip(own, state["masters"], strict=True):
            master.copy_(saved)

    def _grad_norm(self) -> Tensor:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return torch.zeros(())
        norms = torch.stack(
            [
                torch.linalg.vector_norm(g, dtype=torch.float64 if g.dtype == torch.float64 else torch.float32)
                for g in grads
            ]
        )
        return torch.linalg.vector_norm(norms.double())


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The learning rate of update `step` (0-based): linear warm-up, then constant, or linear or cosine decay towards
    0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def _copy_back(parameter: Tensor, master: Tensor) -> None:
    """Copy the optimiser's float32 weights into the training dtype, where they are not the parameter itself."""
    if master is not parameter:
        parameter.copy_(master)
        master.grad = None
