"""MasterAdamW against torch's AdamW, and against what bfloat16 would have lost."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from grpo_sweeps.config import TrainerConfig
from grpo_sweeps.engine import optim
from grpo_sweeps.engine.optim import MasterAdamW, learning_rate


def parameter(dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 12).to(dtype))


def test_float32_equals_adamw() -> None:
    ours, reference = parameter(torch.float32), parameter(torch.float32)
    config = TrainerConfig(lr=1e-2, max_grad_norm=0.0, weight_decay=0.1)
    optimizer = MasterAdamW([ours], config)
    torch_adamw = torch.optim.AdamW([reference], lr=1e-2, betas=config.betas, weight_decay=0.1)
    for step in range(5):
        grad = torch.sin(torch.arange(12.0) + step)
        ours.grad, reference.grad = grad.clone(), grad.clone()
        optimizer.step(1e-2)
        torch_adamw.step()
    assert torch.equal(ours, reference)


def several(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((7, 5), (1,), (64, 33), (13,), (1025,))
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def updated(dtype: torch.dtype, steps: int = 4) -> tuple[list[torch.nn.Parameter], MasterAdamW]:
    """Parameters after some updates; the second of them has a gradient only from the third step on."""
    parameters, generator = several(dtype), torch.Generator().manual_seed(4)
    optimizer = MasterAdamW(parameters, TrainerConfig(lr=1e-2, max_grad_norm=1.0, weight_decay=0.1))
    for step in range(steps):
        for number, one in enumerate(parameters):
            grad = torch.randn(one.shape, generator=generator).to(dtype)
            one.grad = grad if number != 1 or step >= 2 else None
        optimizer.step(1e-2)
    return parameters, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("entries", [1, 100, 2000])
def test_slices_have_the_bits_of_one_update(dtype: torch.dtype, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, one = updated(dtype)
    assert len(list(one._slices(range(len(one.parameters))))) == 0  # no gradient is left
    monkeypatch.setattr(optim, "LEAST_SLICE", entries)
    monkeypatch.setattr(optim, "SLICES", 10**9)
    sliced, other = updated(dtype)
    for a, b in zip([*whole, *one.masters], [*sliced, *other.masters], strict=True):
        assert torch.equal(a, b)
    states = one.adamw.state_dict(), other.adamw.state_dict()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert list(states[0]["state"]) == list(states[1]["state"])
    for number, state in states[0]["state"].items():
        assert state["step"] == states[1]["state"][number]["step"] == (2 if number == 1 else 4)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], states[1]["state"][number][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_no_row_is_updated_whole(dtype: torch.dtype) -> None:
    """Transposed parameters and gradients, beside plain ones of the same values."""
    config = TrainerConfig(lr=1e-2, max_grad_norm=0.0)
    values, grads = torch.randn(6, 9), torch.randn(3, 6, 9)
    plain = [torch.nn.Parameter(values.to(dtype).clone()) for _ in range(2)]
    turned = [torch.nn.Parameter(values.to(dtype).T.contiguous().T), torch.nn.Parameter(values.to(dtype).clone())]
    one, other = MasterAdamW(plain, config), MasterAdamW(turned, config)
    for grad in grads.to(dtype):
        for parameter in plain:
            parameter.grad = grad.clone()
        turned[0].grad, turned[1].grad = grad.clone(), grad.T.contiguous().T
        one.step(1e-2)
        other.step(1e-2)
    for a, b in zip([*plain, *one.masters], [*turned, *other.masters], strict=True):
        assert torch.equal(a, b)


def test_an_update_that_fails_leaves_a_state_that_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, optimizer = updated(torch.bfloat16)
    for one in parameters:
        one.grad = torch.ones_like(one)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.adamw, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(1e-2)
    assert set(optimizer.state_dict()["adamw"]["state"]) == set(range(len(parameters)))


def test_every_entry_is_in_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "LEAST_SLICE", 100)
    parameters = several(torch.float32)
    optimizer = MasterAdamW(parameters, TrainerConfig())
    for one in parameters:
        one.grad = torch.ones_like(one)
    slices = list(optimizer._slices(range(len(optimizer.parameters))))
    assert all(sum(e.stop - e.start for _, e in pieces) == 100 for pieces in slices[:-1])
    seen = [(i, entry) for pieces in slices for i, e in pieces for entry in range(e.start, e.stop)]
    assert seen == [(i, entry) for i, one in enumerate(parameters) for entry in range(one.numel())]


def test_an_update_needs_little_beside_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are made and alive at once within a step, at most; a whole update needs 12 a bfloat16 parameter."""
    monkeypatch.setattr(optim, "LEAST_SLICE", 1)
    parameters = [torch.nn.Parameter(torch.randn(100, 1000).bfloat16()) for _ in range(20)]
    entries = sum(one.numel() for one in parameters)
    optimizer = MasterAdamW(parameters, TrainerConfig())
    for _ in range(2):  # the moments are made in the first
        for one in parameters:
            one.grad = torch.ones_like(one)
        with Peak() as peak:
            optimizer.step(1e-3)
    assert 0 < peak.most < 0.1 * entries


