"""Kinds of verdict: what each reads as the answer, strictly and flexibly, and which references it can compare with."""

from __future__ import annotations

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_sweeps.rewards.verdicts import KINDS, choice, correct, exact, judge, math, why_no_answer
from grpo_sweeps.types import ConfigError, Problem

HALF = r"\frac{1}{2}"


@pytest.mark.parametrize(
    ("completion", "answer", "strict", "flexible"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", HALF, True, True),
        (r"\boxed{\frac{1}{3}} no: \boxed{\frac{1}{2}}", HALF, True, True),
        (r"\boxed{\frac{1}{2}} and then #### 3", HALF, False, False),
        ("#### Rome \nand more", "rome", True, True),
        ("thinking\n**Yes**.", "yes", False, True),
        (r"\boxed{\text{New  York}}", "new york", True, True),
        ("<think>#### no</think>#### yes", "Yes", True, True),
        ("yes\nQuestion: what else?\nno", "yes", False, True),
        (r"\boxed{\frac{1}{2}", HALF, False, False),
        ("", "yes", False, False),
    ],
)
def test_exact(completion: str, answer: str, strict: bool, flexible: bool) -> None:
    found = exact(completion, answer)
    assert (found.strict, found.flexible) == (strict, flexible)
    assert found.parsed == bool(completion.strip())


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        ("#### B", True, True), (r"\boxed{(b)}", True, True), ("#### B. Rome", True, True),
        (r"\boxed{\text{B}}", True, True),
        ("The answer is (B).", False, True), ("A or C?\nB", False, True), ("Answer: **B**", False, True),
        ("#### Both", False, False), ("A dog", False, False), ("#### C", False, False), ("#### C\nB", False, False),
        ("The answer is A. No, the answer is B", False, True), ("", False, False),
    ],
)  # fmt: skip
def test_choice(completion: str, strict: bool, flexible: bool) -> None:
    found = choice(completion, "B")
    assert (found.strict, found.flexible) == (strict, flexible)


def test_which_answers_can_be_compared() -> None:
    good = {"numbers": "1,200", "exact": "Rome", "choice": "(b)", "math": HALF, "none": ""}
    bad = {"numbers": "Rome", "exact": " ", "choice": "F", "math": ""}
    assert {kind: why_no_answer(kind, good[kind]) for kind in KINDS} == dict.fromkeys(KINDS, "")
    assert all("is needed" in why_no_answer(kind, answer) for kind, answer in bad.items())


def test_the_reward_is_the_strict_verdict_of_its_kind() -> None:
    problem = Problem("p", "?", "18")
    assert [correct(text, problem) for text in ("#### 18.0", "18")] == [1.0, 0.0]
    assert [correct(text, problem, 0, "exact") for text in ("#### 18.0", "#### 18")] == [0.0, 1.0]
    with pytest.raises(ConfigError, match="verdict=none: choose one of numbers, exact, choice, math"):
        judge("none")


def test_math_asks_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"task\.verdict=math: needs the package math-verify .*grpo_sweeps\[math\]"):
        math("#### 1", "1")
    package = types.ModuleType("math_verify")
    monkeypatch.setitem(sys.modules, "math_verify", package)
    with pytest.raises(ConfigError, match=r"needs the package math-verify .* \(it cannot be imported: cannot import"):
        math("#### 1", "1")
    package.parse = lambda text, **_: [text.strip("$ ")] if "1" in text or "0.5" in text else []  # type: ignore[attr-defined]
    package.verify = lambda gold, found, **_: bool(gold) and {"0.5": HALF}.get(*found[:1], *found[:1]) == gold[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "math_verify", package)
    assert math(r"so \boxed{0.5}", HALF).strict
    assert not math(r"so \boxed{1}", HALF).strict


@given(st.text(alphabet="AbB12#\\{}boxed() \n*.:answer is<think>/", max_size=60))
def test_no_completion_raises(completion: str) -> None:
    for kind, answer in (("exact", "b"), ("choice", "B")):
        found = judge(kind)(completion, answer)
        assert found.flexible or not found.strict, "what is strictly right is right flexibly"
