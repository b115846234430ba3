"""Every estimator is held to what is declared of it: both ways on one example, and what is true for all rewards."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_sweeps import estimators
from grpo_sweeps.estimators import DECLARATIONS, Declaration

CONF = Path(__file__).resolve().parents[3] / "conf" / "estimator"
ALL = list(DECLARATIONS.values())
# Multiples of 1/8, so that a shift changes no difference and equal rewards stay equal.
grid = st.integers(-80, 80).map(lambda eighths: eighths / 8)


def table(values: st.SearchStrategy[Any], G: int, R: int) -> st.SearchStrategy[list[list[Any]]]:
    return st.lists(st.lists(values, min_size=R, max_size=R), min_size=G, max_size=G)


# Rewards and lengths, both (G, R).
steps = st.tuples(st.integers(1, 4), st.integers(2, 6)).flatmap(
    lambda shape: st.tuples(table(grid, *shape), table(st.integers(1, 9), *shape))
)
EXAMPLE = ([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0], [1.0, 0.5, 0.25]], [[1, 4, 2], [3, 1, 1], [2, 2, 5]])
Step = tuple[list[list[float]], list[list[int]]]


def where(holds: Callable[[Declaration], bool]) -> pytest.MarkDecorator:
    """The test runs for each estimator of which this is declared."""
    chosen = [one for one in ALL if holds(one)]
    assert chosen
    return pytest.mark.parametrize("declared", chosen, ids=lambda one: one.name)


everywhere = where(lambda one: True)


def those(holds: Callable[[Declaration], bool]) -> list[Declaration]:
    """As `where`, for a test that draws examples: one example serves all of these, since drawing is what takes long."""
    chosen = [one for one in ALL if holds(one)]
    assert chosen
    return chosen


def advantages(declared: Declaration, rewards_GR: Tensor, lengths_GR: Tensor) -> Tensor:
    """With eps = 0 where there is one: invariance is then exact. Rewards that an estimator of rewards from 0 to 1 would
    refuse are moved and shrunk into that range."""
    if declared.unit_rewards and not ((rewards_GR >= 0) & (rewards_GR <= 1)).all():
        rewards_GR = (rewards_GR + 40) / 100
    arguments: dict[str, Any] = {} if declared.eps is None else {"eps": 0.0}
    if declared.needs_lengths:
        arguments["lengths_GR"] = lengths_GR
    return torch.from_numpy(declared.function(rewards_GR, **arguments))


def tensors(step: Step) -> tuple[Tensor, Tensor]:
    return torch.tensor(step[0], dtype=torch.float64), torch.tensor(step[1])


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def modules() -> list[Any]:
    names = [one.name for one in pkgutil.iter_modules(estimators.__path__)]
    return [importlib.import_module(f"{estimators.__name__}.{name}") for name in names]


def test_every_public_estimator_is_declared_and_every_declared_one_is_public() -> None:
    found = {
        name: function
        for module in modules()
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
        and next(iter(inspect.signature(function).parameters), "") == "rewards_GR"
    }  # fmt: skip
    assert found == {one.name: one.function for one in ALL}
    assert all(getattr(estimators, name) is function and name in estimators.__all__ for name, function in found.items())


def test_every_yaml_is_declared_and_every_declared_estimator_has_one() -> None:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml") if path.stem != "custom"}
    assert set(files) == set(DECLARATIONS)
    for name, content in files.items():
        declared = DECLARATIONS[name]
        group = dict(content.get("estimator", content))
        assert group.pop("_target_") == f"{declared.function.__module__}.{name}"
        scale = {"ddof": declared.ddof, "eps": declared.eps}
        assert group == {key: value for key, value in scale.items() if value is not None}


@everywhere
def test_the_signature_agrees(declared: Declaration) -> None:
    parameters = dict(inspect.signature(declared.function).parameters)
    assert ("lengths_GR" in parameters) == declared.needs_lengths
    for key in ("ddof", "eps"):
        assert (parameters[key].default if key in parameters else None) == getattr(declared, key)
    text = " ".join((declared.function.__doc__ or "").split())
    assert all(part in text for part in declared.source.split("; "))


@everywhere
def test_each_flag_is_true_of_the_example_or_is_not_declared(declared: Declaration) -> None:
    rewards, lengths = tensors(EXAMPLE)
    found = advantages(declared, rewards, lengths)
    alone = torch.cat([advantages(declared, rewards[g : g + 1], lengths[g : g + 1]) for g in (0, 2)])
    assert same(found.sum(dim=1), torch.zeros(3).double()) == declared.zero_sum_group
    assert same(found.sum(), torch.tensor(0.0).double()) == declared.zero_sum_step
    assert torch.equal(found[1], torch.zeros(3).double()) == declared.zero_when_equal
    assert same(advantages(declared, rewards + 5, lengths), found) == declared.shift_invariant
    assert same(advantages(declared, rewards * 3, lengths), found) == declared.scale_invariant
    assert same(alone, found[[0, 2]]) != declared.batch_dependent


@settings(deadline=None)
@given(step=steps)
def test_sums_are_zero(step: Step) -> None:
    for declared in those(lambda one: one.zero_sum_step):
        found = advantages(declared, *tensors(step))
        if declared.zero_sum_group:
            assert same(found.sum(dim=1), torch.zeros(len(found)).double())
        assert same(found.sum(), torch.tensor(0.0).double())


@settings(deadline=None)
@given(step=steps, added=grid)
def test_a_shift_changes_nothing(step: Step, added: float) -> None:
    rewards, lengths = tensors(step)
    for declared in those(lambda one: one.shift_invariant):
        assert same(advantages(declared, rewards + added, lengths), advantages(declared, rewards, lengths))


@settings(deadline=None)
@given(step=steps, factor=st.floats(0.01, 100))
def test_a_scale_changes_nothing_or_scales(step: Step, factor: float) -> None:
    rewards, lengths = tensors(step)
    for declared in those(lambda one: not one.unit_rewards):
        found = advantages(declared, rewards, lengths)
        scaled = found if declared.scale_invariant else found * factor
        assert same(advantages(declared, rewards * factor, lengths), scaled)


@settings(deadline=None)
@given(step=steps, seed=st.integers(0, 99))
@example(step=([[0.0, 0.0, 0.0], [0.0, 1 / 8, -1 / 8]], [[1, 1, 1], [1, 1, 1]]), seed=0)  # two means that are equal
def test_order_does_not_matter(step: Step, seed: int) -> None:
    rewards, lengths = tensors(step)
    for declared in ALL:
        found = advantages(declared, rewards, lengths)
        generator = torch.Generator().manual_seed(seed)
        inside, across = (torch.randperm(size, generator=generator) for size in reversed(rewards.shape))
        assert same(advantages(declared, rewards[:, inside], lengths[:, inside]), found[:, inside])
        assert same(advantages(declared, rewards[across], lengths[across]), found[across])


@settings(deadline=None)
@given(step=steps, value=st.sampled_from([0.0, 1.0, 0.1, -0.7, 1e17 + 1]))
def test_equal_rewards_give_exactly_zero(step: Step, value: float) -> None:
    """0.1 summed three times is not 0.3: rounding must not make a gradient."""
    rewards, lengths = tensors(step)
    rewards[0] = value
    for declared in those(lambda one: one.shift_invariant or (one.unit_rewards and abs(value) <= 1)):
        if declared.zero_when_equal:
            assert not advantages(declared, rewards, lengths)[0].any()
        assert not advantages(declared, torch.full_like(rewards, value), lengths).any()


@settings(deadline=None)
@given(step=steps)
def test_a_group_alone_is_the_same(step: Step) -> None:
    rewards, lengths = tensors(step)
    for declared in those(lambda one: not one.batch_dependent):
        alone = [advantages(declared, r[None], n[None]) for r, n in zip(rewards, lengths, strict=True)]
        assert same(torch.cat(alone), advantages(declared, rewards, lengths))


@everywhere
def test_least_sizes(declared: Declaration) -> None:
    """Two prompts with least_R rollouts are enough; fewer of either are refused in one sentence."""
    lengths, needed = torch.ones(2, declared.least_R, dtype=torch.int64), max(declared.least_N, declared.least_R)
    found = advantages(declared, torch.arange(2.0 * declared.least_R).view(2, -1), lengths)
    assert found.shape == (2, declared.least_R) and found.dtype == torch.float64
    if declared.least_R == 2:
        with pytest.raises(ValueError, match=r"R >= 2"):
            advantages(declared, torch.zeros(2, 1), lengths[:, :1])
    if needed == 2:
        with pytest.raises(ValueError, match=r"rewards of shape \(1, 1\): .*R >= 2"):
            advantages(declared, torch.zeros(1, 1), lengths[:1, :1])
    for shape in ((3,), (2, 2, 2)):
        with pytest.raises(ValueError, match=r"\(G, R\)"):
            advantages(declared, torch.zeros(shape), torch.ones(shape))


@everywhere
def test_any_dtype_becomes_float64_and_stays_as_it_was(declared: Declaration) -> None:
    """The rewards' dtype does not show, and they are left as they were."""
    rewards, lengths = torch.tensor([[0, 1, 1]]), torch.tensor([[1, 2, 3]])
    wanted = advantages(declared, rewards.double(), lengths)
    for dtype in (torch.int64, torch.float16, torch.float32):
        given_rewards = rewards.to(dtype)
        found = advantages(declared, given_rewards, lengths)
        assert found.dtype == torch.float64 and torch.equal(found, wanted)
        found += 1
        assert torch.equal(given_rewards, rewards.to(dtype))


@where(lambda one: one.unit_rewards)
@pytest.mark.parametrize("reward", [-0.01, 1.01, float("nan")])
def test_a_reward_outside_the_range_is_refused(declared: Declaration, reward: float) -> None:
    with pytest.raises(ValueError, match=f"{declared.name} needs rewards from 0 to 1"):
        declared.function(torch.tensor([[0.0, reward], [1.0, 0.0]]))


def test_a_zero_sum_in_each_group_is_one_over_the_step() -> None:
    assert all(one.zero_sum_step for one in ALL if one.zero_sum_group)


@pytest.mark.parametrize("name", ["grpo_std", "dapo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("arguments", [{"ddof": 2}, {"eps": -1.0}, {"eps": float("nan")}])
def test_a_scale_that_is_not_meant_is_refused(name: str, arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        DECLARATIONS[name].function(torch.tensor([[0.0, 1.0]]), **arguments)
