"""index.html: the whole report on one page, its tables as text, and the sample completions that it shows."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from grpo_sweeps.paper import ARXIV
from grpo_sweeps.publish.drawing import Plot
from grpo_sweeps.publish.formats import number, with_interval
from grpo_sweeps.publish.page import Section, from_template, inlined, visible_text
from grpo_sweeps.redaction import redact, without_places
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.verdicts import DEFINED, Claim
from grpo_sweeps.report.figures import by_k, by_step, layers
from grpo_sweeps.report.measure.spectral import BELOW, MATRICES, QUANTITIES
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.layers import shown_steps
from grpo_sweeps.report.tables.pooled import GAIN, evaluation_in_words, headline, unjudged_arms
from grpo_sweeps.text import count
from grpo_sweeps.tracking.published import is_published

CUT = 900  # characters of a completion or prompt that are shown
NUMBERED = 5  # figures with a number of their own
OF_TRAINING = (by_step.NAME, by_step.NOISE)  # figures that come first and have no number
DATA_OF = {  # behind a figure
    "fig5": "layers.csv", "updates": "update_layers.csv", "best_size": "best_size.csv", "pool": "pool.csv",
    **dict.fromkeys(OF_TRAINING, "curves.csv"),
}  # fmt: skip
K_NULLS = {
    "null_closed_form": "null: orthogonal, equal norm",
    "null_measured_norms": "null: orthogonal, measured norms",
    "null_both": "null: orthogonal, measured norms, equal texts once",
    "null_gaussian": "null: Gaussian, own spectrum",
}
TERMS = (
    "A group is the R rollouts of one prompt; it is mixed when its rewards differ, k of them are right (reward 1), and "
    "sigma_r is the standard deviation of its rewards. A score is the gradient of a rollout's log-probability. An arm "
    "is the runs that are alike but for R and seed. A null is the value that gradients without structure would give. "
    f"C1, C2 and so on are the claims of arXiv {ARXIV}."
)
"""What the page says before it uses these words."""
TONES = {rules.HOLDS: ("yes", "✓"), rules.CONTRADICTED: ("no", "✗"), rules.UNDECIDED: ("open", "?")}
TONES |= dict.fromkeys((rules.CORRECTED, rules.WITHIN), ("yes", "≈"))
SHOWN = ("open", "–")
"""Of every other verdict: what was measured is shown, and neither for nor against the claim."""


def render_page(
    sweep: Sweep,
    tables: Mapping[str, pd.DataFrame],
    claims: Sequence[Claim],
    plots: Sequence[Plot],
    images: Mapping[str, bytes],
    missing: Sequence[str],
    sections: Sequence[Section] = (),
    wrong: Sequence[str] = (),
    weights: str = "",
) -> str:
    """The page as one string.

    images: each panel's SVG by name, `fig1_1.svg`. sections: they follow the claims. wrong: it comes first of all.
    weights: where the model's weights came from, for the caption of each table.
    """
    training = [p for p in plots if p.name in OF_TRAINING]
    plots = [p for p in plots if p not in training]
    kept = samples(sweep)
    return from_template(
        "grpo_sweeps.report",
        "page.html.j2",
        arxiv=ARXIV,
        sweep=sweep.name,
        subtitle=_subtitle(sweep),
        terms=TERMS,
        arms=sweep.runs["arm"].nunique(),
        claims=[_claim(c) for c in claims],
        cards=_cards(claims),
        tone=lambda verdict: TONES.get(verdict, SHOWN)[0],
        sign=lambda verdict: TONES.get(verdict, SHOWN)[1],
        undecided=rules.UNDECIDED,
        open=open_claims(claims),
        for_theory=[c for c in claims if not c.findings and c.id in rules.BY_THEORY],
        rules=rules.IN_WORDS,
        definitions=DEFINED,
        headline=headline(tables["table1"], unjudged_arms(sweep)),
        evaluation=f"{evaluation_in_words(sweep)} {GAIN}",
        precision=_precision(tables["table1"]),
        by_k=_by_k(tables["by_k"]),
        below=BELOW,
        by_k_of_all=_by_k_of_all(tables["by_k"]),
        ranks=_ranks(tables["ranks"]),
        training=[_figure(p, images, None) for p in training],
        plots=[_figure(p, images, n) for p, n in zip(plots, numbers(plots), strict=True)],
        updates=shown_steps(tables["updates"]) if "updates" in tables else None,
        sections=sections,
        not_drawn=_not_drawn(plots),
        completions=_completions(kept),
        silent_samples=silent_cells(kept),
        cut=CUT,
        missing=missing,
        wrong=wrong,
        weights=weights,
        commands=_commands(sweep),
        commit_words=_commit_words(sweep),
    )


def _figure(plot: Plot, images: Mapping[str, bytes], number: int | None) -> dict[str, Any]:
    """A figure for the page, with its number and the table behind it."""
    return inlined(plot, images) | {"csv": DATA_OF.get(plot.name, ""), "number": number}


def _not_drawn(plots: Sequence[Plot]) -> str:
    """Which of the numbered figures are not there, and why."""
    why = {"fig3": by_step.NOT_DRAWN, "fig4": by_k.NOT_DRAWN, "fig5": layers.NOT_DRAWN}
    names = {plot.name for plot in plots}
    return " ".join(sentence for name, sentence in why.items() if name not in names)


def numbers(plots: Sequence[Plot]) -> list[int]:
    """Figures 1 to 5 keep their numbers where one of them is not drawn; the others follow."""
    own = [int(p.name.removeprefix("fig")) if re.fullmatch(r"fig\d+", p.name) else 0 for p in plots]
    following = itertools.count(max([NUMBERED, *own]) + 1)
    return [n or next(following) for n in own]


def _subtitle(sweep: Sweep) -> str:
    runs = sweep.runs
    parts = [
        f"{count(len(runs))}, {int((runs['state'] == 'finished').sum())} finished",
        f"model {_names(runs['model'])}", f"task {_names(runs['task'])}", f"reward {_names(runs['reward'])}",
        f"estimator {_names(runs['estimator'])}", f"R = {', '.join(str(r) for r in sorted(runs['R'].unique()))}",
        count(runs["seed"].nunique(), "seed"),
    ]  # fmt: skip
    parts += [f"chosen by where={sweep.where}"] if sweep.where else []
    return " · ".join(parts)


def _names(column: pd.Series) -> str:
    return ", ".join(sorted({str(v).removeprefix("grpo_sweeps.") for v in column.dropna()})) or "not recorded"


def _claim(claim: Claim) -> dict[str, Any]:
    rows = [[str(f.R), str(f.groups), f.paper, f.measured, f.null, f.verdict] for f in claim.findings]
    return {
        "id": claim.id, "arm": claim.arm, "paper": claim.paper, "verdict": claim.verdict, "rows": rows,
        "remarks": claim.remarks, "lead": claim.lead, "header": claim.header,
    }  # fmt: skip


def _cards(claims: Sequence[Claim]) -> list[list[Claim]]:
    """One card per claim that has findings: its arms together."""
    cards: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.findings:
            cards.setdefault(claim.id, []).append(claim)
    return list(cards.values())


def open_claims(claims: Sequence[Claim]) -> list[str]:
    """The claims that these records leave open without a finding, each once, however many arms it has."""
    return list(dict.fromkeys(c.id for c in claims if not c.findings and c.verdict == rules.UNDECIDED))


def _words(quantity: str) -> str:
    return quantity.replace("_", " ").replace("top1", "top-1")


def _by_k(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The rows of G by k: every quantity with its interval, and the nulls of the effective rank beside it."""
    nulls = {
        "null_closed_form": "null 4k(R−k)/R",
        "null_distinct": "null: equal texts once",
        "null_measured_norms": "null: measured norms",
        "null_both": "null: norms and texts",
        "null_gaussian": "null: Gaussian",
    }
    others = [name for name in QUANTITIES if name != "effective_rank"]
    header = ["R", "k", "groups", "effective rank", *nulls.values(), *map(_words, others)]
    arms = len(table) > 0 and table["arm"].nunique() > 1
    rows = []
    for row in table.to_dict("records"):
        if not row["groups"]:
            continue
        rank, *rest = (with_interval(row[n], row[f"{n}_low"], row[f"{n}_high"]) for n in ("effective_rank", *others))
        cells = [str(row["R"]), str(row["k"]), str(row["groups"]), rank, *(number(row[n]) for n in nulls), *rest]
        rows.append([str(row["arm"]), *cells] if arms else cells)
    return (["arm", *header] if arms else header), rows


