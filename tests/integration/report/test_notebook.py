"""The notebook of examples/ on a sweep, as a kernel runs it where there is one, else cell by cell."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "read_a_sweep.ipynb"


def cells() -> list[str]:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in content["cells"]), "the notebook is kept without outputs"
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def workplace(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for seed in (0, 1):
        for R in (2, 4):
            write(tmp_path / "runs", "default", R, seed, steps=4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_cells_run_and_draw_the_figure(workplace: Path) -> None:
    names: dict[str, Any] = {}
    for source in cells():
        exec(compile(source, NOTEBOOK.name, "exec"), names)
    lines = names["axes"].get_lines()
    plt.close(names["figure"])
    assert [line.get_label() for line in lines] == ["R = 2", "R = 4"]
    mixed, by_step = names["mixed"], lines[1].get_ydata()
    assert list(by_step) == list(mixed[mixed["R"] == 4].groupby("step")["effective_rank"].mean())
    assert (workplace / "effective_rank.png").stat().st_size > 10_000


@pytest.mark.skipif(not (find_spec("nbclient") and find_spec("ipykernel")), reason="nbclient or ipykernel is missing")
def test_a_kernel_runs_it(workplace: Path) -> None:
    import nbformat  # type: ignore[import-not-found]
    from nbclient import NotebookClient  # type: ignore[import-not-found]

    NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=120).execute()
    assert (workplace / "effective_rank.png").exists()
