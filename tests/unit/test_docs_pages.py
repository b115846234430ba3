"""The pages of docs/: one for each estimator and each claim, true to the code; what they name is there."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.config.checks import check, check_functions
from grpo_sweeps.estimators import DECLARATIONS, Declaration, grpo_std, weight_on
from grpo_sweeps.paper import HOEFFDING_EPS, HOEFFDING_R, STATEMENTS
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.design.power import units_needed
from grpo_sweeps.science import credit
from grpo_sweeps.science.advantages import hoeffding
from grpo_sweeps.science.build import enumerate_all, judge
from grpo_sweeps.theory import TheoryOptions
from tests.composing import run_config

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ESTIMATORS, CLAIMS = DOCS / "estimators", DOCS / "claims"
CLAIM_IDS = list(STATEMENTS)
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = r"(?:grpo_sweeps|conf|tests|docs|examples|sweeps|hydra_plugins|tools)/"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
every_estimator = pytest.mark.parametrize("name", DECLARATIONS)

FACTORS = {
    "grad J": lambda R, G: 1.0,
    "(R - 1)/R grad J": lambda R, G: (R - 1) / R,
    "(N - 1)/N grad J, N = G R": lambda R, G: (G * R - 1) / (G * R),
}
PLACE = re.compile(r"Theorem|Corollary|Section|Equation|Table|Figure|A\.|\d|arXiv")  # elsewhere the subject stands
YES = {True: "yes", False: "no"}


def page_of(folder: Path, name: str) -> str:
    return (folder / f"{name}.md").read_text(encoding="utf-8")


def table(text: str, header: str) -> dict[str, list[str]]:
    """{first cell: the other cells} of the table with that header line."""
    lines = text.split(header + "\n", 1)[1].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {row[0]: row[1:] for row in rows}


def fenced(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_each_estimator_and_each_claim_has_its_page_and_no_other() -> None:
    assert {path.stem for path in ESTIMATORS.glob("*.md")} == {*DECLARATIONS, "README"}
    assert {path.stem for path in CLAIMS.glob("*.md")} == {*CLAIM_IDS, "README"}


def test_the_tables_list_every_page() -> None:
    listed = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\)", page_of(ESTIMATORS, "README"), flags=re.MULTILINE)
    assert listed == [(name, name) for name in DECLARATIONS]
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", page_of(CLAIMS, "README"), flags=re.MULTILINE)
    assert listed == [(claim, claim) for claim in CLAIM_IDS]


def declared_rows(one: Declaration) -> dict[str, str]:
    scale = "none to set" if one.ddof is None else f"ddof = {one.ddof}, eps = {one.eps:.0e}".replace("e-0", "e-")
    scaled = "neither A(r) nor a A(r)" if one.unit_rewards else "a A(r)"
    range_of = {"takes rewards": "from 0 to 1"} if one.unit_rewards else {}
    return range_of | {
        "the advantages of a group sum to 0": YES[one.zero_sum_group],
        "those of a step sum to 0": YES[one.zero_sum_step],
        "a group of equal rewards has advantages of exactly 0": YES[one.zero_when_equal],
        "A(r + b) = A(r), one b for the step": YES[one.shift_invariant],
        "A(a r) for a > 0": "A(r), exactly where eps = 0" if one.scale_invariant else scaled,
        "depends on the step's other groups": YES[one.batch_dependent],
        "needs the completions' lengths": YES[one.needs_lengths],
        "least rollouts: of a group, of a step": f"{one.least_R}, {max(one.least_R, one.least_N)}",
        "defaults": scale,
    }


@every_estimator
def test_an_estimators_page_says_what_is_declared(name: str) -> None:
    one, text = DECLARATIONS[name], page_of(ESTIMATORS, name)
    rows = {key: cells[0] for key, cells in table(text, "| property | |").items()}
    factor = rows.pop("E[sum_i A_i psi_i / R]")
    assert rows == declared_rows(one)
    if one.factor is None:
        assert factor.startswith("none")
    else:
        sizes = [(2, 1), (4, 3), (8, 2)]
        assert [one.factor(*size) for size in sizes] == pytest.approx([FACTORS[factor](*size) for size in sizes])
    assert all(part in text for part in one.source.split("; "))
    assert f"`{one.function.__module__}.{name}`" in text and f"`conf/estimator/{name}.yaml`" in text
    rows_of = table(page_of(ESTIMATORS, "README"), "| estimator | advantage A_i | factor | in one line |")
    short = {"grad J": "1", "(R - 1)/R grad J": "(R - 1)/R", "(N - 1)/N grad J, N = G R": "(N - 1)/N"}
    assert rows_of[f"[`{name}`]({name}.md)"][1] == short.get(factor, "none")


def test_the_weights_of_std_scaling_are_those_computed() -> None:
    rates = (0.01, 0.1, 0.25, 0.5)
    rows = table(page_of(ESTIMATORS, "grpo_std"), "| R | " + " | ".join(f"c({p:g})" for p in rates) + " |")
    assert rows == {str(R): [f"{weight_on(grpo_std, p, R):.3f}" for p in rates] for R in (2, 4, 8, 16)}


def test_no_sentence_counts_the_claims() -> None:
    """A range of their names would be false after the next claim."""
    files = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "grpo_sweeps").rglob("*.py")]
    counted = re.compile(r"\bC1\s*(?:to|-|–|\.\.+)\s*C\d+\b")
    assert not [path.relative_to(ROOT) for path in files if counted.search(path.read_text(encoding="utf-8"))]


def test_the_verdicts_are_those_of_the_theory_report() -> None:
    options = TheoryOptions(policies=1, prompts=2, draws=1000)
    rows = table(page_of(CLAIMS, "README"), "| claim | where | about | on an exact policy | seen in |")
    claims = judge(options, enumerate_all(options), credit.multi_turn(range(6)))
    assert [claim.id for claim in claims] == CLAIM_IDS
    assert rules.BY_THEORY.items() <= {claim.id: claim.judgement for claim in claims}.items()
    for claim in claims:
        where, about, verdict, _ = rows[f"[{claim.id}]({claim.id}.md)"]
        statement = STATEMENTS[claim.id]
        place = statement.place if PLACE.match(statement.place) else "–"
        assert (where, about, verdict) == (place, statement.title, claim.judgement)
        assert (claim.where, claim.says) == (statement.place, statement.words)
        text = page_of(CLAIMS, claim.id)
        assert text.startswith(f"# {claim.id}: {about}\n")
        assert f"**{claim.judgement}**" in text.splitlines()[2] and place.strip("–") in text.splitlines()[2]


def test_what_the_readme_says_of_smollm2_is_in_the_committed_table() -> None:
    found = re.search(
        r"within (\S+) of orthogonal scores with the measured norms, while 4k\(R-k\)/R is missed by up to "
        r"(\S+) in cells of (\d+) groups or more",
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )
    assert found is not None
    by_k = pd.read_csv(ROOT / "reports" / "smollm2_gsm8k" / "by_k.csv")
    by_k = by_k[by_k["groups"] > 0]
    off = (by_k["effective_rank"] - by_k["null_both"]).abs().max()
    assert float(found[1]) - 0.001 < off <= float(found[1])
    large = by_k[by_k["groups"] >= int(found[3])]
    assert f"{(large['effective_rank'] - large['null_closed_form']).abs().max():.2f}" == found[2]


def test_the_readme_leads_with_the_committed_table_of_qwen() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index("<!-- qwen:begin -->") : readme.index("<!-- qwen:end -->")].splitlines()[1:]
    report = ROOT / "reports" / "qwen_gsm8k"
    assert shown == (report / "table1.md").read_text(encoding="utf-8").splitlines()[: len(shown)] and len(shown) == 5
    nulls = pd.read_csv(report / "table1.csv")["null_both"]
    assert "give {:.2f},\n{:.2f} and {:.2f}".format(*nulls) in readme
    below = -pd.read_csv(report / "table1.csv")["measured_minus_null_both"]
    assert "lie {:.3f}, {:.3f} and {:.3f} below".format(*below) in readme
    figure = (ROOT / "docs" / "figures" / "qwen_gsm8k_fig4.png").read_bytes()
    assert figure == (report / "fig4.png").read_bytes()


def test_hoeffdings_table_is_the_one_computed() -> None:
    rows = table(page_of(CLAIMS, "C12"), "| R | eps = 0.3 | 0.2 | 0.1 |")
    assert rows == {str(R): [f"{hoeffding(R, eps):.2f}" for eps in HOEFFDING_EPS] for R in HOEFFDING_R}


def resolve(dotted: str) -> Any:
    """A module, or what a module holds under the rest of the path; raises if there is no such thing."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def test_a_name_that_is_not_there_is_found_out() -> None:
    assert callable(resolve("grpo_sweeps.science.budget.Budget.found_R"))
    for missing in ("grpo_sweeps.sience", "grpo_sweeps.science.budget.bugdet", "grpo_sweeps.spectra.x.y"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(missing)


@every_page
def test_dotted_names_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`(grpo_sweeps(?:\.\w+)+)`", text) + re.findall(r"-m (grpo_sweeps\.\w+)", text)
    for name in names:
        if not name.endswith((".py", ".cu")):
            resolve(name)
    for path in re.findall(rf"`({FOLDERS}[\w./-]*)`", text):
        # The worked example's file and a machine's own values are the reader's to write.
        theirs = (page.parent == ESTIMATORS and "loo_median" in path) or path.startswith("conf/local")
        if not theirs:
            assert (ROOT / path).exists(), path


@every_page
def test_links_between_pages_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


def commands() -> list[tuple[str, str]]:
    found = []
    for name in sorted(path.stem for path in ESTIMATORS.glob("*.md") if path.stem != "README"):
        for block in fenced(page_of(ESTIMATORS, name)):
            lines = [line for line in block.splitlines() if line.startswith("python -m grpo_sweeps.run ")]
            found += [(name, line) for line in lines]
    return found


@pytest.mark.parametrize(("name", "command"), commands())
def test_commands_of_the_estimators_compose(name: str, command: str) -> None:
    words = [word.split(",")[0] for word in shlex.split(command)[3:] if word != "-m"]
    config = run_config(*words)
    check(config)
    check_functions(config)
    assert config.estimator.target.endswith(f".{name}")


def test_the_worked_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = page_of(ESTIMATORS, "README")
    source, use = fenced(text, "python")
    module = types.ModuleType("my_module")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_module", module)
    exec(use, {})
    assert capsys.readouterr().out == "[1.0, 1.0, 1.0]\n"
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    golden = re.search(r'"loo_median": \((\[.*?\]), (\[.*?\])\)', text)
    assert golden and module.my_estimator(rewards).tolist() == [eval(row) for row in golden.groups()]
    said = re.search(r"One file, (\d+) lines", text)
    assert said and int(said[1]) == len(source.splitlines())


def test_the_table_of_prompts_is_the_one_computed() -> None:
    text = (DOCS / "power.md").read_text(encoding="utf-8")
    rows = table(text, "| spread s | half-width 0.2 | 0.1 | 0.05 | 0.025 |")
    needed = {spread: [f"{units_needed(float(spread), h):.0f}" for h in (0.2, 0.1, 0.05, 0.025)] for spread in rows}
    assert rows == needed
