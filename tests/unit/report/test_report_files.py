"""The written report: files, escaping, tables against the records, what is missing, the command."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.report import formats, measure, page, table
from grpo_sweeps.report.__main__ import main
from grpo_sweeps.report.build import build
from grpo_sweeps.report.drawing import Plot, render, styles
from grpo_sweeps.report.figures import figures
from grpo_sweeps.report.layers import layer_table
from grpo_sweeps.report.missing import missing
from grpo_sweeps.report.query import load_sweep

HOSTILE = '=HYPERLINK("http://x") <script>alert(1)</script> \\input{x} | `rm` \u202e & done {{ 7*7 }}'
FILES = {
    *(f"{name}.{kind}" for name in ("curves", "fig1", "fig2", "fig3", "fig4", "ranks_by_k", "rank_change")
      for kind in ("png", "pdf")), "table1.csv", "table1.md", "table1.tex",
    "curves.csv", "by_k.csv", "ranks.csv", "claims.csv", "claims.md", "index.html", "manifest.json",
    "best_size.csv", "best_size.png", "best_size.pdf", "power.csv",
}  # fmt: skip


class Page(HTMLParser):
    """Collects tags, the addresses that a browser would load, and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.loads += [values[a] for a in ("src", "data", "srcset") if values.get(a)]
        self.ids |= {values["id"]} if "id" in values else set()
        if tag == "a":
            self.links.append(values["href"])
        if tag == "img":
            self.images.append(values)


@pytest.fixture(scope="module")
def hostile(write, tmp_path_factory):
    """A report on two arms with hostile texts everywhere and failed runs: (its folder, runs_dir)."""
    tmp_path = tmp_path_factory.mktemp("hostile")
    for R in (2, 4):
        for reward in ("exact_match.strict", "=cmd|<b>evil</b>"):
            bad = {"state": "failed", "error": f"out of memory\n{HOSTILE}", "step": 3}
            write(
                tmp_path / "runs", "two", R, 0, steps=8, text=HOSTILE, config={"reward._target_": reward},
                status=bad if R == 4 else {"command": "run tracking.uri=http://u:secret@h"}, prompt_id=HOSTILE,
            )  # fmt: skip
    out, _ = build("two", tmp_path / "runs", tmp_path / "out", ["python", "-m", "grpo_sweeps.report"])
    return out, tmp_path / "runs"


def test_every_file_is_there_and_listed(hostile):
    hostile, _ = hostile
    assert {p.name for p in hostile.iterdir()} == FILES
    record = json.loads((hostile / "manifest.json").read_text())
    assert set(record["files"]) == FILES and len(record["runs"]) == 4
    assert {r["state"] for r in record["runs"]} == {"finished", "failed"} and record["commits"] == ["0123456789abcdef"]
    assert "secret" not in (hostile / "manifest.json").read_text() + (hostile / "index.html").read_text()


def test_the_page_needs_no_network_runs_no_script_and_is_accessible(hostile):
    text = (hostile[0] / "index.html").read_text()
    parsed = Page(text)
    assert "script" not in parsed.tags and "b" not in parsed.tags and "link" not in parsed.tags
    assert parsed.loads and all(src.startswith("data:image/svg+xml;base64,") for src in parsed.loads)
    assert all(image["alt"] for image in parsed.images) and len(parsed.images) == 12 + 2 + 2 + 4 + 2 + 12 + 4 + 2
    for link in parsed.links:
        assert (link.startswith("#") and link[1:] in parsed.ids) or link in FILES
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "[U+202E]" in text and "\u202e" not in text
    assert "{{ 7*7 }}" in text and "width=device-width" in text and 'lang="en"' in text


def test_a_claim_has_one_card_for_all_arms_and_what_is_open_one_line(hostile):
    text = (hostile[0] / "index.html").read_text()
    verdicts = text[text.index('aria-label="Verdicts"') : text.index("</section>")]
    ids = [f"C{i}" for i in (2, 3, 4, 5, 6, 7, 8, 9, 10)] + ["Controls", "Q3", "Shuffled"]
    assert re.findall(r"<h3>(\w+)</h3>", verdicts) == ids and verdicts.count('class="verdict') == 2 * len(ids)
    assert "C1, C11, C12, C13, C14, C15: records of this kind do not decide them" in verdicts
    assert text.count("The paper says: ") == 2 * 9 + 6 and text.count("Exact, whatever the data: ") == 2


