"""GSM8K from a folder or from the `datasets` library; what cannot be read is named."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from grpo_sweeps.rewards.parsing import verdict
from grpo_sweeps.tasks import gsm8k
from grpo_sweeps.types import ConfigError

SAMPLE = Path(__file__).parents[2] / "data" / "gsm8k_sample"
GOOD = '{"question": "2+2?", "answer": "2+2=4\\n#### 4"}'


def folder(tmp_path: Path, train: str = GOOD, test: str = GOOD.replace("2+2?", "Two and two?")) -> str:
    (tmp_path / "train.jsonl").write_text(train, encoding="utf-8")
    (tmp_path / "test.jsonl").write_text(test, encoding="utf-8")
    return str(tmp_path)


def test_sample() -> None:
    data = gsm8k(str(SAMPLE))
    assert [p.answer for p in data.train] == ["26", "1200", "-5"]
    assert [p.answer for p in data.held_out] == ["4", "10"]
    assert [p.id for p in data.held_out] == ["gsm8k-test-0", "gsm8k-test-1"]
    assert data.train[0].solution == "The baker has 3*12 = 36 rolls.\nThere are 36-10 = 26 rolls left.\n#### 26"
    assert all(verdict(p.solution, p.answer).strict for p in [*data.train, *data.held_out])


def test_first_problems_only() -> None:
    data = gsm8k(str(SAMPLE), n_train=2, n_held_out=1)
    assert len(data.train) == 2 and len(data.held_out) == 1


@pytest.mark.parametrize("count", [0, 4, True, 1.5])
def test_more_than_there_is_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"task\.n_train={count} .* holds 3 problems"):
        gsm8k(str(SAMPLE), n_train=count)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train\.jsonl line 2 is not JSON"),
        ("[" * 100_000, r"train\.jsonl line 2 is not JSON"),
        ("[1]", r"train\.jsonl line 2 is not an object"),
        ('{"question": "2+2?"}', r"train\.jsonl line 2 lacks"),
        ('{"question": 5, "answer": "#### 4"}', r"train\.jsonl line 2 lacks"),
        ('{"question": "2+2?", "answer": "four"}', r"train\.jsonl line 2 has no number after ####"),
        ('{"question": "2+2?", "answer": "#### four"}', r"train\.jsonl line 2 has no number after ####"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        gsm8k(folder(tmp_path, train=f"{GOOD}\n{line}\n"))
    assert "\n" not in str(raised.value)


def test_blank_lines_are_passed_over_but_counted(tmp_path: Path) -> None:
    assert len(gsm8k(folder(tmp_path, train=f"{GOOD}\n\n")).train) == 1
    with pytest.raises(ConfigError, match="line 3"):
        gsm8k(folder(tmp_path, train=f"{GOOD}\n\n{{"))


def test_unreadable_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path=.*nowhere cannot be read \(train\.jsonl"):
        gsm8k(str(tmp_path / "nowhere"))
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        gsm8k(str(tmp_path))
    with pytest.raises(ConfigError, match=r"n_held_out=null .* holds 0 problems"):
        gsm8k(folder(tmp_path, test=""))


def test_a_problem_in_both_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"both train and test.*disjoint"):
        gsm8k(folder(tmp_path, test=GOOD))


def test_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("datasets")
    calls = []

    def load_dataset(name: str, subset: str, split: str) -> list[dict[str, str]]:
        calls.append((name, subset, split))
        return [json.loads(line) for line in (SAMPLE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]

    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert gsm8k() == gsm8k(str(SAMPLE))
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize("installed", [True, False])
def test_hub_out_of_reach_names_the_key_and_the_remedy(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    fake = ModuleType("datasets")

    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake if installed else None)
    with pytest.raises(ConfigError, match=r"task\.path=null .*train\.jsonl and test\.jsonl") as raised:
        gsm8k()
    assert "\n" not in str(raised.value)


def real_data() -> Path | None:
    places = [os.environ.get("GSM8K_DIR"), Path(__file__).parents[4] / "shared" / "data" / "gsm8k"]
    return next((Path(place) for place in places if place and (Path(place) / "train.jsonl").is_file()), None)


@pytest.mark.skipif(real_data() is None, reason="no GSM8K files: GSM8K_DIR must name their folder")
def test_every_real_solution_is_right_by_both_parsings() -> None:
    data = gsm8k(str(real_data()))
    assert (len(data.train), len(data.held_out)) == (7473, 1319)
    for problem in [*data.train, *data.held_out]:
        assert "<<" not in problem.solution
        assert verdict(problem.solution, problem.answer).strict, problem
        assert verdict(problem.solution, problem.answer).flexible, problem
