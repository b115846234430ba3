"""Data of your own: lines of JSON from files, or a data set of the Hugging Face hub. A row is a problem.

Two columns are the question and the reference answer; the whole row stays on the problem, in its `columns`, where a
reward finds it. What an answer is, is not judged here: `task.verdict` and the reward say what is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_sweeps.tasks.rows import Row, first, from_file, from_hub, names_in, shuffled
from grpo_sweeps.types import ConfigError, Problem, TaskData

SPLITS = ("train", "test")
LINES = "lines of JSON, each an object with the columns task.question and task.answer"
FOLDER = f"a folder with train.jsonl and test.jsonl, or one file and task.held_out=N: {LINES}"


def jsonl(
    path: str,
    question: str = "question",
    answer: str | None = "answer",
    held_out: int | None = None,
    shuffle_seed: int | None = None,
    n_train: int | None = None,
    n_held_out: int | None = None,
) -> TaskData:
    """Problems from files of JSON lines; the id of a problem is its file's name and line.

    Args:
        path: a folder with train.jsonl and test.jsonl, or one file.
        question: the column that holds the question.
        answer: the column that holds the reference answer, text or a number; None where the data has none.
        held_out: of one file, how many problems are held out, the last ones after shuffling.
        shuffle_seed: the order of the problems belongs to it; None: the files' order.
        n_train: how many training problems to keep, the first ones after shuffling; None: all.
        n_held_out: the same for held-out problems.

    Raises:
        ConfigError: for data that cannot be read; it names the file, the line and what is allowed.
    """
    place = Path(path).expanduser()
    if place.is_dir() and held_out is not None:
        raise ConfigError(
            f"task.held_out={held_out} is not allowed: task.path={path} is a folder, whose test.jsonl is held out; "
            "give null, or one file."
        )
    files = [place / f"{split}.jsonl" for split in SPLITS] if place.is_dir() else [place]
    halves = [
        _problems(((f"{file.stem}-{number}", row) for number, row in from_file(file, FOLDER)), question, answer)
        for file in files
    ]
    return _data(halves, shuffle_seed, held_out, n_train, n_held_out)


def hub(
    dataset: str,
    config: str | None = None,
    train_split: str = "train",
    test_split: str | None = "test",
    question: str = "question",
    answer: str | None = "answer",
    held_out: int | None = None,
    shuffle_seed: int | None = None,
    n_train: int | None = None,
    n_held_out: int | None = None,
) -> TaskData:
    """Problems from a data set of the Hugging Face hub, by the `datasets` library; the id of a problem is its split and
    row.

    Args:
        dataset: the data set's name, owner/name, or a local folder that `datasets` reads.
        config: the name of its configuration, where it has several.
        train_split: the split to train on, in the words of `datasets` ("train", "train[:1000]").
        test_split: the split that is held out; None: `held_out` problems of the other one.
        question, answer, held_out, shuffle_seed, n_train, n_held_out: as for `jsonl`.

    Raises:
        ConfigError: for data that cannot be loaded, or lacks a column.
    """
    if test_split is not None and held_out is not None:
        raise ConfigError(
            f"task.held_out={held_out} is not allowed: task.test_split={test_split} is held out; give null for one of "
            "them."
        )
    allowed = "the name of a data set that is cached or can be reached, its configuration and splits, or task=jsonl"
    halves = [
        _problems(
            (
                (f"{split}-{index}", row)
                for index, row in from_hub(dataset, config, split, f"task.dataset={dataset}", allowed)
            ),
            question,
            answer,
        )
        for split in (train_split, test_split)
        if split is not None
    ]
    return _data(halves, shuffle_seed, held_out, n_train, n_held_out)


def _data(
    halves: list[tuple[Problem, ...]],
    shuffle_seed: int | None,
    held_out: int | None,
    n_train: int | None,
    n_held_out: int | None,
) -> TaskData:
    ordered = [tuple(shuffled(half, shuffle_seed)) for half in halves]
    if len(ordered) == 1:
        ordered = _cut(ordered[0], held_out)
    return TaskData(first(ordered[0], n_train, "n_train"), first(ordered[1], n_held_out, "n_held_out"))


def _cut(problems: tuple[Problem, ...], held_out: int | None) -> list[tuple[Problem, ...]]:
    """Problems to train on, and the last `held_out` of them."""
    whole = isinstance(held_out, int) and not isinstance(held_out, bool)
    if held_out is None or not whole or not 1 <= held_out < len(problems):
        raise ConfigError(
            f"task.held_out={'null' if held_out is None else held_out} is not allowed: of {len(problems)} problems in "
            f"one place some are to be held out; give a whole number from 1 to {max(1, len(problems) - 1)}."
        )
    cut = len(problems) - held_out
    return [problems[:cut], problems[cut:]]


def _problems(rows: Iterable[tuple[str, Row]], question: str, answer: str | None) -> tuple[Problem, ...]:
    return tuple(_problem(name, where, row, question, answer) for name, (where, row) in rows)


def _problem(name: str, where: str, row: Any, question: str, answer: str | None) -> Problem:
    for key, column in (("question", question), ("answer", answer)):
        if column is not None and row.get(column) is None:
            raise ConfigError(
                f"task.{key}={column}: {where} has no such column, or null in it; it has {names_in([row])}."
            )
    text = row[question]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"task.question={question}: {where} has {text!r:.60} there; a text is needed.")
    reference = "" if answer is None else _text(row[answer])
    solution = row.get("solution")
    return Problem(name, text.strip(), reference, solution if isinstance(solution, str) else "", dict(row))


def _text(value: Any) -> str:
    """An answer as text: numbers as JSON writes them, lists and objects too."""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
