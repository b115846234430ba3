"""The arithmetic task: reproducible, disjoint, short, and right (against an oracle that does the sums again)."""

import hashlib
import re
import sys

import pytest

from grpo_sweeps.rewards.parsing import verdict
from grpo_sweeps.tasks import arithmetic
from grpo_sweeps.tasks.arithmetic import is_held_out
from grpo_sweeps.types import ConfigError, Problem, TaskData

# sha256 over the default task's first problems: the same on every platform and Python version.
FINGERPRINT = "6923184bb33539404b76053c730e7d9c08ccb22bc590a5a457bd8036e6907dc5"


def everything(data: TaskData) -> list[Problem]:
    return [*data.train, *data.held_out]


def test_default_problems_are_the_recorded_ones() -> None:
    data = arithmetic(n_train=200, n_held_out=200)
    text = "\n".join(f"{p.id} {p.question} {p.solution} {p.answer}" for p in everything(data))
    assert hashlib.sha256(text.encode()).hexdigest() == FINGERPRINT


def test_same_seed_same_problems_and_a_longer_task_begins_like_a_shorter() -> None:
    short, long = arithmetic(seed=3, n_train=50, n_held_out=20), arithmetic(seed=3, n_train=90, n_held_out=30)
    assert list(long.train[:50]) == list(short.train) and list(long.held_out[:20]) == list(short.held_out)
    assert arithmetic(seed=4, n_train=50, n_held_out=20).train != short.train


def test_halves_are_disjoint_for_all_seeds() -> None:
    tasks = [arithmetic(seed=seed, n_train=2000, n_held_out=500) for seed in range(3)]
    train = {p.question for task in tasks for p in task.train}
    held_out = {p.question for task in tasks for p in task.held_out}
    assert not train & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))


def test_problems_are_distinct_with_distinct_ids() -> None:
    problems = everything(arithmetic(n_train=3000, n_held_out=500))
    assert len({p.question for p in problems}) == len({p.id for p in problems}) == 3500


def test_solutions_are_right() -> None:
    for problem in everything(arithmetic(n_train=2000, n_held_out=200)):
        *lines, last = problem.solution.split("\n")
        assert last == f"#### {problem.answer}" and len(lines) in (1, 2)
        available = set(re.findall(r"\d+", problem.question))
        for line in lines:
            x, operator, y, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", line).groups()
            assert {x, y} <= available, problem
            oracle = {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y)}[operator]
            assert int(result) == oracle and oracle > 0
            available.add(result)
        assert result == problem.answer
        assert verdict(" " + problem.solution, problem.answer).strict


def test_texts_are_short_ascii() -> None:
    problems = everything(arithmetic(n_train=5000))
    assert max(len(p.question) for p in problems) <= 90
    assert max(len(p.solution) for p in problems) <= 50
    assert all((p.question + p.solution).isascii() for p in problems)


def test_difficulty_is_adjustable() -> None:
    easy = arithmetic(n_train=300, n_held_out=20, max_number=9, max_factor=3, steps=[1])
    assert all(len(p.solution.split("\n")) == 2 for p in easy.train)
    assert max(int(n) for p in easy.train for n in re.findall(r"\d+", p.question)) == 9
    hard = arithmetic(n_train=300, n_held_out=20, max_number=99, max_factor=20, steps=[2])
    assert all(len(p.solution.split("\n")) == 3 for p in hard.train)
    assert max(int(n) for p in hard.train for n in re.findall(r"\d+", p.question)) > 90


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"task\.seed=-1 .* at least 0"),
        ({"n_train": 0}, r"task\.n_train=0 .* at least 1"),
        ({"n_held_out": 2.5}, r"task\.n_held_out=2\.5 .* whole number"),
        ({"max_number": 2}, r"task\.max_number=2 .* at least 3"),
        ({"max_factor": True}, r"task\.max_factor=True"),
        ({"steps": []}, r"task\.steps=\[\] .* \[1, 2\]"),
        ({"steps": [3]}, r"task\.steps=\[3\]"),
        ({"steps": "12"}, r"task\.steps='12'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arithmetic(**arguments)


def test_too_small_a_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[arithmetic.__module__], "NAMES", ("Ana", "Ben"))
    with pytest.raises(ConfigError, match=r"task\.n_train=100000 .* different problems"):
        arithmetic(n_train=100_000, n_held_out=1, max_number=3, max_factor=2, steps=[1])
