"""`bench growth` and `bench error`: what they write, what they draw, what they refuse."""

import json

import numpy as np
import pytest
from PIL import Image

from grpo_sweeps.bench import main
from grpo_sweeps.benchmarks import growth
from grpo_sweeps.benchmarks.error import errors, grpo_weights, ranks


@pytest.fixture
def result():
    """A made-up sweep with a point that ran out of memory and one that is not slower than plain."""
    points = []
    for R in (2, 4, 8):
        for T in (256, 512):
            ratio = 1 + (30 + R) / T
            spread = {"median": ratio, "min": ratio - 0.02, "max": ratio + 0.02}
            points.append({"R": R, "T": T, "plain": {}, "ours": {"ratio": spread, "ms": spread, "peak_mb": None}})
    points[0]["ours"]["ratio"] = {"median": 0.99, "min": 0.9, "max": 1.2}
    points[-1] = {"R": 8, "T": 512, "failed": "ours: OutOfMemoryError: CUDA out of memory."}
    options = {"model": "test", "dtype": "float32", "checkpointing": False, "repeats": 3}
    return {"benchmark": "growth", "options": options, "device": "a card", "points": points}


def ink(path):
    """Share of pixels that are not white."""
    return float((np.asarray(Image.open(path).convert("L")) < 250).mean())


def test_the_figure_shows_what_was_measured_and_names_what_is_missing(result, tmp_path):
    paths = growth.draw(result, str(tmp_path / "folder" / "growth"))
    assert [path.name for path in paths] == ["growth.png", "growth.pdf"]
    assert Image.open(paths[0]).size[0] == 3 * 2.5 * growth.DPI and ink(paths[0]) > 0.02
    assert paths[1].read_bytes().startswith(b"%PDF") and paths[1].stat().st_size > 5_000
    assert growth.missing(result) == ["R=8 T=512 out of memory"]


def test_pairs_along_two_lines():
    options = growth.GrowthOptions(R=(8, 2, 4), T=(512, 256), through=(4, 256))
    assert growth.pairs_of(options) == [(2, 256), (4, 256), (4, 512), (8, 256)]
    assert len(growth.pairs_of(growth.GrowthOptions(R=(2, 4), T=(8, 16)))) == 4


@pytest.mark.parametrize("through", ["4", "4,64", "3,32", "4,32,1"])
def test_two_lines_must_meet_in_a_pair(through, capsys):
    assert main(["growth", "model=test", "R=2,4", "T=16,32", f"through={through}"]) == 2
    assert f"through={through}: two numbers are needed" in capsys.readouterr().err


def test_two_lines_are_two_panels(result, tmp_path, monkeypatch):
    panels = []
    draw_panel = growth.draw_panel
    monkeypatch.setattr(growth, "draw_panel", lambda *args: panels.append(args[2:]) or draw_panel(*args))
    result["options"]["through"] = [4, 256]
    growth.draw(result, str(tmp_path / "growth"))
    assert panels == [("R", "T", 256), ("T", "R", 4)]


def test_a_sweep_without_a_point_still_names_them(result, tmp_path):
    result["points"] = result["points"][-1:]
    assert ink(growth.draw(result, str(tmp_path / "growth"))[0]) > 0.001


def test_names_of_lines_do_not_overlap():
    figure = growth.plt.figure()
    ax = figure.add_subplot()
    growth.name_lines(ax, [(0.10, "b", "0.3"), (0.101, "c", "0.3"), (0.01, "a", "0.3")])
    heights = [text.get_position()[1] for text in ax.texts]
    assert [text.get_text() for text in ax.texts] == ["a", "b", "c"] and min(np.diff(heights)) > 0.08
    growth.plt.close(figure)


