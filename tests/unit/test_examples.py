"""The worked examples of examples/: a user's own reward, task and estimator do what their docstrings say."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from grpo_sweeps.estimators import grpo
from grpo_sweeps.types import Problem

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of examples/ as a user does who stands in that folder."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_brief_prefers_short_right_answers(example: Any) -> None:
    brief = example("my_reward").brief
    problem = Problem("p", "3 + 4?", "7")
    right, long, wrong = "#### 7", "#### 7".rjust(60), "#### 8"
    assert brief(wrong, problem, 0) == 0.0
    assert brief(right, problem, 0, limit=60) == pytest.approx(0.5 + 0.5 * (1 - 6 / 60))
    assert brief(long, problem, 0, limit=60) == 0.5
    with pytest.raises(ValueError, match="limit=0"):
        brief(right, problem, 0, limit=0)


def test_remainders_are_right_disjoint_and_repeatable(example: Any) -> None:
    remainders = example("my_task").remainders
    data = remainders(seed=3, n_train=50, n_held_out=20, largest=15)
    assert (len(data.train), len(data.held_out)) == (50, 20)
    assert not {p.id for p in data.train} & {p.id for p in data.held_out}
    for one in [*data.train, *data.held_out]:
        _, a, b = one.id.split("-")
        assert int(one.answer) == int(a) - int(b) * math.floor(int(a) / int(b))
        assert one.solution.endswith(f"#### {one.answer}")
    assert remainders(seed=3, n_train=50, n_held_out=20, largest=15) == data
    assert remainders(seed=4, n_train=50, n_held_out=20, largest=15) != data
    with pytest.raises(ValueError, match="largest=5 gives 10 problems"):
        remainders(largest=5)


def test_pairwise_rank_equals_the_group_mean_baseline_for_binary_rewards(example: Any) -> None:
    pairwise_rank = example("my_estimator").pairwise_rank
    rng = np.random.default_rng(0)
    binary_GR = rng.integers(2, size=(40, 6)).astype(float)
    np.testing.assert_allclose(pairwise_rank(binary_GR), grpo(binary_GR), atol=1e-15)
    real_GR = rng.normal(size=(20, 5))
    np.testing.assert_allclose(pairwise_rank(real_GR).sum(axis=1), 0, atol=1e-15)
    np.testing.assert_array_equal(pairwise_rank(np.exp(real_GR)), pairwise_rank(real_GR))
    assert not pairwise_rank(np.full((1, 4), 0.3)).any()


@pytest.mark.parametrize(
    ("key", "target", "positional", "kwargs"),
    [
        ("reward", "my_reward.brief", 3, {"limit": 80}),
        ("task", "my_task.remainders", 0, {"largest": 60, "n_train": 100, "n_held_out": 20}),
        ("estimator", "my_estimator.pairwise_rank", 1, {}),
    ],
)
def test_the_package_finds_them_by_dotted_path(
    example: Any, key: str, target: str, positional: int, kwargs: dict[str, Any]
) -> None:
    from grpo_sweeps.config import FunctionConfig
    from grpo_sweeps.config.functions import load_function

    function = load_function(FunctionConfig(target, kwargs), key, positional)
    module, _, name = target.partition(".")
    assert function.func is getattr(example(module), name)  # type: ignore[attr-defined]
    assert function.keywords == kwargs  # type: ignore[attr-defined]


def test_gradient_gram_in_a_plain_loop(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = example("gradient_gram").main(steps=2)
    assert len(ranks) == 2
    assert all(1.0 <= rank <= 4.0 for rank in ranks)
    assert "effective rank" in capsys.readouterr().out