def test_hostile_cells_are_neutralised_in_every_table(hostile):
    for name in ("table1.csv", "by_k.csv", "claims.csv", "ranks.csv"):
        for line in (hostile[0] / name).read_text().splitlines():
            assert not line.startswith(("=", "+", "-", "@"))
    assert "'=x" in formats.csv(pd.DataFrame({"a": ["=x"]})) and "-1.5" in formats.csv(pd.DataFrame({"a": [-1.5]}))
    tex = formats.latex(["a"], [["50% \\input{x} $x_1$ & #"]], "c_1", "tab:x")
    assert r"50\% \textbackslash{}input\{x\} \$x\_1\$ \& \#" in tex and r"\toprule" in tex and r"c\_1" in tex
    assert formats.markdown(["a"], [["<b>|`x`\ny"]]).splitlines()[2] == "| &lt;b>\\|\\`x\\` y |"


def test_missing_things_are_named(hostile):
    lines = missing(load_sweep("two", hostile[1]))
    assert sum("is failed at step 3 of 8: out of memory" in line for line in lines) == 2
    assert any("fewer than 30" in line for line in lines) and any("One seed" in line for line in lines)


def test_missing_cells_seeds_commits_divergence(write, tmp_path):
    runs = tmp_path / "runs"
    write(runs, "s", 2, 0, config={"trainer.lr": 0.1})
    write(runs, "s", 2, 1, config={"trainer.lr": 0.1}, status={"commit": "f" * 16, "dirty": True})
    write(runs, "s", 4, 0, config={"trainer.lr": 0.1}, status={"total": 40})
    broken = write(runs, "s", 2, 0, config={"trainer.lr": 0.5}, evaluate=False)
    with open(broken / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "time": 1, "reward": 0.5, "grad_norm": "NaN"}\n')
    text = "\n".join(missing(load_sweep("s", runs)))
    assert "No run for lr=0.5, R = 4." in text
    assert "lr=0.1, R = 4 has no run with seed 1." in text
    assert "different commits: 0123456789ab, ffffffffffff" in text and "uncommitted changes" in text
    assert f"Run {broken.name} diverged: grad_norm is not a finite number from step 3." in text
    assert "Not evaluated: R=2 seed=0." in text and "number of steps: 20, 40" in text


def test_a_complete_sweep_misses_nothing(full_sweep):
    assert missing(load_sweep("full", full_sweep)) == []


def test_table_1_against_plain_means(full_sweep):
    sweep = load_sweep("full", full_sweep)
    rows = table.table1(sweep).set_index("R")
    for R in (2, 4, 8):
        records = [r for r in sweep.records if r.R == R]
        mixed = [r for r in records if r.mixed]
        values = []
        for r in mixed:
            s = np.sqrt(np.linalg.eigvalsh(np.outer(r.weights, r.weights) * r.gram).clip(0))
            values.append(s.sum() ** 2 / (s**2).sum())
        assert rows.at[R, "effective_rank"] == pytest.approx(np.mean(values))
        assert rows.at[R, "effective_rank_low"] < np.mean(values) < rows.at[R, "effective_rank_high"]
        assert rows.at[R, "mixed_groups"] == len(mixed) == rows.at[R, "measured_mixed_groups"]
        assert rows.at[R, "groups"] == len(records) and rows.at[R, "seeds"] == 3
        evals = sweep.evals[sweep.evals["R"] == R]
        share = evals["strict"] / evals["samples"]
        assert rows.at[R, "accuracy"] == pytest.approx(share[evals["step"] == 10].mean())
        gain = share[evals["step"] == 10].mean() - share[evals["step"] == 0].mean()
        assert rows.at[R, "accuracy_gain"] == pytest.approx(gain)
    assert rows.at[4, "paper_top1_fraction"] == "0.7-0.8" and rows.at[8, "paper_effective_rank"] == "about 2"


def test_a_gain_is_told_from_none(write, tmp_path):
    for R, gain in ((2, 0.0), (4, 0.4)):
        write(tmp_path, "g", R, 0, gain=gain, steps=4)
    rows = table.table1(load_sweep("g", tmp_path)).set_index("R")
    assert rows.at[2, "accuracy_gain_low"] < 0 < rows.at[2, "accuracy_gain_high"]
    assert rows.at[4, "accuracy_gain_low"] > 0.2


