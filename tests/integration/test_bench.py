"""The benchmark command: what it accepts, what it refuses, what `gram` prints and writes."""

import json
import statistics

import pytest
import torch

from grpo_sweeps.bench import main, parse
from grpo_sweeps.benchmarks import forms, growth, subjects
from grpo_sweeps.benchmarks import gram as gram_benchmark
from grpo_sweeps.benchmarks.options import OPTIONS
from grpo_sweeps.types import ConfigError


def test_values_are_read_as_the_type_of_their_default():
    options = parse(gram_benchmark.GramOptions, ["R=4", "checkpointing=true", "block_mb=0.5", "subjects=plain,naive"])
    assert (options.R, options.checkpointing, options.block_mb) == (4, True, 0.5)
    assert options.subjects == ("plain", "naive")
    swept = parse(growth.GrowthOptions, ["R=2,4", "T=64", "from=kept.json"])
    assert (swept.R, swept.T, swept.from_) == ((2, 4), (64,), "kept.json")


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "bench (nothing): allowed are gram, growth, error, forms, shapes, rollout, step"),
        (["grams"], "bench grams: allowed are gram, growth, error, forms, shapes, rollout, step"),
        (["gram", "rows=3"], "'rows=3' is not one of subjects=, model="),
        (["gram", "R=x"], "R=x: a whole number is needed"),
        (["gram", "R=0"], "R=0: allowed are whole numbers from 1"),
        (
            ["gram", "subjects=plain,mine"],
            "subjects=mine: allowed are plain, ours, stock, naive, vmap, opacus, backpack",
        ),
        (["gram", "subjects="], "subjects=: allowed are plain"),
        (["gram", "model=huge"], "model=huge: allowed are tiny"),
        (["gram", "dtype=int8"], "dtype=int8: allowed are float64"),
        (["rollout", "subjects=vllm"], "subjects=vllm: allowed are graph, eager, generate, continuous"),
        (["rollout", "prompt=9,3"], "prompt=9,3: allowed are two whole numbers from 1, the lesser one first"),
        (["rollout", "new=0"], "new=0: allowed are whole numbers from 1"),
        (["step", "subjects=other"], "subjects=other: allowed are graph, eager, trl"),
        (["step", "model=other"], "model=other: allowed are llama_nemotron_nano_4b"),
        (["step", "threads=-1"], "threads=-1: 0 or more is needed"),
        (["rollout", "threads=-1"], "threads=-1: 0 or more is needed"),
        (["gram", "threads=-1"], "threads=-1: 0 or more is needed"),
        (["step", "repeats=0"], "repeats=0: allowed are whole numbers from 1"),
        (["gram", "T=4", "prompt=4"], "T=4: allowed are whole numbers larger than prompt=4"),
        (["gram", "form=fast"], "form=fast: allowed are"),
        (["gram", "device=tpu0"], "device=tpu0: allowed are auto, cpu, cuda and cuda:N"),
        (["gram", "device=meta"], "device=meta: allowed are auto, cpu, cuda and cuda:N"),
        (["gram", "device=cuda:99"], "device=cuda:99: torch sees"),
        (["growth", "R=2,x"], "R=2,x: a whole number or several, with commas, is needed"),
        (["growth", "R=2,0"], "R=0: allowed are whole numbers from 1"),
        (["growth", "T=1,8"], "T=1: allowed are whole numbers larger than prompt=1"),
        (["growth", "from=a.json", "json=b.json"], "json=b.json: with from=a.json nothing is measured"),
        (["error", "R=1"], "R=1: allowed are whole numbers from 2"),
        (["error", "layers=-1"], "layers=-1: allowed are whole numbers from 0"),
        (["error", "groups=2"], "'groups=2' is not one of model="),
    ],
)
def test_a_bad_command_is_one_sentence_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and message in text and text.count("\n") == 1


@pytest.mark.parametrize("name", OPTIONS)
def test_help_lists_words_that_are_accepted(name, capsys):
    assert main([name, "help"]) == 0
    assert parse(OPTIONS[name], capsys.readouterr().out.splitlines()) == OPTIONS[name]()


@pytest.mark.integration
def test_gram_prints_a_table_and_writes_the_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subjects, "installed", lambda package: False)
    path = tmp_path / "folder" / "bench.json"
    words = ["gram", "model=test", "R=2", "T=8", "repeats=2", "device=cpu", f"json={path}"]
    assert main([*words, "subjects=plain,ours,backpack"]) == 0
    last = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in last] == ["plain", "ours", "backpack"]
    assert last[2].split(maxsplit=1)[1] == "not installed: pip install grpo_sweeps[bench]"
    result = json.loads(path.read_text())
    assert result["command"].endswith("subjects=plain,ours,backpack") and result["torch"] == torch.__version__
    assert result["options"]["R"] == 2 and result["parameters"] > 10_000
    for name in ("plain", "ours"):
        row = result["subjects"][name]
        for numbers in (row["ms"], row["ratio"]):
            assert 0 < numbers["min"] <= numbers["median"] <= numbers["max"]
        assert len(row["times_ms"]) == 2 and (row["peak_mb"] is None or row["peak_mb"] > 0)
    assert result["subjects"]["plain"]["error"] is None and result["subjects"]["ours"]["error"] < 1e-5
    assert result["subjects"]["backpack"].keys() == {"failed", "note"}


