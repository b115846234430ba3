"""MasterAdamW against torch's AdamW, and against what bfloat16 would have lost."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_sweeps.config import TrainerConfig
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
    for _ in range(3):
        first.grad = torch.ones_like(first)
        one.step(1e-3)
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        second.copy_(first)
    for weight, optimizer in ((first, one), (second, two)):
        weight.grad = torch.ones_like(weight)
        optimizer.step(1e-3)
    assert torch.equal(one.masters[0], two.masters[0])


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [("constant", 0, 0.5), ("constant", 1, 1.0), ("constant", 9, 1.0), ("linear", 6, 0.5), ("cosine", 6, 0.5)],
)
def test_schedule(schedule: str, step: int, factor: float) -> None:
    config = TrainerConfig(steps=10, lr=2.0, warmup_steps=2, schedule=schedule)
    assert learning_rate(config, step) == pytest.approx(2.0 * factor)
