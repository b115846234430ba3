"""AdamW with float32 master weights, updated slice by slice, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_sweeps.config import TrainerConfig
from grpo_sweeps.engine.update_geometry import UpdateGeometry

SLICES = 128  # an update is made in about so many; each needs 12 bytes an entry beside what stays
LEAST_SLICE = 2**22  # entries: smaller slices would keep the device waiting for the host
Piece = tuple[int, slice | None]
"""A parameter's number, and its flat entries, None for all of a tensor whose memory is no row."""


class MasterAdamW:
    """AdamW on float32 copies of the parameters that are in a half type.

    At a learning rate of 1e-6 an update is far below the spacing of bfloat16 numbers: applied to the bfloat16 weights
    it would be rounded away. Parameters in float32 or float64 are their own masters.

    AdamW treats every entry by itself. So an update in slices has the same bits as one of everything at once, whose
    float32 gradients and temporaries would take 12 bytes a parameter: a fifth more than all that a training run keeps.
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
        require_finite(norm)
        if geometry is not None:
            geometry.gradient(p.grad for p in self.parameters if p.grad is not None)
        scale = 1.0
        if self.max_grad_norm > 0 and norm > self.max_grad_norm:
            scale = self.max_grad_norm / norm
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        (group,) = self.adamw.param_groups
        group["lr"] = lr
        everything = group["params"]
        try:
            if geometry is None:
                self._step_in_slices(group, range(len(self.parameters)))
            else:
                self._step_one_by_one(group, geometry)
        finally:
            group["params"] = everything
        self.zero_grad()
        return norm

    def _step_in_slices(self, group: dict[str, Any], chosen: Iterable[int]) -> None:
        """AdamW's own step of the parameters of these numbers, on views of a slice of the masters and of their
        moments."""
        counts = dict[int, Tensor]()
        for pieces in self._slices(chosen):
            counts |= self._step_slice(group, pieces)
        self._count(counts)

    def _step_slice(self, group: dict[str, Any], pieces: Sequence[Piece]) -> dict[int, Tensor]:
        """AdamW's own step of one slice. Returns by parameter its count of steps afterwards, which `_count` takes over
        when all slices are done: each must see the one before."""
        counts, views = dict[int, Tensor](), list[Tensor]()
        try:
            for i, entries in pieces:
                parameter, master = self.parameters[i], self.masters[i]
                state = self._state(master)
                view = _part(master, entries)
                view.grad = _part(parameter.grad, entries).to(master.dtype)
                moments = {name: _part(state[name], entries) for name in ("exp_avg", "exp_avg_sq")}
                self.adamw.state[view] = {"step": state["step"].clone(), **moments}
                views.append(view)
            group["params"] = views
            self.adamw.step()
            for view, (i, entries) in zip(views, pieces, strict=True):
                counts[i] = self.adamw.state[view]["step"]
                if self.masters[i] is not self.parameters[i]:
                    _part(self.parameters[i], entries).copy_(view)
        finally:
            for view in views:
                self.adamw.state.pop(view, None)
        return counts

    def _count(self, counts: Mapping[int, Tensor]) -> None:
        for i, count in counts.items():
            self._state(self.masters[i])["step"].copy_(count)

    def _slices(self, chosen: Iterable[int]) -> Iterator[list[Piece]]:
        """Which entries are updated together: pieces of parameters."""
        sizes = {i: self.parameters[i].numel() for i in chosen if self.parameters[i].grad is not None}
        most = max(LEAST_SLICE, sum(sizes.values()) // SLICES)
        pieces, left = list[Piece](), most
        for i, size in sizes.items():
            parameter, start = self.parameters[i], 0
            if not all(t.is_contiguous() for t in (parameter, parameter.grad, self.masters[i]) if t is not None):
                yield [(i, None)]
                continue
            while start < size:
                end = min(size, start + left)
                pieces.append((i, slice(start, end)))
                left -= end - start
                start = end
                if not left:
                    yield pieces
                    pieces, left = [], most
        if pieces:
            yield pieces

    def _state(self, master: Tensor) -> dict[str, Any]:
        """AdamW's state of a master, as AdamW itself begins it."""
        state: dict[str, Any] = self.adamw.state[master]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state

    def _step_one_by_one(self, group: dict[str, Any], geometry: UpdateGeometry) -> None:
        """The same update, to the bit, one parameter at a time: whole where the geometry wants that, else slice by
        slice, so that nothing large is held twice."""
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            counts, slices = dict[int, Tensor](), list(self._slices([i]))
            if geometry.wants_whole(master) or not slices:
                windows: list[tuple[slice | None, list[list[Piece]]]] = [(None, slices)]
            else:
                windows = [(pieces[0][1], [pieces]) for pieces in slices]
            for entries, inside in windows:
                weights, stored = _part(master, entries), _part(parameter, entries)
                before = weights.clone()
                stored_before = before if master is parameter else stored.clone()
                for pieces in inside:
                    counts |= self._step_slice(group, pieces)
                geometry.part(before, weights, stored_before, stored)
            self._count(counts)
            geometry.end(master.shape)

    @property
    def bytes_to_come(self) -> int:
        """What the moments will take that AdamW makes at the first update."""
        return sum(2 * master.nbytes for master in self.masters if not self.adamw.state.get(master))

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

    @torch.no_grad()
    def weights_norm(self) -> float:
        """The norm of all trainable weights, of the masters; infinite or NaN where a weight is."""
        norm = float(_norm(self.masters))
        # The squares of weights over 1e19 are no float32 numbers.
        return norm if math.isfinite(norm) else float(_norm(self.masters, torch.float64))

    def _grad_norm(self) -> Tensor:
        return _norm([p.grad for p in self.parameters if p.grad is not None])


def require_finite(norm: float) -> None:
    """Raise FloatingPointError where a gradient's norm is not finite."""
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}: the run has diverged; lower trainer.lr")


def _norm(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of all entries together; each tensor's own is taken in `dtype`, or in float64 where it is that."""
    if not tensors:
        return torch.zeros(())
    norms = torch.stack(
        [torch.linalg.vector_norm(t, dtype=torch.float64 if t.dtype == torch.float64 else dtype) for t in tensors]
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


def _part(tensor: Tensor | None, entries: slice | None) -> Tensor:
    """The entries of a tensor in the order of its memory, or all of it, as a view."""
    assert tensor is not None
    return tensor.detach() if entries is None else tensor.detach().view(-1)[entries]
