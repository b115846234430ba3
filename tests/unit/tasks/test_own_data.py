"""Data of one's own from files and from `datasets`: what is read, in which order, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.tasks import gsm8k, hub, jsonl
from grpo_sweeps.tracking import digests
from grpo_sweeps.types import ConfigError, Problem, TaskData

ROWS = [{"problem": f"What is {i}?", "solution": f"\\frac{{{i}}}{{2}}", "level": i} for i in range(8)]


def written(file: Path, rows: Sequence[Any] = ROWS, before: bytes = b"") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_bytes(before + "\n".join(lines).encode("utf-8"))
    return file


def folder(tmp_path: Path, train: Sequence[Any] = ROWS[:5], test: Sequence[Any] = ROWS[5:]) -> str:
    written(tmp_path / "train.jsonl", train)
    written(tmp_path / "test.jsonl", test)
    return str(tmp_path)


def test_a_folder_with_other_names_of_columns(tmp_path: Path) -> None:
    data = jsonl(folder(tmp_path), question="problem", answer="solution")
    assert [p.question for p in data.train] == [row["problem"] for row in ROWS[:5]]
    assert data.held_out[0] == Problem("test-1", "What is 5?", "\\frac{5}{2}", "\\frac{5}{2}", ROWS[5]), (
        "the whole row is kept for rewards"
    )
    assert len({p.id for p in (*data.train, *data.held_out)}) == len(ROWS)
    short = jsonl(folder(tmp_path), question="problem", answer="solution", n_train=2, n_held_out=1)
    assert ([*data.train[:2]], [*data.held_out[:1]]) == ([*short.train], [*short.held_out])


def test_one_file_of_which_some_are_held_out(tmp_path: Path) -> None:
    path = str(written(tmp_path / "all.jsonl"))
    data = jsonl(path, "problem", "solution", held_out=3)
    assert [p.columns["level"] for p in (*data.train, *data.held_out)] == list(range(8)) and len(data.held_out) == 3
    orders = [jsonl(path, "problem", "solution", held_out=3, shuffle_seed=seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and orders[0] != data
    assert all(sorted(p.id for p in (*o.train, *o.held_out)) == [f"all-{i}" for i in range(1, 9)] for o in orders)
    for held_out in (None, 0, 8, True):
        with pytest.raises(ConfigError, match=r"task\.held_out=.* is not allowed: of 8 problems .* from 1 to 7"):
            jsonl(path, "problem", "solution", held_out=held_out)
    with pytest.raises(ConfigError, match=r"task\.held_out=2 is not allowed: task\.path=.* is a folder"):
        jsonl(folder(tmp_path), "problem", "solution", held_out=2)


@pytest.mark.parametrize(
    ("answer", "text"), [("B", "B"), (3, "3"), (0.5, "0.5"), (True, "true"), (["a", "b"], '["a", "b"]')]
)
def test_answers_of_any_kind_become_text(tmp_path: Path, answer: Any, text: str) -> None:
    rows = [{"question": f"{i}?", "answer": answer} for i in range(2)]
    assert jsonl(str(written(tmp_path / "a.jsonl", rows)), held_out=1).train[0].answer == text


def test_data_without_answers(tmp_path: Path) -> None:
    path = str(written(tmp_path / "a.jsonl", [{"question": f"{i}?"} for i in range(3)]))
    assert jsonl(path, answer=None, held_out=1).train[0].answer == ""
    with pytest.raises(
        ConfigError, match=r"task\.answer=answer: .*a\.jsonl line 1 has no such column.* it has question"
    ):
        jsonl(path, held_out=1)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    path = written(tmp_path / "a.jsonl", before=mark)
    assert len(jsonl(str(path), "problem", "solution", held_out=1).train) == 7
    for split in ("train", "test"):
        written(tmp_path / f"{split}.jsonl", [{"question": f"{split}?", "answer": "#### 4"}], mark)
    assert gsm8k(str(tmp_path)).train[0].question == "train?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl line 2 is not JSON"),
        ("[1]", r"a\.jsonl line 2 is not an object"),
        ('{"question": "2+2?"}', r"task\.answer=answer: .*line 2 has no such column, or null in it; it has question"),
        ('{"question": 5, "answer": "4"}', r"task\.question=question: .*line 2 has 5 there; a text is needed"),
        ('{"question": " ", "answer": "4"}', r"task\.question=question: .*line 2 has ' ' there; a text is needed"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = {"question": "1+1?", "answer": "2"}
    with pytest.raises(ConfigError, match=message) as raised:
        jsonl(str(written(tmp_path / "a.jsonl", [good, line, good])), held_out=1)
    assert "\n" not in str(raised.value)


def test_a_data_set_by_the_datasets_library(tmp_path: Path) -> None:
    path = folder(tmp_path)
    data = hub(path, question="problem", answer="solution")
    of_files = jsonl(path, question="problem", answer="solution")
    told = [(p.question, p.answer, p.columns) for p in data.train]
    assert told == [(p.question, p.answer, p.columns) for p in of_files.train]
    assert data.held_out[0].id == "test-0" and len(data.held_out) == 3
    one = hub(path, train_split="train[:4]", test_split=None, held_out=2, question="problem", answer="solution")
    assert (len(one.train), len(one.held_out)) == (2, 2)
    with pytest.raises(ConfigError, match=r"task\.held_out=2 is not allowed: task\.test_split=test"):
        hub(path, held_out=2)
    with pytest.raises(ConfigError, match=r"task\.dataset=nobody/nothing is not allowed .* could not be loaded"):
        hub("nobody/nothing")


def test_columns_count_as_data_and_problems_without_them_keep_their_digest() -> None:
    def digest(columns: dict[str, Any]) -> str:
        return digests.of_data(TaskData([Problem("a", "b", "c", "d", columns)], []))["train"]

    assert digest({}) == "1 problems, db3a881130ce60e8", "as versions without columns had it"
    assert len({digest({}), digest({"x": 1}), digest({"x": 2}), digest({"y": 1})}) == 4
    assert digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})
