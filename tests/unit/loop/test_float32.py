"""The dtype against float32: the same as with a second copy of the model, and nothing of the run is changed by it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from grpo_sweeps import spectra
from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.engine.policy import in_float32
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.scoring import token_log_probs
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.loop.step import training_step
from grpo_sweeps.loop.verification import _weights_of, against_float32
from tests.unit.loop.conftest import MakeConfig


def half_run(make_config: MakeConfig, **changes: Any) -> Setup:
    config = make_config(**changes)
    return prepare(dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16")))


def gram_of(setup: Setup, model: torch.nn.Module, rollouts: list) -> np.ndarray:
    with GradientGram(model).measure([len(rollouts)]) as m:
        token_log_probs(setup, rollouts, model)[0].sum(dim=1).sum().backward()
    model.zero_grad()
    return m.matrices()[0].numpy()


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_equals_a_float32_copy_of_the_model(make_config: MakeConfig, micro_batch: int | None) -> None:
    setup = half_run(make_config, trainer={"micro_batch": micro_batch})
    rated = rollouts_with_advantages(setup, 0)
    groups = [rated.rollouts_of([g]) for g in range(len(rated.problems))]
    weights = [w_R.numpy() for w_R in rated.weights_GR]
    model = setup.policy.model
    places = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    found = against_float32(setup, groups, weights)
    assert [(p.data_ptr(), p.dtype) for p in model.parameters()] == places
    assert all(bool((p.grad == 1).all()) and p.grad.dtype == p.dtype for p in model.parameters())
    model.zero_grad()
    wide = copy.deepcopy(model).float()
    differences, largest, by_k = [], [], {}
    for rollouts, w_R in zip(groups, weights, strict=True):
        ranks = [
            spectra.effective_rank(spectra.singular_values(gram_of(setup, m, rollouts), _weights_of(w_R)))
            for m in (model, wide)
        ]
        for k, ours, theirs in zip((_weights_of(w_R) > 0).sum(axis=1), *map(np.atleast_1d, ranks), strict=True):
            by_k.setdefault(int(k), []).append((ours / theirs - 1, theirs))
        differences.append(np.mean(ranks[0] / ranks[1] - 1))
        largest.append(np.abs(ranks[0] / ranks[1] - 1).max())
    assert found["float32/groups"] == len(groups)
    assert found["float32/effective_rank"] == pytest.approx(np.mean(differences), rel=1e-3, abs=1e-6)
    assert found["float32/effective_rank_largest"] == pytest.approx(max(largest), rel=1e-3)
    low, middle, high = (found[f"float32/effective_rank{end}"] for end in ("_low", "", "_high"))
    assert low <= middle <= high
    assert found["float32/entry"] > 0
    assert {name.split("/")[1] for name in found if "/k" in name} == {f"k{k}" for k in by_k}
    for k, pairs in by_k.items():
        changes, values = np.array(pairs).T
        assert found[f"float32/k{k}/groups"] == len(pairs)
        assert found[f"float32/k{k}/value"] == pytest.approx(values.mean(), rel=1e-5)
        assert found[f"float32/k{k}/effective_rank"] == pytest.approx(changes.mean(), rel=1e-3, abs=1e-6)
        assert found[f"float32/k{k}/effective_rank_largest"] == pytest.approx(np.abs(changes).max(), rel=1e-3, abs=1e-6)


def test_groups_without_weights_are_taken_at_every_k() -> None:
    w_SR = _weights_of(np.zeros(4))
    assert w_SR.shape == (3, 4)
    np.testing.assert_allclose(w_SR[0], [0.75, -0.25, -0.25, -0.25])
    own = np.array([0.5, -0.5, 0.0, 0.0])
    np.testing.assert_array_equal(_weights_of(own), own[None])


def test_a_step_with_it_is_the_step_without(make_config: MakeConfig) -> None:
    plain, compared = (half_run(make_config, analysis={"compare_float32": groups}) for groups in (0, 2))
    one, two = training_step(plain, 0), training_step(compared, 0)
    weights = [list(setup.policy.model.parameters()) for setup in (plain, compared)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert two.metrics["float32/groups"] == 2 and "float32/groups" not in one.metrics
    assert not any(name.startswith("float32/") for name in training_step(compared, 1).metrics)


def test_a_float32_model_has_nothing_to_compare(make_config: MakeConfig) -> None:
    metrics = training_step(prepare(make_config(analysis={"compare_float32": 2})), 0).metrics
    assert not any(name.startswith("float32/") for name in metrics)


def test_the_parameters_come_back_after_a_fault() -> None:
    model = torch.nn.Linear(3, 2).bfloat16()
    weight, data = model.weight, model.weight.data_ptr()
    with pytest.raises(RuntimeError, match="inside"), in_float32(model):
        assert model.weight is weight and weight.dtype == torch.float32
        model(torch.ones(1, 3)).sum().backward()
        raise RuntimeError("inside")
    assert weight.dtype == torch.bfloat16 and weight.data_ptr() == data and weight.grad is None
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
