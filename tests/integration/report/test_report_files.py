"""Whole reports, figures included: files, escaping, what is missing, sweeps that hold little, the command."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.publish import formats
from grpo_sweeps.publish.drawing import Plot, render
from grpo_sweeps.report.__main__ import main
from grpo_sweeps.report.build import build
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import PAPER_SAYS, Claim
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.report.tables import pooled as table
from tests.unit.report.conftest import wait

pytestmark = pytest.mark.integration
HOSTILE = '=HYPERLINK("http://x") <script>alert(1)</script> \\input{x} | `rm` \u202e & done {{ 7*7 }}'
ALWAYS = {  # files of every report
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


@dataclass(frozen=True)
class Report:
    """A report's folder, the runs it is about, its claims, and the figures that were drawn for it."""

    out: Path
    runs: Path
    claims: list[Claim]
    plots: list[Plot]


@pytest.fixture(scope="module")
def hostile(write, tmp_path_factory):
    """A report on two arms with hostile texts everywhere and failed runs. To be read only."""
    tmp_path = tmp_path_factory.mktemp("hostile")
    for R in (2, 4):
        for reward in ("exact_match.strict", "=cmd|<b>evil</b>"):
            bad = {"state": "failed", "error": f"out of memory\n{HOSTILE}", "step": 3}
            write(
                tmp_path / "runs", "two", R, 0, steps=9, text=HOSTILE, config={"reward._target_": reward},
                status=bad if R == 4 else {"command": "run tracking.uri=http://u:secret@h"}, prompt_id=HOSTILE,
            )  # fmt: skip
    plots: list[Plot] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_sweeps.publish.drawing.render", lambda plot: (plots.append(plot), render(plot))[1])
        out, claims = build("two", tmp_path / "runs", tmp_path / "out", ["python", "-m", "grpo_sweeps.report"])
    return Report(out, tmp_path / "runs", claims, plots)


def test_every_file_is_there_and_listed(hostile):
    files = {p.name for p in hostile.out.iterdir()}
    assert files >= ALWAYS | {f"{plot.name}.{kind}" for plot in hostile.plots for kind in ("png", "pdf")}
    record = json.loads((hostile.out / "manifest.json").read_text())
    assert set(record["files"]) == files and len(record["runs"]) == 4
    assert {r["state"] for r in record["runs"]} == {"finished", "failed"} and record["commits"] == ["0123456789abcdef"]
    assert "secret" not in (hostile.out / "manifest.json").read_text() + (hostile.out / "index.html").read_text()