def test_all_means_every_subject_and_a_failed_peak_is_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gram_benchmark, "peak_of_child", lambda options: (None, f"no peak of {options.peak_of}"))
    path = tmp_path / "bench.json"
    words = ["gram", "model=test", "subjects=all", "R=2", "T=6", "repeats=1", "device=cpu", "dtype=bfloat16"]
    assert main([*words, f"json={path}"]) == 0
    rows = json.loads(path.read_text())["subjects"]
    assert list(rows) == ["plain", "ours", "stock", "naive", "vmap", "opacus", "backpack"]
    assert rows["naive"]["note"] == "no peak of naive" and rows["stock"]["note"] == "T x V logits; no peak of stock"
    for name in ("ours", "naive", "vmap"):
        assert 0 < rows[name]["error"] < 0.03
    assert "failed" in rows["backpack"]


def test_a_child_that_dies_leaves_no_peak(monkeypatch):
    monkeypatch.setattr(gram_benchmark.sys, "executable", "false")
    peak, note = gram_benchmark.peak_of_child(gram_benchmark.GramOptions(peak_of="plain"))
    assert peak is None and note == "peak not measured: exit code 1"


def test_forms_times_each_form_that_can_run_and_names_the_rules_choice(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(forms, "SHAPES", {"cpu": ((16, 8),)})
    path = tmp_path / "forms.json"
    assert main(["forms", "R=2", "T=2,64", "repeats=1", "device=cpu", f"json={path}"]) == 0
    short, long = json.loads(path.read_text())["rows"]
    assert short["rule"] == "ghost" and long["rule"] == "blocks"
    assert {"plain", "blocks", "ghost"} <= short.keys() and not {"onepass", "fused"} & short.keys()
    assert "the rule takes" in capsys.readouterr().out


@pytest.mark.integration
def test_rollout_measures_each_and_says_why_one_cannot_be(tmp_path, capsys):
    """On a CPU, where graph is not served; the eager engine's log-probabilities are those of a whole forward."""
    path = tmp_path / "rollout.json"
    words = ["prompts=2", "R=3", "prompt=4,9", "new=6", "repeats=2", "threads=1", "dtype=float32", "device=cpu"]
    assert main(["rollout", "subjects=graph,eager,generate", *words, f"json={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["graph", "eager", "generate"]
    assert "needs a CUDA GPU" in rows["graph"]["failed"]
    for name in ("eager", "generate"):
        assert len(rows[name]["times_s"]) == 2
        rate = rows[name]["tokens_per_second"]["median"]
        assert rate == pytest.approx(statistics.median(36 / s for s in rows[name]["times_s"]))
    assert rows["eager"]["logprob_difference"]["largest"] < 1e-4 and rows["generate"]["logprob_difference"] is None
    table = capsys.readouterr().out
    assert "6 rows x 6 tokens" in table and "needs a CUDA GPU" in table


@pytest.mark.integration
def test_step_measures_whole_steps_by_part(tmp_path, capsys):
    path = tmp_path / "step.json"
    words = ["prompts=2", "R=4", "new=8", "steps=2", "repeats=2", "threads=1", "device=cpu", f"json={path}"]
    assert main(["step", "subjects=eager,graph", *words]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert "needs a CUDA GPU" in rows["graph"]["failed"]
    steps = rows["eager"]["steps"]
    assert len(steps) == 4  # two rounds of two, the first of each round left out
    for one in steps:
        assert 0 < one["sample"] < one["step"] and 0 < one["tokens"] <= 64
        assert one["sample"] + one["backward"] + one["update"] == pytest.approx(one["step"], rel=0.2)
    assert "needs a CUDA GPU" in capsys.readouterr().out


@pytest.mark.integration
def test_where_nothing_can_be_measured_the_exit_code_is_1(tmp_path, capsys):
    """And a path may hold what Hydra's words give a meaning."""
    words = ["prompts=1", "R=2", "new=4", "device=cpu"]
    assert main(["rollout", "subjects=graph", *words]) == 1
    assert main(["step", "subjects=eager", f"path={tmp_path}/a=b,it's", *words]) == 1
    assert f"model.path={tmp_path}/a=b,it's" in capsys.readouterr().out


def test_parse_refuses_words_without_a_value():
    with pytest.raises(ConfigError, match="'R' is not one of"):
        parse(gram_benchmark.GramOptions, ["R"])
