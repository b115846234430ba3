"""The benchmark command: what it accepts, what it writes, that both steps it times do their work."""

import json
import math

import pytest
import torch

from grpo_sweeps.bench import main, parse
from grpo_sweeps.benchmarks import ghost
from grpo_sweeps.benchmarks import gram as gram_benchmark
from grpo_sweeps.types import ConfigError


def test_values_are_read_as_the_type_of_their_default():
    options = parse(gram_benchmark.Options, ["R=4", "checkpointing=true", "block_mb=0.5", "dtype=float64"])
    assert (options.R, options.checkpointing, options.block_mb, options.dtype) == (4, True, 0.5, "float64")


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "allowed are gram and ghost"),
        (["grams"], "allowed are gram and ghost"),
        (["gram", "rows=3"], "'rows=3' is not one of model="),
        (["gram", "R=x"], "R=x: a int is needed"),
        (["gram", "model=huge"], "model=huge: allowed are tiny"),
        (["gram", "dtype=int8"], "dtype=int8: allowed are float64"),
        (["gram", "T=4", "prompt=4"], "T larger than prompt"),
        (["gram", "form=fast"], "form=fast: allowed are"),
    ],
)
def test_a_bad_command_is_one_sentence_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.integration
def test_gram_prints_a_table_and_writes_the_numbers(tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert main(["gram", "R=2", "T=8", "repeats=2", "device=cpu", f"json={path}"]) == 0
    last = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in last] == ["plain", "measured", "ratio"]
    result = json.loads(path.read_text())
    assert result["options"]["R"] == 2 and result["parameters"] > 10_000
    for name in ("plain", "measured", "ratio"):
        assert 0 < result[name]["min"] <= result[name]["median"] <= result[name]["max"]
    assert all(value > 0 or math.isnan(value) for value in result["peak_mb"].values())


def test_both_steps_add_the_same_gradient(monkeypatch):
    options = gram_benchmark.Options(R=3, T=6, dtype="float64", device="cpu")
    grads = []
    monkeypatch.setattr(torch.nn.Module, "zero_grad", lambda self: grads.append(_take_grads(self)))
    subject = gram_benchmark.build(options)
    subject.plain()
    subject.measured()
    # Llama's norms work in float32, and the two steps scale their gradients in a different place.
    assert all((a - b).norm() < 1e-5 * a.norm() for a, b in zip(*grads, strict=True))


def _take_grads(model):
    taken = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return taken


def test_ghost_reports_a_factor_a_shape(monkeypatch, capsys):
    monkeypatch.setattr(ghost, "SHAPES", ((16, 8),))
    monkeypatch.setattr(ghost, "LENGTHS", (2, 4))
    assert main(["ghost", "R=2", "repeats=1", "device=cpu"]) == 0
    assert "ghost pays up to T^2 (o + i) =" in capsys.readouterr().out


def test_parse_refuses_words_without_a_value():
    with pytest.raises(ConfigError, match="'R' is not one of"):
        parse(gram_benchmark.Options, ["R"])
