"""Random shapes on the CPU, the benchmark that looks for faults, and that it finds one."""

import json

import pytest
import torch

from grpo_sweeps.bench import main, parse
from grpo_sweeps.benchmarks import shapes
from grpo_sweeps.benchmarks.shape_cases import ENTRIES, Shape, draw
from grpo_sweeps.engine.gram import linear

pytestmark = pytest.mark.integration
SMALL = ["shapes", "device=cpu", "tokens=48", "work=2e5"]
CPU = torch.device("cpu")


def drawn(count: int, tokens: int = 4096, work: float = 1e11) -> list[Shape]:
    return [draw(0, index, tokens, work, torch.bfloat16, CPU) for index in range(count)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_shapes_stay_within_the_floor(dtype, tmp_path, capsys):
    path = tmp_path / "shapes.json"
    assert main([*SMALL, f"dtype={dtype}", "count=60", f"json={path}"]) == 0
    result = json.loads(path.read_text())
    assert result["count"] == len(result["shapes"]) == 60 and result["crashes"] == result["beyond"] == 0
    assert 0 < result["worst"]["gram"] <= result["allowed"] and abs(sum(result["share_by_path"].values()) - 1) < 1e-9
    text = capsys.readouterr().out
    assert "crashes: 0; beyond the allowed error: 0" in text and "60 shapes of seed 0" in text


def test_a_shape_is_a_function_of_seed_and_index(tmp_path):
    path = tmp_path / "one.json"
    assert main([*SMALL, "index=7", f"json={path}"]) == 0
    (one,) = json.loads(path.read_text())["shapes"]
    assert one["text"] == str(draw(0, 7, 48, 2e5, torch.bfloat16, CPU))


@pytest.mark.parametrize("entry", ["head", "tied"])
def test_completions_that_are_all_empty(entry, tmp_path):
    index = next(index for index, shape in enumerate(drawn(2000, 48, 2e5)) if shape.T == 0 and shape.entry == entry)
    path = tmp_path / "empty.json"
    main([*SMALL, f"index={index}", f"json={path}"])
    result = json.loads(path.read_text())
    assert result["failed"] == [] and result["worst"]["gram"] == result["worst"]["gradient"] == 0


def test_two_processes_give_what_one_gives(tmp_path):
    found = []
    for workers in (1, 2):
        path = tmp_path / f"{workers}.json"
        assert main([*SMALL, "count=12", f"workers={workers}", f"json={path}"]) == 0
        found.append([(s["text"], s["path"], s["gram"]) for s in json.loads(path.read_text())["shapes"]])
    assert found[0] == found[1]


def test_the_draws_hold_what_real_batches_have():
    shapes_ = drawn(1000)
    fused, onepass = ({s.entry for s in shapes_} & {f"linear_{name}"} for name in ("fused", "onepass"))
    assert not fused and not onepass, "a CPU has neither form"
    assert {s.entry for s in shapes_} == set(ENTRIES) - {"linear_fused", "linear_onepass"}
    tokens = [s.T for s in shapes_]
    assert min(tokens) == 0 and 1 in tokens and max(tokens) > 3500
    assert {min(s.groups) for s in shapes_} >= {1, 2, 8} and max(max(s.groups) for s in shapes_) == 32
    assert any(s.cross_groups for s in shapes_) and any(len(set(s.groups)) > 1 for s in shapes_)
    assert any(0 in s.lengths and s.T > 0 for s in shapes_) and any(len(set(s.lengths)) > 2 for s in shapes_)
    heads = {s.o for s in shapes_ if s.entry == "head"}
    assert {10_922, 151_936} <= heads and any(width % 2 for width in heads)
    assert sum(s.i % 8 > 0 for s in shapes_) > 100 < sum(s.i % 8 == 0 for s in shapes_)


def test_a_wrong_gram_is_found(monkeypatch, capsys):
    inner = linear.ghost_gram
    monkeypatch.setattr(linear, "ghost_gram", lambda y, x: inner(y, x) * 1.1)
    assert main([*SMALL, "count=20"]) == 1
    failed = capsys.readouterr().out.rpartition("crashes:")[2]
    assert "linear" in failed and ("w'Kw" in failed or "epsilons" in failed)


def test_a_crash_is_a_row_with_its_shape(monkeypatch, tmp_path, capsys):
    def refuse(*_: object) -> None:
        raise RuntimeError("invalid argument\nmore")

    monkeypatch.setattr(linear.WeightSums, "_add_blocks", refuse)
    path = tmp_path / "crash.json"
    assert main([*SMALL, "count=20", f"json={path}"]) == 1
    result = json.loads(path.read_text())
    assert result["crashes"] == len(result["failed"]) > 3
    assert all(f["error"] == "RuntimeError: invalid argument" for f in result["failed"])
    assert f"{result['failed'][0]['shape']}: RuntimeError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["count=0"], "count=0: allowed are whole numbers from 1"),
        (["work=10"], "work=10: allowed are numbers from 1e4"),
        (["dtype=int8"], "dtype=int8: allowed are"),
        (["workers=-1"], "workers=-1: allowed are whole numbers from 0"),
    ],
)
def test_a_bad_command_is_one_sentence(words, message, capsys):
    assert main(["shapes", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_lists_words_that_are_accepted(capsys):
    assert main(["shapes", "help"]) == 0
    assert parse(shapes.ShapesOptions, capsys.readouterr().out.splitlines()) == shapes.ShapesOptions()
