"""What a choice of estimator brings along, what it asks for, and what it refuses."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from torch import Tensor

from grpo_sweeps.config import FunctionConfig
from grpo_sweeps.config.checks import check_functions
from grpo_sweeps.config.functions import load_estimator
from grpo_sweeps.estimators import DECLARATIONS
from grpo_sweeps.types import ConfigError
from tests.composing import run_config as composed

REWARDS, LENGTHS = np.array([[1.0, 0.0]]), np.array([[1, 3]])


@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_choice_brings_its_aggregation_unless_the_command_says_otherwise(name: str) -> None:
    wanted = {"dr_grpo": "constant", "dapo": "token_mean"}.get(name, "sum")
    assert composed(f"estimator={name}").aggregation == wanted
    assert composed(f"estimator={name}", "aggregation=length").aggregation == "length"
    assert composed("aggregation=length", f"estimator={name}").aggregation == "length"


def of_rewards(rewards_GR: Tensor, factor: float = 1.0) -> Tensor:
    return factor * rewards_GR


def of_both(rewards_GR: Tensor, factor: float = 1.0, *, lengths_GR: Tensor) -> Tensor:
    return factor * rewards_GR / lengths_GR


def if_there(rewards_GR: Tensor, lengths_GR: Tensor | None = None) -> Tensor:
    return rewards_GR if lengths_GR is None else rewards_GR + lengths_GR


def any_keys(rewards_GR: Tensor, **others: Tensor) -> Tensor:
    assert not others
    return rewards_GR


def arrays_in(rewards_GR: np.ndarray, lengths_GR: np.ndarray) -> np.ndarray:
    assert isinstance(rewards_GR, np.ndarray) and isinstance(lengths_GR, np.ndarray)
    return rewards_GR * lengths_GR


def tensors_in(rewards_GR, lengths_GR):  # type: ignore[no-untyped-def]
    """Without annotations, as estimators were written before arrays were taken."""
    return rewards_GR.masked_fill(lengths_GR > 1, 7.0)


def narrow(rewards_GR: Tensor) -> Tensor:
    """In a type that numpy does not have."""
    return rewards_GR.bfloat16()


def lengths_first(lengths_GR: Tensor, rewards_GR: Tensor) -> Tensor:
    return rewards_GR


@pytest.fixture(autouse=True)
def own_estimators(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_estimators")
    for function in (of_rewards, of_both, if_there, any_keys, arrays_in, tensors_in, narrow, lengths_first):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "own_estimators", module)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("of_rewards", [2.0, 0.0]),
        ("of_both", [2.0, 0.0]),
        ("if_there", [2.0, 3.0]),
        ("any_keys", [1.0, 0.0]),
        ("arrays_in", [1.0, 0.0]),
        ("tensors_in", [1.0, 7.0]),
        ("narrow", [1.0, 0.0]),
    ],
)
def test_lengths_are_given_to_those_that_name_them(name: str, wanted: list[float]) -> None:
    kwargs = {"factor": 2.0} if name.startswith("of") else {}
    estimator = load_estimator(FunctionConfig(f"own_estimators.{name}", kwargs))
    assert estimator(REWARDS, LENGTHS).flatten().tolist() == wanted


@pytest.mark.parametrize("name", ["of_rewards", "of_both", "if_there", "any_keys"])
def test_the_check_before_the_start_knows_that_too(name: str) -> None:
    check_functions(composed("estimator=custom", f"estimator._target_=own_estimators.{name}"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["estimator=opo", "+estimator.lengths_GR=3"], r"estimator.lengths_GR=3: each step gives it; drop it with ~"),
        (
            ["estimator=custom", "estimator._target_=own_estimators.of_both", "+estimator.q=1"],
            r"estimator.q=1: .*\(allowed: factor\)",
        ),
        (["estimator=custom", "estimator._target_=own_estimators.lengths_first"], "multiple values.*'lengths_GR'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_functions(composed(*overrides))


def test_a_built_in_function_is_taken_to_want_the_rewards_alone() -> None:
    assert np.array_equal(load_estimator(FunctionConfig("torch.clone"))(REWARDS, LENGTHS), REWARDS)
