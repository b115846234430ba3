"""What an update does to the weights, against the definitions written out on whole copies of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo_sweeps.config import TrainerConfig
from grpo_sweeps.engine import optim, update_geometry
from grpo_sweeps.engine.optim import MasterAdamW
from grpo_sweeps.engine.update_geometry import UpdateGeometry, _sizes, hoyer, matrix_ranks
from grpo_sweeps.types import UpdateRecord

SHAPES = {"model.layers.0.q.weight": (5, 7), "model.layers.0.norm.weight": (6,), "model.embed.weight": (9, 4),
          "model.layers.1.experts": (2, 3, 4)}  # fmt: skip


def trained(dtype: torch.dtype, lr: float, steps: int = 3) -> tuple[list[torch.nn.Parameter], MasterAdamW]:
    """Parameters of the shapes above after some steps; the next gradient is in place, the last parameter without."""
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES.values()]
    optimizer = MasterAdamW(parameters, TrainerConfig(max_grad_norm=0.5, weight_decay=0.1))
    for i in range(steps + 1):
        if i:
            optimizer.step(lr)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
    parameters[-1].grad = None
    return parameters, optimizer


def slow_ranks(change: np.ndarray) -> tuple[float, float]:
    if change.ndim != 2 or not change.any():
        return math.nan, math.nan
    s = np.linalg.svd(change, compute_uv=False)
    return float((s**2).sum() / s[0] ** 2), float(s.sum() ** 2 / (s**2).sum())


def slow_hoyer(x: np.ndarray) -> float:
    root = math.sqrt(x.size)
    return float((root - np.abs(x).sum() / np.sqrt((x**2).sum())) / (root - 1))


def wide(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    return [t.detach().double().numpy().copy() for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_number_against_the_definitions(dtype: torch.dtype) -> None:
    parameters, optimizer = trained(dtype, 1e-2)
    grads = [np.zeros(p.shape) if p.grad is None else p.grad.double().numpy().copy() for p in parameters]
    before, stored = wide(optimizer.masters), wide(list(parameters))
    geometry = UpdateGeometry(list(SHAPES))
    norm = optimizer.step(1e-2, geometry)
    changes = [after - b for after, b in zip(wide(optimizer.masters), before, strict=True)]
    moved = [after != b for after, b in zip(wide(list(parameters)), stored, strict=True)]

    records = geometry.records(7)
    assert [(r.step, r.name, r.shape) for r in records] == [(7, name, shape) for name, shape in SHAPES.items()]
    assert [r.layer for r in records] == ["model.layers.0", "model.layers.0", "model.embed", "model.layers.1"]
    for record, change, differs in zip(records, changes, moved, strict=True):
        assert record.sq_norm == pytest.approx((change**2).sum(), rel=1e-5)
        assert record.l1 == pytest.approx(np.abs(change).sum(), rel=1e-5)
        assert (record.changed, record.changed_float32) == (differs.sum(), (change != 0).sum())
        ranks = slow_ranks(change)
        assert (record.stable_rank, record.effective_rank) == pytest.approx(ranks, rel=1e-4, nan_ok=True)
    assert records[-1].sq_norm == records[-1].changed == 0 and math.isnan(records[-1].sparsity)
    assert records[0].sparsity == pytest.approx(slow_hoyer(changes[0]), abs=1e-5)

    change, weights, grad = (np.concatenate([x.ravel() for x in xs]) for xs in (changes, before, grads))
    metrics = geometry.metrics()
    assert metrics["update/changed_share"] == np.concatenate([d.ravel() for d in moved]).mean()
    assert metrics["update/changed_share_float32"] == (change != 0).mean()
    assert metrics["update/norm"] == pytest.approx(np.linalg.norm(change), rel=1e-5)
    assert metrics["update/relative_norm"] == pytest.approx(np.linalg.norm(change) / np.linalg.norm(weights), rel=1e-5)
    assert metrics["update/hoyer"] == pytest.approx(slow_hoyer(change), rel=1e-5)
    assert metrics["gradient/hoyer"] == pytest.approx(slow_hoyer(grad), rel=1e-5)
    assert norm == pytest.approx(np.linalg.norm(grad), rel=1e-5) and norm > 0.5  # so that it was clipped after that


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_measured_update_is_the_unmeasured_one(dtype: torch.dtype) -> None:
    (ours, measured), (others, plain) = trained(dtype, 1e-2), trained(dtype, 1e-2)
    for _ in range(2):
        measured.step(1e-2, UpdateGeometry(list(SHAPES)))
        plain.step(1e-2)
        for p, q in zip(ours, others, strict=True):
            assert torch.equal(p, q)
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    one, two = measured.state_dict(), plain.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(one["masters"], two["masters"], strict=True))
    assert one["adamw"]["param_groups"] == two["adamw"]["param_groups"]
    for i, state in two["adamw"]["state"].items():
        assert all(torch.equal(state[key], one["adamw"]["state"][i][key]) for key in state)


def test_tiny_steps_move_the_masters_and_no_bfloat16_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer, geometry = MasterAdamW([weight], TrainerConfig(lr=1e-6)), UpdateGeometry(["w.weight"])
    weight.grad = torch.ones_like(weight)
    optimizer.step(1e-6, geometry)
    metrics = geometry.metrics()
    assert metrics["update/changed_share"] == 0 and metrics["update/changed_share_float32"] == 1
    assert metrics["update/norm"] == pytest.approx(4e-6, rel=0.1)
    assert geometry.records(0)[0].effective_rank == pytest.approx(1, abs=1e-6)


def test_a_step_without_a_gradient_moves_nothing_and_has_no_sparsity() -> None:
    parameters, optimizer = trained(torch.float32, 1e-2)
    optimizer.zero_grad()
    geometry = UpdateGeometry(list(SHAPES))
    assert optimizer.step(1e-2, geometry) == 0
    zeros = ("update/changed_share", "update/changed_share_float32", "update/norm", "update/relative_norm")
    assert geometry.metrics() == dict.fromkeys(zeros, 0.0)
    assert len(parameters) == len(geometry.records(0))


def test_a_gradient_that_is_not_finite_is_not_measured() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, geometry = MasterAdamW([weight], TrainerConfig()), UpdateGeometry(["w"])
    weight.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(FloatingPointError):
        optimizer.step(1e-3, geometry)
    assert geometry.records(0) == [] and torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_weights_that_are_not_finite_any_more_are_recorded_without_ranks(value: float) -> None:
    """To measure is never what ends a run: that the run has diverged is the next gradient's to say."""
    before, after = torch.ones(3, 3), torch.full((3, 3), value)
    geometry = UpdateGeometry(["w.weight"])
    geometry.part(before, after, before, after)
    geometry.end(before.shape)
    (record,) = geometry.records(0)
    assert not math.isfinite(record.sq_norm) and math.isnan(record.effective_rank) and math.isnan(record.sparsity)
    assert geometry.metrics()["update/changed_share"] == 1 and "update/hoyer" not in geometry.metrics()


