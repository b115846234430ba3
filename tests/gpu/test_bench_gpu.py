"""The benchmark on a CUDA device: times by events, peaks by the allocator, a subject out of memory is a row."""

import json

import pytest
import torch

from grpo_sweeps.bench import main
from grpo_sweeps.benchmarks import subjects as subjects_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_gram_times_every_subject_and_sees_its_peak(tmp_path):
    path = tmp_path / "gram.json"
    words = ["gram", "model=test", "device=cuda", "dtype=bfloat16", "checkpointing=true", "R=4", "T=32", "repeats=3"]
    assert main([*words, "subjects=plain,ours,stock,naive,vmap", f"json={path}"]) == 0
    rows = json.loads(path.read_text())["subjects"]
    for name in ("plain", "ours", "stock", "naive", "vmap"):
        assert rows[name]["ms"]["min"] > 0 and rows[name]["peak_mb"] > 0, rows[name]
    for name in ("ours", "naive", "vmap"):
        assert 0 < rows[name]["error"] < 0.03


def test_naive_looks_at_what_the_card_has_free(monkeypatch, tmp_path):
    monkeypatch.setattr(subjects_module, "NAIVE_MARGIN_BYTES", 2**50)
    path = tmp_path / "gram.json"
    words = ["gram", "model=test", "device=cuda", "R=2", "T=8", "repeats=1", "subjects=plain,naive", f"json={path}"]
    assert main(words) == 0
    assert json.loads(path.read_text())["subjects"]["naive"]["note"] == subjects_module.LOWER_BOUND


def test_a_real_lack_of_memory_is_a_row_and_is_given_back(monkeypatch, tmp_path):
    def greedy(self):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(subjects_module.Stock, "step", greedy)
    before = torch.cuda.memory_allocated()
    path = tmp_path / "gram.json"
    words = ["gram", "model=test", "device=cuda", "R=2", "T=8", "repeats=1", "subjects=stock,plain", f"json={path}"]
    assert main(words) == 0
    rows = json.loads(path.read_text())["subjects"]
    assert rows["stock"]["failed"].startswith("OutOfMemoryError") and rows["plain"]["ms"]["median"] > 0
    assert torch.cuda.memory_allocated() <= before + 2**27  # workspaces of the libraries may stay: 64 MiB and more


def test_growth_and_error_run_there(tmp_path):
    words = ["device=cuda", "dtype=bfloat16", "model=test"]
    assert main(["growth", *words, "R=2,4", "T=16", "repeats=2", f"json={tmp_path / 'growth.json'}"]) == 0
    assert main(["error", *words, "layers=2", "vocabulary=64", "R=4", "T=16", f"json={tmp_path / 'error.json'}"]) == 0
    assert all(point["ours"]["peak_mb"] > 0 for point in json.loads((tmp_path / "growth.json").read_text())["points"])
    assert json.loads((tmp_path / "error.json").read_text())["errors"]["ours"]["relative_frobenius"] < 0.03
