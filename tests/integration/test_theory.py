"""The command: what it writes, and what it says to bad input."""

from __future__ import annotations

import csv
import re

import pytest

from grpo_sweeps import theory
from grpo_sweeps.paper import STATEMENTS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def report(one_thread, tmp_path_factory):
    out = tmp_path_factory.mktemp("theory")
    assert theory.main(["policies=1", "prompts=2", "draws=1000", "steps=10", f"out={out}"]) == 0
    return out


def test_every_claim_is_in_the_table_and_on_the_page(report):
    rows = list(csv.DictReader((report / "claims.csv").open()))
    assert [row["id"] for row in rows] == list(STATEMENTS)
    page = (report / "index.html").read_text()
    assert all(f'id="{row["id"]}"' in page for row in rows)
    assert len((report / "claims.md").read_text().splitlines()) == len(rows) + 2
    for row in rows:
        assert row["error"] in ("", "nan") or float(row["error"]) < 1e-10, row


def test_the_page_asks_for_nothing_from_elsewhere(report):
    page = (report / "index.html").read_text()
    assert not re.search(r"https?://", page.replace("http://www.w3.org", "")) and "<script" not in page
    for name in re.findall(r'href="([^"#]+)"', page):
        assert (report / name).exists(), name


def test_figures_are_written_as_pdf_and_png(report):
    for name in ("budget", "oracle", "norm_by_k", "weights", "stages"):
        assert (report / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (report / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["policies=0"], "theory: policies=0: 1 or more is needed"),
        (["prompts=x"], "theory: prompts=x: a whole number is needed"),
        (["colour=red"], "theory: 'colour=red' is not one of policies="),
        (["draws=10"], "theory: draws=10: 1000 or more is needed"),
        (["out=/dev/null/x"], "/dev/null"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, capsys):
    assert theory.main(words) == 2
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err and err.count("\n") == 1


def test_help_lists_the_keys(capsys):
    assert theory.main(["--help"]) == 0
    assert "policies=" in capsys.readouterr().out