def test_by_k_against_plain_means_and_the_closed_form(paper_sweep):
    sweep = load_sweep("paper", paper_sweep)
    frame = table.by_k(sweep)
    assert list(frame[frame["R"] == 8]["k"]) == list(range(1, 8))
    for row in frame.to_dict("records"):
        assert row["null_closed_form"] == pytest.approx(4 * row["k"] * (row["R"] - row["k"]) / row["R"])
        chosen = sweep.groups[(sweep.groups["R"] == row["R"]) & (sweep.groups["k"] == row["k"])]
        assert row["groups"] == len(chosen)
        assert row["effective_rank"] == pytest.approx(chosen["effective_rank"].mean(), nan_ok=True)
        assert row["null_effective_rank"] == pytest.approx(row["null_closed_form"], nan_ok=True) or not row["groups"]


def test_every_definition_of_every_matrix_is_there_by_k_with_its_nulls(full_sweep):
    sweep = load_sweep("full", full_sweep)
    for row in table.by_k(sweep).to_dict("records"):
        R, k = row["R"], row["k"]
        chosen = sweep.groups[(sweep.groups["R"] == R) & (sweep.groups["k"] == k)]
        for prefix in measure.MATRICES:
            for name in measure.QUANTITIES:
                assert row[prefix + name] == pytest.approx(chosen[prefix + name].mean(), nan_ok=True)
                assert f"{prefix}{name}_low" in row and f"{prefix}{name}_high" in row
        s = np.array([1 - k / R] * k + [k / R] * (R - k))
        closed = {
            "top1_fraction": s.max() ** 2 / (s**2).sum(), "participation_ratio": (s**2).sum() ** 2 / (s**4).sum(),
            "stable_rank": (s**2).sum() / s.max() ** 2, "numerical_rank": R,
            "entropy_rank": np.exp(-(s / s.sum() * np.log(s / s.sum())).sum()),
        }  # fmt: skip
        assert set(closed) == set(measure.OTHERS)
        for name, value in closed.items():
            assert row[f"null_closed_form_{name}"] == pytest.approx(value)
            if row["groups"]:  # rewards of 0 and 1, and weights one factor times the group mean's
                assert row[f"null_orthogonal_{name}"] == pytest.approx(value)
                assert np.isfinite(row[f"null_measured_norms_{name}"]) and np.isfinite(row[f"null_gaussian_{name}"])
    assert set(table.NULLS) < set(table.by_k(sweep).columns)


def test_figures_keep_their_numbers():
    plots = [Plot(name, "", "", ()) for name in ("fig1", "fig4", "ranks_by_k", "updates")]
    assert page.numbers(plots) == [1, 4, 6, 7]


def test_windows_of_steps_cover_every_group(full_sweep):
    sweep = load_sweep("full", full_sweep)
    curve = table.by_step(sweep, "all", 8, "effective_rank", 4)
    groups = table.usable_groups(sweep, "all", 8)
    assert len(curve) == 4 and curve["groups"].sum() == len(groups)
    assert np.average(curve["mean"], weights=curve["groups"]) == pytest.approx(groups["effective_rank"].mean())


def test_accuracy_uses_the_recorded_rollouts_and_else_the_configuration(full_sweep):
    sweep = load_sweep("full", full_sweep)
    curve = table.accuracy_by_step(sweep, "all", 4)
    assert list(curve["step"]) == [0, 5, 10] and list(curve["rollouts"]) == [0, 5 * 16, 10 * 16]
    sweep.metrics["rollouts"] *= 3  # a run that draws more than it trains on
    assert list(table.accuracy_by_step(sweep, "all", 4)["rollouts"]) == [0, 5 * 48, 10 * 48]
    sweep.metrics = sweep.metrics.drop(columns="rollouts")
    assert list(table.accuracy_by_step(sweep, "all", 4)["rollouts"]) == [0, 5 * 16, 10 * 16]


