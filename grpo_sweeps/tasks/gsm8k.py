"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 problems to train on, 1,319 held out (its test split)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from grpo_sweeps.rewards.parsing import number
from grpo_sweeps.tasks.rows import Row, first, from_file, from_hub
from grpo_sweeps.types import ConfigError, Problem, TaskData

DATASET = "openai/gsm8k"
SPLITS = ("train", "test")
MARKER = "####"
ANNOTATION = re.compile(r"<<[^<>]*>>")  # the calculator's notes, <<48/2=24>>
ALLOWED = 'a folder with train.jsonl and test.jsonl, lines {"question": ..., "answer": "... #### n"}'


def gsm8k(path: str | None = None, n_train: int | None = None, n_held_out: int | None = None) -> TaskData:
    """Problems in the data's own order, without the calculator notes in their solutions.

    Args:
        path: a folder with train.jsonl and test.jsonl; None loads `openai/gsm8k` with the `datasets` library, from its
            cache or the network.
        n_train: how many of the first training problems to keep; None = all.
        n_held_out: the same for held-out problems.

    Raises:
        ConfigError: for data that cannot be read (it names file and line), for a problem in both splits, and for an n
            that is larger than the data.
    """
    if path is None:
        train, held_out = (_from_hub(split) for split in SPLITS)
    else:
        train, held_out = (_from_file(Path(path).expanduser() / f"{split}.jsonl") for split in SPLITS)
    shared = {problem.question for problem in train} & {problem.question for problem in held_out}
    if shared:
        raise ConfigError(
            f"task.path={path} is not allowed: {len(shared)} question(s) stand in both train and test, "
            f"the first of them {min(shared)[:60]!r}; they must be disjoint."
        )
    return TaskData(first(train, n_train, "n_train"), first(held_out, n_held_out, "n_held_out"))


def _from_file(file: Path) -> tuple[Problem, ...]:
    return _problems((row for _, row in from_file(file, ALLOWED)), file.stem)


def _from_hub(split: str) -> tuple[Problem, ...]:
    return _problems((row for _, row in from_hub(DATASET, "main", split, "task.path=null", ALLOWED)), split)


def _problems(rows: Iterable[Row], split: str) -> tuple[Problem, ...]:
    problems = []
    for index, (where, row) in enumerate(rows):
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise ConfigError(f"task.path: {where} lacks the text question or answer; give {ALLOWED}.")
        solution = ANNOTATION.sub("", solution).strip()
        answer = solution.rpartition(MARKER)[2].strip() if MARKER in solution else ""
        if number(answer) is None:
            raise ConfigError(f"task.path: {where} has no number after {MARKER} in its answer; give {ALLOWED}.")
        problems.append(Problem(f"gsm8k-{split}-{index}", question.strip(), answer.replace(",", ""), solution))
    return tuple(problems)
