"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 problems to train on, 1,319 held out (its test split)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from grpo_sweeps.rewards.parsing import number
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
    return TaskData(_first(train, n_train, "n_train"), _first(held_out, n_held_out, "n_held_out"))


def _from_file(file: Path) -> tuple[Problem, ...]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task.path={file.parent} cannot be read ({file.name}: {error}); give {ALLOWED}.") from error
    return _problems(_rows(lines, file), file.stem)


def _rows(lines: Iterable[str], file: Path) -> Iterable[tuple[str, Mapping[str, object]]]:
    for index, line in enumerate(lines, start=1):
        where = f"{file} line {index}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"task.path: {where} is not JSON ({error}); give {ALLOWED}.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"task.path: {where} is not an object; give {ALLOWED}.")
        yield where, row


def _from_hub(split: str) -> tuple[Problem, ...]:
    try:
        import datasets

        rows = datasets.load_dataset(DATASET, "main", split=split)
    except Exception as error:  # whatever the library, the network or the cache raises: the remedy is the same
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(
            f"task.path=null is not allowed here because {DATASET} could not be loaded ({reason}); give {ALLOWED}."
        ) from error
    return _problems(((f"{DATASET} {split} row {index}", row) for index, row in enumerate(rows)), split)


def _problems(rows: Iterable[tuple[str, Mapping[str, object]]], split: str) -> tuple[Problem, ...]:
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


def _first(problems: tuple[Problem, ...], count: int | None, key: str) -> tuple[Problem, ...]:
    if count is None and problems:
        return problems
    if count is None or isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(problems):
        raise ConfigError(
            f"task.{key}={'null' if count is None else count} is not allowed: the data holds {len(problems)} problems; "
            "give null for all of them or a whole number from 1 to that."
        )
    return problems[:count]