def test_growth_measures_writes_after_every_point_and_draws_again(tmp_path, capsys, monkeypatch):
    path, figure = tmp_path / "growth.json", tmp_path / "growth"
    written = []
    write_json = growth.write_json
    monkeypatch.setattr(growth, "write_json", lambda to, r: (write_json(to, r), written.append(len(r["points"]))))
    words = ["growth", "model=test", "R=2,3", "T=8,12", "repeats=2", "device=cpu", f"json={path}"]
    assert main([*words, f"figure={figure}"]) == 0
    assert written == [1, 2, 3, 4]
    result = json.loads(path.read_text())
    assert result["command"].startswith("python -m grpo_sweeps.bench growth model=test R=2,3 ")
    assert [(p["R"], p["T"]) for p in result["points"]] == [(2, 8), (2, 12), (3, 8), (3, 12)]
    for point in result["points"]:
        assert len(point["ours"]["times_ms"]) == 2 and point["ours"]["ratio"]["median"] > 0
    lines = capsys.readouterr().out.splitlines()
    (tmp_path / "growth.png").unlink()
    assert main(["growth", f"from={path}", f"figure={figure}"]) == 0
    assert (tmp_path / "growth.png").exists() and capsys.readouterr().out.splitlines() == lines


def test_a_point_that_fails_is_kept_with_its_error(tmp_path, monkeypatch, capsys):
    made = growth.random_batch

    def short_of_memory(model, R, *rest):
        if R == 3:
            raise growth.torch.OutOfMemoryError("CUDA out of memory.")
        return made(model, R, *rest)

    monkeypatch.setattr(growth, "random_batch", short_of_memory)
    path = tmp_path / "growth.json"
    words = ["growth", "model=test", "R=3,2", "T=8", "repeats=1", "device=cpu", f"json={path}"]
    assert main(words) == 0
    first, second = json.loads(path.read_text())["points"]
    assert "failed" not in first and second == {"R": 3, "T": 8, "failed": "OutOfMemoryError: CUDA out of memory."}
    assert "R=3   T=8     OutOfMemoryError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, message", [(None, "No such file"), ("{", "is needed ("), ('{"benchmark": "gram"}', "this is another")]
)
def test_from_refuses_what_growth_did_not_write(text, message, tmp_path, capsys):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    assert main(["growth", f"from={path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: bench: from={path}: a JSON file") and message in error


@pytest.mark.parametrize("dtype, most", [("float64", 1e-6), ("bfloat16", 3e-2)])
def test_error_compares_with_float64_rows(dtype, most, tmp_path, capsys):
    path = tmp_path / "error.json"
    words = ["error", "model=test", "layers=1", "vocabulary=64", "R=4", "T=12", "device=cpu"]
    assert main([*words, f"dtype={dtype}", f"json={path}"]) == 0
    result = json.loads(path.read_text())
    assert result["shape"] == {"layers": 1, "vocabulary": 64} and result["benchmark"] == "error"
    for column in ("ours", "autograd"):
        assert 0 <= result["errors"][column]["relative_frobenius"] < most
        assert (result["errors"]["ours"]["relative_frobenius"] > 1e-6) == (dtype == "bfloat16")
    K, w = np.array(result["K"]["float64"]), np.array(result["weights"])
    weighted = result["ranks"]["diag(w) K diag(w)"]["float64"]
    values = np.linalg.eigvalsh(np.diag(w) @ K @ np.diag(w))
    assert weighted["participation ratio"] == pytest.approx(values.sum() ** 2 / (values**2).sum())
    out = capsys.readouterr().out
    assert "a vocabulary of 64 words, random weights as initialised" in out
    assert {"relative, Frobenius", "effective rank", "stable rank"} <= {line[:34].strip() for line in out.splitlines()}


def test_errors_and_ranks_of_known_matrices():
    exact = np.diag([4.0, 1.0])
    found = exact + np.array([[0.4, 0.0], [0.0, 0.2]])
    assert errors(found, exact) == {
        "relative_frobenius": pytest.approx((0.2 / 17) ** 0.5),
        "largest_entry": pytest.approx(0.2),
    }
    assert ranks(np.eye(3)) == {
        "effective rank": pytest.approx(3),
        "participation ratio": pytest.approx(3),
        "stable rank": pytest.approx(3),
        "top-1 fraction": pytest.approx(1 / 3),
    }
    assert grpo_weights(8, 10) == pytest.approx([0.075] * 2 + [-0.025] * 6)