def _by_k_of_all(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """One row per arm, R, k and matrix, and for G one per null: means alone."""
    header = ["R", "k", "matrix", *map(_words, QUANTITIES)]
    arms = len(table) > 0 and table["arm"].nunique() > 1
    rows = []
    for row in table.to_dict("records"):
        if not row["groups"]:
            continue
        start = [*([str(row["arm"])] if arms else []), str(row["R"]), str(row["k"])]
        for prefix, matrix in MATRICES.items():
            rows.append([*start, matrix, *(number(float(row[prefix + name])) for name in QUANTITIES)])
        for null, words in K_NULLS.items():
            names = (null if name == "effective_rank" else f"{null}_{name}" for name in QUANTITIES)
            rows.append([*start, words, *(number(float(row[name])) for name in names)])
    return (["arm", *header] if arms else header), rows


def _precision(table: pd.DataFrame) -> str:
    """How far K's own precision leaves the mean effective ranks open, for the line below Table 1."""
    ends = table[["effective_rank_floor_low", "effective_rank_floor_high"]].dropna()
    if not len(ends):
        return ""
    width = (ends["effective_rank_floor_high"] - ends["effective_rank_floor_low"]).max() / 2
    return f"How exactly K is the Gram of the applied gradients leaves a mean effective rank open by ±{width:.1g}."


def _ranks(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """One row per arm, R and matrix, one column per quantity."""
    quantities = list(dict.fromkeys(table["quantity"]))
    arms = table["arm"].nunique() > 1
    rows = []
    for (arm, R, matrix), part in table.groupby(["arm", "R", "matrix"], sort=False):
        values = {r["quantity"]: with_interval(r["mean"], r["low"], r["high"]) for r in part.to_dict("records")}
        start = [str(arm), str(R)] if arms else [str(R)]
        rows.append([*start, str(matrix), *(values[q] for q in quantities)])
    start = ["arm", "R", "matrix"] if arms else ["R", "matrix"]
    return [*start, *(q.replace("_", " ") for q in quantities)], rows


def samples(sweep: Sweep) -> list[dict[str, Any]]:
    """Two completions of one kept group for each arm and R, the best and the worst rewarded (right before wrong at
    equal reward): a row of `completions` each, with `taught`.

    The group is the latest with different rewards and an advantage that is not 0; without such a one the latest with
    such an advantage, else the latest of all, which taught nothing: `taught` is False. `judged`: its task has verdicts.
    """
    if not len(sweep.completions):
        return []
    shown: list[dict[str, Any]] = []
    judged = set(sweep.runs.loc[sweep.runs["verdict"] != "none", "run"])
    for _, cell in sweep.completions.groupby(["arm", "R"], sort=False):
        ordered, taught = best_group(cell)
        chosen = pd.concat([ordered.head(1), ordered.iloc[1:].tail(1)])
        shown += [
            {str(k): v for k, v in row.items()} | {"taught": taught, "judged": row["run"] in judged}
            for row in chosen.to_dict("records")
        ]
    return shown


def best_group(cell: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
    """The rows of the group of `samples`, best first, and did it teach something?

    Of several groups that are as late it is that of the least seed.
    """
    numbers = cell.assign(taught=cell["advantage"].astype(float) != 0, reward=cell["reward"].astype(float))
    by_group = numbers.groupby(["run", "step", "group", "prompt_id"], sort=False)
    worth = by_group.agg(taught=("taught", "any"), least=("reward", "min"), most=("reward", "max"),
                         step=("step", "first"), seed=("seed", "first")).reset_index(drop=True)  # fmt: skip
    order = worth.assign(differ=worth["most"] > worth["least"], seed=-worth["seed"]).sort_values(
        ["taught", "differ", "step", "seed"], ascending=False, kind="stable"
    )
    first = int(order.index[0])
    rows = cell[(by_group.ngroup() == first).to_numpy()]
    ordered = rows.sort_values(["reward", "strict"], kind="stable", ascending=False)
    return ordered, bool(worth["taught"].iloc[first])


def silent_cells(shown: list[dict[str, Any]]) -> str:
    """The arms and R whose sample taught nothing, in words; empty where each taught something."""
    arms = len({row["arm"] for row in shown}) > 1
    cells = {f"{row['arm']}, R = {row['R']}" if arms else f"R = {row['R']}": None for row in shown if not row["taught"]}
    return "; ".join(cells)


def _completions(shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `samples` as texts that can be shown."""
    texts = ("prompt", "text", "prompt_id")
    numbers = {key: lambda value: f"{value:.3g}" for key in ("reward", "advantage")}
    return [
        dict(row) | {key: visible_text(str(row[key]), CUT) for key in texts}
        | {key: shape(row[key]) for key, shape in numbers.items()}
        for row in shown
    ]  # fmt: skip


def _commands(sweep: Sweep) -> list[str]:
    made = list(dict.fromkeys(redact(str(c)) for c in sweep.runs["command"].dropna() if c))
    again = f"python -m grpo_sweeps.report {shlex.join(sweep.words.split(' '))}"
    if not is_published(sweep.path):
        return [*made, again]
    runs_dir = without_places(sweep.path.parent.as_posix())
    return [*made, f"{again} runs_dir={shlex.quote(runs_dir)}"]


def _commit_words(sweep: Sweep) -> str:
    commits = sorted({str(c) for c in sweep.runs["commit"].dropna()})
    if not commits:
        return "The records do not say which commit made the runs."
    return f"Check out commit {', '.join(commits)}, then run:"
