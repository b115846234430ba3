"""Word problems in the shape of GSM8K, made from a seed: a short story, a worked solution, `#### n`.

    Question: Ana has 4 boxes of 6 pens and 7 loose pens. How many pens in all?
    Answer: 4*6=24
    24+7=31
    #### 31

Texts are short because the embedded model reads characters: a question has at most 90, a solution at most 50 with the
default numbers. Whether a problem is held out is decided by a hash of its question, not by the draw: a problem that is
held out for one seed is never a training problem for any other seed, nor for the pretraining of the embedded model.
Problems differ in their text; the same pair of numbers can occur in both halves with another name or object.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from grpo_sweeps.types import ConfigError, Problem, TaskData, Within

NAMES = (
    "Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jun", "Kim", "Leo", "Mia", "Noor", "Omar", "Pia",
    "Raj", "Sam", "Tess", "Uma", "Vera", "Wes", "Yan", "Zoe",
)  # fmt: skip
THINGS = (
    "pens", "books", "coins", "cards", "shells", "beads", "cups", "stamps", "apples", "plums", "keys", "rings", "nuts",
    "hats", "toys", "maps",
)  # fmt: skip
HELD_OUT_SHARE = 26  # of 256 values of the hash's first byte: about a tenth of all problems
MAX_REPEATS = 2000  # draws in a row without a new problem, after which the space counts as used up


@dataclass(frozen=True, slots=True)
class Template:
    """A story and its calculations. In `lines`, a, b, c are the story's numbers and p is the line before's result.

    Numbers that are multiplied in the first line are factors (2..max_factor), the others 2..max_number.
    """

    story: str
    lines: tuple[str, ...]

    @property
    def factors(self) -> str:
        return "".join(letter for line in self.lines if line[1] == "*" for letter in line)


TEMPLATES = (
    Template("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", ("a+b",)),
    Template("{name} has {a} {things} and {other} has {b}. How many {things} in all?", ("a+b",)),
    Template("{name} had {a} {things} and lost {b}. How many {things} are left?", ("a-b",)),
    Template("{name} fills {a} boxes with {b} {things} each. How many {things} in all?", ("a*b",)),
    Template("{name} has {a} boxes of {b} {things} and {c} loose {things}. How many {things} in all?", ("a*b", "p+c")),
    Template("{name} buys {a} packs of {b} {things} and gives away {c}. How many {things} are left?", ("a*b", "p-c")),
    Template("{name} has {a} {things}, finds {b} and sells {c}. How many {things} are left?", ("a+b", "p-c")),
    Template("{name} has {a} {things}. {other} has {b} more. How many {things} in all?", ("a+b", "a+p")),
)


def arithmetic(
    seed: Annotated[int, Within(0)] = 0,
    n_train: Annotated[int, Within(1)] = 8192,
    n_held_out: Annotated[int, Within(1)] = 512,
    max_number: Annotated[int, Within(3)] = 50,
    max_factor: Annotated[int, Within(2)] = 9,
    steps: Sequence[int] = (1, 2),
) -> TaskData:
    """Problems of `steps` calculations each with + - *, results positive. The same arguments give the same problems.

    Args:
        seed: seed of the two streams of problems.
        max_number: the largest number that is added or taken away.
        max_factor: the largest factor of a product.
        steps: which lengths of solution occur; 1 and 2 exist.

    Raises:
        ConfigError: when an argument is out of range, or when the numbers allow fewer distinct problems than asked for.
    """
    _check(seed, n_train, n_held_out, max_number, max_factor, steps)
    templates = [template for template in TEMPLATES if len(template.lines) in steps]
    draws = [_distinct(_stream(2 * seed + half, templates, max_number, max_factor), half) for half in (0, 1)]
    return TaskData(train=_take(draws[0], n_train, "n_train"), held_out=_take(draws[1], n_held_out, "n_held_out"))


def is_held_out(question: str) -> bool:
    """True for about a tenth of all questions, by their text alone."""
    return hashlib.sha256(question.encode()).digest()[0] < HELD_OUT_SHARE


def _check(
    seed: int, n_train: int, n_held_out: int, max_number: int, max_factor: int, steps: Sequence[int] | str
) -> None:
    ranges = (
        ("seed", seed, 0),
        ("n_train", n_train, 1),
        ("n_held_out", n_held_out, 1),
        ("max_number", max_number, 3),
        ("max_factor", max_factor, 2),
    )
    for key, value, low in ranges:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"task.{key}={value!r} is not allowed: it must be a whole number of at least {low}.")
    if isinstance(steps, str) or not steps or not set(steps) <= {1, 2}:
        raise ConfigError(f"task.steps={steps!r} is not allowed: it must be [1], [2] or [1, 2].")


def _stream(seed: int, templates: Sequence[Template], max_number: int, max_factor: int) -> Iterator[Problem]:
    """Endless problems. Only random() of random.Random is used: for that alone Python promises the same numbers."""
    uniform = random.Random(seed).random
    while True:
        template = templates[int(uniform() * len(templates))]
        first = int(uniform() * len(NAMES))
        second = (first + 1 + int(uniform() * (len(NAMES) - 1))) % len(NAMES)
        things = THINGS[int(uniform() * len(THINGS))]
        factors = template.factors
        numbers = {
            letter: 2 + int(uniform() * ((max_factor if letter in factors else max_number) - 1)) for letter in "abc"
        }
        solution, answer = _solve(template, numbers)
        if not solution:
            continue
        question = template.story.format(name=NAMES[first], other=NAMES[second], things=things, **numbers)
        yield Problem(id="", question=question, answer=answer, solution=solution)


def _solve(template: Template, numbers: dict[str, int]) -> tuple[str, str]:
    """(worked solution, answer); ("", "") where a result would not be positive."""
    values = dict(numbers)
    worked = []
    for line in template.lines:
        left, operator, right = tuple(line)
        x, y = values[left], values[right]
        values["p"] = x + y if operator == "+" else x - y if operator == "-" else x * y
        if values["p"] < 1:
            return "", ""
        worked.append(f"{x}{operator}{y}={values['p']}")
    answer = str(values["p"])
    return "\n".join([*worked, f"#### {answer}"]), answer


def _distinct(stream: Iterator[Problem], held_out: int) -> Iterator[Problem]:
    """The stream's problems of one half, each once, with ids from their text; ends when no new ones come."""
    seen: set[str] = set()
    repeats = 0
    for problem in stream:
        if is_held_out(problem.question) != bool(held_out) or problem.question in seen:
            repeats += 1
            if repeats > MAX_REPEATS:
                return
            continue
        repeats = 0
        seen.add(problem.question)
        digest = hashlib.sha256(problem.question.encode()).hexdigest()
        yield Problem(f"arithmetic-{digest[:12]}", problem.question, problem.answer, problem.solution)


def _take(problems: Iterator[Problem], count: int, key: str) -> tuple[Problem, ...]:
    taken = tuple(problem for problem, _ in zip(problems, range(count), strict=False))
    if len(taken) < count:
        raise ConfigError(
            f"task.{key}={count} is not allowed: these numbers make only about {len(taken)} different problems; "
            "ask for fewer or raise task.max_number."
        )
    return taken