@pytest.mark.parametrize("shape", [(3, 50), (50, 3), (1, 8), (20, 20)])
def test_ranks_in_blocks_are_those_of_the_whole(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    change = 1e-7 * torch.randn(shape)
    whole = _sizes(change)
    monkeypatch.setattr(update_geometry, "BLOCK", 60)
    assert _sizes(change) == pytest.approx(whole, rel=1e-12)
    assert matrix_ranks(change) == pytest.approx(slow_ranks(change.double().numpy()), rel=1e-6)
    low = torch.outer(torch.randn(shape[0]), torch.randn(shape[1])).double()
    assert matrix_ranks(low) == pytest.approx((1, 1), abs=1e-6)


def test_what_has_no_rank_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_geometry, "MAX_SIDE", 4)
    for change in (torch.ones(5), torch.ones(2, 2, 2), torch.ones(5, 5), torch.ones(0, 3), torch.zeros(3, 3)):
        assert all(map(math.isnan, matrix_ranks(change)))
    assert matrix_ranks(torch.ones(5, 4)) == pytest.approx((1, 1))


def test_hoyer_of_one_entry_alone_of_equal_entries_and_of_none() -> None:
    assert hoyer(2.0, 4.0, 100) == 1 and hoyer(30.0, 9.0, 100) == 0
    assert math.isnan(hoyer(0.0, 0.0, 3)) and math.isnan(hoyer(1.0, 1.0, 1))


def test_records_are_frozen_numbers() -> None:
    parameters, optimizer = trained(torch.bfloat16, 1e-2)
    geometry = UpdateGeometry(list(SHAPES))
    optimizer.step(1e-2, geometry)
    for record in geometry.records(0):
        assert isinstance(record, UpdateRecord) and isinstance(record.changed, int) and isinstance(record.l1, float)
        assert all(type(side) is int for side in record.shape)
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_ranks_is_taken_in_part_by_part(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights to the bit and the same record, and never more than a part held twice."""
    found, largest = [], list[int]()
    part = UpdateGeometry.part

    def watched(geometry: UpdateGeometry, before: torch.Tensor, *rest: torch.Tensor) -> None:
        largest.append(before.numel())
        part(geometry, before, *rest)

    monkeypatch.setattr(UpdateGeometry, "part", watched)
    for side, least in ((1, 5), (1, 2**22)):
        monkeypatch.setattr(update_geometry, "MAX_SIDE", side)
        monkeypatch.setattr(optim, "LEAST_SLICE", least)
        parameters, optimizer = trained(dtype, 1e-2)
        geometry = UpdateGeometry(list(SHAPES))
        largest.clear()
        norm = optimizer.step(1e-2, geometry)
        found.append((norm, [p.detach().clone() for p in parameters], geometry.records(0), max(largest[:-1])))
    (norm, weights, records, parts), (whole_norm, whole_weights, whole_records, whole) = found
    assert parts <= 5 < whole and norm == whole_norm
    assert all(torch.equal(a, b) for a, b in zip(weights, whole_weights, strict=True))
    for one, other in zip(records, whole_records, strict=True):
        assert (one.shape, one.changed, one.changed_float32) == (other.shape, other.changed, other.changed_float32)
        assert (one.l1, one.sq_norm) == pytest.approx((other.l1, other.sq_norm), rel=1e-12)
        assert math.isnan(one.stable_rank) and one.sparsity == pytest.approx(other.sparsity, rel=1e-9, nan_ok=True)