class Peak(TorchDispatchMode):
    """The most bytes that storages made inside hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in given | self.known:
                size = x.untyped_storage().nbytes()
                self.known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(x, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self.known.discard(key)


def test_small_updates_add_up_in_bfloat16() -> None:
    """100 updates of 1e-6 move the master by 1e-4; bfloat16 near 1 is spaced by 4e-3 and would never have moved."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], TrainerConfig(lr=1e-6, max_grad_norm=0.0))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step(1e-6)
    assert torch.equal(weight, torch.ones(4, dtype=torch.bfloat16))
    assert torch.allclose(optimizer.masters[0], torch.full((4,), 1 - 1e-4), atol=2e-6)


def test_clipping_returns_the_norm_before() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = MasterAdamW([weight], TrainerConfig(lr=1.0, max_grad_norm=1.0))
    weight.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(1.0) == pytest.approx(5.0)
    assert weight.grad is None


def test_a_gradient_that_is_not_finite_stops_before_the_update() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = MasterAdamW([weight], TrainerConfig())
    weight.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(FloatingPointError, match=r"trainer\.lr"):
        optimizer.step(1e-3)
    assert torch.equal(weight, torch.ones(2))


def test_state_goes_round() -> None:
    config = TrainerConfig(lr=1e-3)
    first, second = parameter(torch.bfloat16), parameter(torch.bfloat16)
    one, two = MasterAdamW([first], config), MasterAdamW([second], config)
    grads = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    for grad in grads[:3]:
        first.grad = grad.clone()
        one.step(1e-3)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    with torch.no_grad():
        second.copy_(first)
    for weight, optimizer in ((first, one), (second, two)):
        weight.grad = grads[3].clone()
        optimizer.step(1e-3)
    assert torch.equal(one.masters[0], two.masters[0])


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [("constant", 0, 0.5), ("constant", 1, 1.0), ("constant", 9, 1.0), ("linear", 6, 0.5), ("cosine", 6, 0.5)],
)
def test_schedule(schedule: str, step: int, factor: float) -> None:
    config = TrainerConfig(steps=10, lr=2.0, warmup_steps=2, schedule=schedule)
    assert learning_rate(config, step) == pytest.approx(2.0 * factor)


def test_the_weights_norm_is_the_masters() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    other = torch.nn.Parameter(torch.full((4,), 6.0))
    optimizer = MasterAdamW([weight, frozen, other], TrainerConfig())
    assert optimizer.weights_norm() == pytest.approx(13.0)
    with torch.no_grad():
        optimizer.masters[0] += 1e-4  # too little for bfloat16
        assert optimizer.weights_norm() > 13.0
        other[0] = 1e30
        assert optimizer.weights_norm() == pytest.approx(1e30, rel=1e-6)
        other[0] = math.inf
    assert optimizer.weights_norm() == math.inf
    assert MasterAdamW([weight], TrainerConfig()).weights_norm() == pytest.approx(5.0)