def test_figures_are_drawn_with_embedded_fonts_and_distinct_styles(paper_sweep):
    sweep = load_sweep("paper", paper_sweep)
    looks = styles(sweep).values()
    assert len({s.color for s in looks}) == len({str(s.line) for s in looks}) == len({s.marker for s in looks}) == 3
    plot = figures(sweep, table.by_k(sweep), layer_table(sweep))[3]
    files = render(plot)
    assert set(files) == {"fig4.png", "fig4.pdf", "fig4_1.svg"}
    assert b"/FontFile2" in files["fig4.pdf"] and files["fig4.png"].startswith(b"\x89PNG")
    assert b"/Type /Type3" not in files["fig4.pdf"] and b"/Subtype /Type3" not in files["fig4.pdf"]
    assert render(plot)["fig4_1.svg"] == files["fig4_1.svg"]


def test_a_sweep_without_measurement_or_evaluation_still_gives_a_report(write, tmp_path):
    write(tmp_path / "runs", "bare", 2, 0, steps=2, evaluate=False, change=lambda g: dataclasses.replace(g, gram=None))
    out, claims = build("bare", tmp_path / "runs", tmp_path / "out", ["report"])
    frame = pd.read_csv(io.StringIO((out / "table1.csv").read_text()))
    assert np.isnan(frame.at[0, "effective_rank"]) and frame.at[0, "measured_mixed_groups"] == 0
    assert "nothing measured" in (out / "index.html").read_text() and len(claims) == 18


@pytest.mark.parametrize("beside", [True, False])
def test_groups_of_one_rollout_give_a_report(beside, write, tmp_path):
    """R=1, as estimator=reinforce allows: no group is mixed, alone or beside a larger R."""

    def alone(g):
        one = {"rewards": (1.0,), "advantages": (1.0,), "weights": (0.25,), "lengths": (7,), "logprob_sums": (-3.0,)}
        return dataclasses.replace(g, R=1, strict=(True,), flexible=(True,), gram=np.ones((1, 1)), same_as=(0,), **one)

    target = {"estimator._target_": "grpo_sweeps.estimators.reinforce.reinforce"}
    write(tmp_path / "runs", "one", 2, 0, steps=2, config={"R": 1, **target}, change=alone)
    if beside:
        write(tmp_path / "runs", "one", 4, 0, steps=2, config=target)
    out, _ = build("one", tmp_path / "runs", tmp_path / "out", ["report"])
    frame = pd.read_csv(io.StringIO((out / "table1.csv").read_text()))
    assert frame.at[0, "R"] == 1 and frame.at[0, "mixed_groups"] == 0 and len(frame) == 1 + beside
    assert ("one group cannot reach a p-value" in (out / "claims.md").read_text()) == beside


def test_rewards_that_are_not_binary_have_no_k(write, tmp_path):
    def graded(g):
        return dataclasses.replace(g, rewards=tuple(0.5 * r for r in g.rewards))

    write(tmp_path / "runs", "graded", 4, 0, steps=4, change=graded)
    sweep = load_sweep("graded", tmp_path / "runs")
    assert sweep.groups.loc[sweep.groups["mixed"], "k"].isna().all() and len(table.by_k(sweep)) == 0
    out, _ = build("graded", tmp_path / "runs", tmp_path / "out", ["report"])
    assert "no measured group has rewards of 0 and 1" in (out / "index.html").read_text()


def test_the_command(paper_copy, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(paper_copy.parent)
    assert main([]) == 0
    assert (tmp_path / "reports/paper/index.html").is_file() and "C8 (all): holds" in capsys.readouterr().out
    assert main(["sweep=nope"]) == 2 and main(["runs_dir=nowhere"]) == 2
    assert main(["sweeps=x"]) == 2 and main(["x"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and "there are paper" in errors[0] and "sweeps=x" in errors[2]
    assert main(["--help"]) == 0 and "runs_dir=DIR" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["out=file"]) == 2 and "cannot be written" in capsys.readouterr().err


def test_the_report_imports_neither_torch_nor_mlflow_nor_the_engine_and_is_quick(paper_sweep, tmp_path):
    code = (
        "import sys; from grpo_sweeps.report.__main__ import main\n"
        f"assert main(['runs_dir={paper_sweep}', 'out={tmp_path / 'o'}']) == 0\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'mlflow', 'hydra', 'transformers')\n"
        "       or m.startswith(('grpo_sweeps.engine', 'grpo_sweeps.loop'))])"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - start < 60  # about 4 s of processor time; the rest is for a busy machine