def test_a_report_whose_figures_are_kept_is_the_same_and_loads_nothing_that_draws(hostile, tmp_path):
    program = (
        "import sys\nfrom grpo_sweeps.report.__main__ import main\n"
        f"code = main(['sweep=two', 'runs_dir={hostile.runs}', 'out={tmp_path}'])\n"
        "print(code, [name for name in ('seaborn', 'matplotlib.pyplot', 'scipy.stats') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stdout + done.stderr
    for path in hostile.out.iterdir():
        assert path.name == "manifest.json" or (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_page_needs_no_network_runs_no_script_and_is_accessible(hostile):
    text = (hostile.out / "index.html").read_text()
    parsed = Page(text)
    assert "script" not in parsed.tags and "b" not in parsed.tags and "link" not in parsed.tags
    assert parsed.loads and all(src.startswith("data:image/svg+xml;base64,") for src in parsed.loads)
    panels = [panel for plot in hostile.plots for panel in plot.panels]
    assert all(image["alt"] for image in parsed.images) and len(parsed.images) == len(panels) > len(hostile.plots)
    for link in parsed.links:
        assert (link.startswith("#") and link[1:] in parsed.ids) or (hostile.out / link).is_file()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "[U+202E]" in text and "\u202e" not in text
    assert "{{ 7*7 }}" in text and "width=device-width" in text and 'lang="en"' in text


def test_a_claim_has_one_card_for_all_arms_and_what_is_open_one_line(hostile):
    text = (hostile.out / "index.html").read_text()
    verdicts = text[text.index('aria-label="Verdicts"') : text.index("</section>")]
    judged = [claim for claim in hostile.claims if claim.findings]
    ids = list(dict.fromkeys(claim.id for claim in judged))
    assert {"C2", "C10", "Controls", "Shuffled"} < set(ids)
    assert re.findall(r"<h3>(\w+)</h3>", verdicts) == ids and verdicts.count('class="verdict') == len(judged)
    assert len(judged) == 2 * len(ids), "one card for both arms"
    left = [claim.id for claim in hostile.claims if not claim.findings and claim.verdict == rules.UNDECIDED]
    for exact in ("C12", "C14", "C23", "C24"):
        assert exact not in left and f"{exact}: {rules.by_theory(exact)}." in verdicts
    assert "C1" in left and f"{', '.join(left)}: records of this kind do not decide them" in verdicts
    leads = Counter(claim.lead for claim in hostile.claims)
    assert set(leads) > {PAPER_SAYS} and {lead: text.count(f"{lead}: ") for lead in leads} == leads


def test_hostile_cells_are_neutralised_in_every_table(hostile):
    for name in ("table1.csv", "by_k.csv", "claims.csv", "ranks.csv"):
        for line in (hostile.out / name).read_text().splitlines():
            assert not line.startswith(("=", "+", "-", "@"))
    assert "'=x" in formats.csv(pd.DataFrame({"a": ["=x"]})) and "-1.5" in formats.csv(pd.DataFrame({"a": [-1.5]}))
    tex = formats.latex(["a"], [["50% \\input{x} $x_1$ & #"]], "c_1", "tab:x")
    assert r"50\% \textbackslash{}input\{x\} \$x\_1\$ \& \#" in tex and r"\toprule" in tex and r"c\_1" in tex
    assert formats.markdown(["a"], [["<b>|`x`\ny"]]).splitlines()[2] == "| &lt;b>\\|\\`x\\` y |"


def test_missing_things_are_named(hostile):
    lines = missing(load_sweep("two", hostile.runs))
    assert sum("is failed at step 3 of 9: out of memory" in line for line in lines) == 2
    assert any("fewer than 30" in line for line in lines) and any("One seed" in line for line in lines)


def test_a_sweep_without_measurement_or_evaluation_still_gives_a_report(write, tmp_path):
    write(tmp_path / "runs", "bare", 2, 0, steps=2, evaluate=False, change=lambda g: dataclasses.replace(g, gram=None))
    out, claims = build("bare", tmp_path / "runs", tmp_path / "out", ["report"])
    frame = pd.read_csv(io.StringIO((out / "table1.csv").read_text()))
    assert np.isnan(frame.at[0, "effective_rank"]) and frame.at[0, "measured_mixed_groups"] == 0
    assert "nothing measured" in (out / "index.html").read_text()
    said = (out / "claims.md").read_text().split("## What is missing")[1].split("## C1 ")[0]
    assert [line.removeprefix("- ") for line in said.split("\n") if line] == missing(
        load_sweep("bare", tmp_path / "runs")
    )
    assert {claim.id for claim in claims} >= {f"C{i}" for i in range(1, 16)}, "the paper's, each with its verdict"


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


def test_a_sweep_without_a_readable_record_gives_a_report_without_values(paper_copy, tmp_path):
    for segment in paper_copy.glob("paper/*/grams/*.parquet"):
        segment.write_bytes(b"PAR1 and nothing more")
    sweep = load_sweep("paper", paper_copy)
    assert len(sweep.runs) == 3 and len(sweep.notes) == 3 and not len(sweep.groups)
    assert {"numerical_rank", "mixed", "prompt_id"} <= set(sweep.groups)
    folder, _ = build("paper", paper_copy, tmp_path / "out", ["python"])
    assert (folder / "index.html").is_file()


def test_a_run_that_waits_has_no_commit_yet(write, tmp_path):
    write(tmp_path, "s", 2, 0, steps=2)
    wait(tmp_path, "s", "R=4 seed=0")
    assert main([f"runs_dir={tmp_path}", "sweep=s", f"out={tmp_path / 'out'}"]) == 0


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
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 60, "about 4 s of processor time, several times that under coverage"


def test_a_report_on_two_sweeps_and_on_chosen_runs(undrawn, write, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, config in (("one", {}), ("two", {"estimator._target_": "grpo_sweeps.estimators.group.rloo"})):
        for seed in (0, 1, 2):
            write(tmp_path / "runs", name, 2, seed, steps=2, config=config)
    assert main(["sweep=one,two"]) == 0
    page = (tmp_path / "reports/one+two/index.html").read_text()
    for part in ("What differs between the sweeps", "Arms side by side", "estimator._target_", "sweep=one,two"):
        assert part in page
    table = pd.read_csv(tmp_path / "reports/one+two/side_by_side.csv")
    assert list(table["pairs"].gt(0)) == [True, True, True]
    listed = json.loads((tmp_path / "reports/one+two/manifest.json").read_text())
    assert {run["sweep"] for run in listed["runs"]} == {"one", "two"} and "side_by_side.csv" in listed["files"]
    assert main(["sweep=one,two", "where=estimator=rloo,seed=0,1"]) == 0
    folder = tmp_path / "reports/one+two_where_estimator=rloo,seed=0,1"
    assert "chosen by where=estimator=rloo,seed=0,1" in (folder / "index.html").read_text()
    assert len(json.loads((folder / "manifest.json").read_text())["runs"]) == 2
    capsys.readouterr()
    assert main(["sweep=one", "where=R=7"]) == 2
    assert capsys.readouterr().err == "error: where=R=7: no run has R=7; there are R=2\n"
