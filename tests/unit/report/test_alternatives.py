"""One Gram, many estimators: against gradient matrices row by row, exact variances, and the records of a sweep."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.estimators import DECLARATIONS, FROM_GRAM, grpo, rloo, score_norm
from grpo_sweeps.exact import SoftmaxPolicy, binary, enumerate_policy, group_moments, one_group_weights
from grpo_sweeps.report.measure import alternatives as measure
from grpo_sweeps.report.measure.alternatives import Alternative, StepGroups, advantages_of, alternatives, values_of
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables import estimators as table
from grpo_sweeps.report.tables.estimators import COLUMNS, estimator_markdown, estimator_section, estimator_table
from tests.unit.report.exact_runs import enumerations, write_exact

BY_NAME = {one.name: one for one in alternatives()}
every = pytest.mark.parametrize("one", alternatives(), ids=lambda one: one.name)


def made(R: int, steps: int = 5, G: int = 3, seed: int = 0, D: int = 9) -> tuple[StepGroups, np.ndarray]:
    """Groups of random scores (N, R, D), some of equal rewards, two rollouts of each group with one text."""
    rng = np.random.default_rng([R, seed])
    N = steps * G
    r = rng.integers(0, 3, size=(N, R)) / 2
    r[::4] = 0.5
    psi = rng.normal(size=(N, R, D)) * rng.gamma(2.0, size=(N, R, 1))
    lengths, same = rng.integers(1, 9, size=(N, R)).astype(float), np.tile(np.arange(R), (N, 1))
    if R > 2:
        psi[:, R - 1], r[:, R - 1], lengths[:, R - 1], same[:, R - 1] = psi[:, 0], r[:, 0], lengths[:, 0], 0
    usable = r.max(axis=1) > r.min(axis=1)
    K = np.where(usable[:, None, None], psi @ psi.swapaxes(1, 2), np.nan)
    step, prompt = np.repeat(np.arange(steps), G), np.array([f"p{i % 4}" for i in range(N)], dtype=object)
    return StepGroups(step, prompt, r, lengths, K, same, np.zeros(N), usable, np.zeros(N, bool)), psi


def advantages_by_hand(one: Alternative, groups: StepGroups, psi: np.ndarray, n: int) -> np.ndarray:
    """Of group n, from the function and its own step alone."""
    declared = one.declared
    if declared.needs_gram:
        return declared.function(groups.rewards_NR[n : n + 1], (psi[n] @ psi[n].T)[None])[0]
    step = np.flatnonzero(groups.step_N == groups.step_N[n])
    lengths = {"lengths_GR": groups.lengths_NR[step]} if declared.needs_lengths else {}
    return declared.function(groups.rewards_NR[step], **lengths)[step.tolist().index(n)]


@every
@pytest.mark.parametrize("R", [2, 3, 5])
def test_values_are_those_of_the_gradient_matrix(one: Alternative, R: int) -> None:
    groups, psi = made(R)
    found = values_of(one, groups)
    for n in range(len(psi)):
        if not groups.usable_N[n]:
            assert all(math.isnan(found[name][n]) for name in ("effective_rank", "gradient_norm", "cosine"))
            continue
        A, r = advantages_by_hand(one, groups, psi, n), groups.rewards_NR[n]
        w = A / R / (groups.lengths_NR[n] if one.by_length else 1.0)
        rows = w[:, None] * psi[n]
        s = np.linalg.svd(rows, compute_uv=False)
        g, mean = rows.sum(axis=0), ((r - r.mean()) / R) @ psi[n]
        assert found["effective_rank"][n] == pytest.approx(s.sum() ** 2 / (s**2).sum(), rel=1e-6)
        assert found["gradient_norm"][n] == pytest.approx(np.linalg.norm(g), rel=1e-9)
        assert found["cosine"][n] == pytest.approx(g @ mean / np.linalg.norm(g) / np.linalg.norm(mean), abs=1e-9)


def test_every_declared_estimator_has_a_row_or_is_named_in_one() -> None:
    rows = alternatives()
    named = {one.name for one in rows} | {name for one in rows for name in one.same}
    assert {*DECLARATIONS, *(one.name for one in FROM_GRAM), "CISPO", "GMPO"} <= named
    assert len({one.name for one in rows}) == len(rows)
    assert BY_NAME["grpo"].same == ("dr_grpo",) and BY_NAME["grpo_std"].same == ("dapo", "CISPO")
    assert "GMPO" in BY_NAME["grpo_std, 1/length"].same


def test_rows_that_cancel_have_no_cosine() -> None:
    groups, _ = made(3)
    ones = np.ones((len(groups.step_N), 3, 3))
    found = values_of(BY_NAME["grpo"], dataclasses.replace(groups, gram_NRR=ones))
    index = groups.usable_N
    assert np.isnan(found["cosine"]).all() and (found["gradient_norm"][index] < 1e-6).all()
    found = values_of(BY_NAME["grpo"], dataclasses.replace(groups, gram_NRR=np.zeros_like(ones)))
    assert np.isnan(found["effective_rank"]).all(), "scores that are zero have no spectrum"


def test_an_estimator_of_the_step_sees_groups_of_equal_rewards_too() -> None:
    groups, _ = made(4)
    found = advantages_of(DECLARATIONS["batch_mean"], groups)
    for step in range(5):
        r = groups.rewards_NR[groups.step_N == step]
        assert np.allclose(found[groups.step_N == step], r - r.mean())


@pytest.fixture(scope="module")
def drawn() -> tuple[object, StepGroups]:
    """40,000 groups of 4 from one prompt of an exact policy, in steps of 4; Grams of mixed ones."""
    e, R, N = enumerate_policy(SoftmaxPolicy(prompts=1, tokens=3, max_length=2, seed=3), 0, binary(2)), 4, 40_000
    rng = np.random.default_rng(0)
    rows = rng.choice(len(e.p_N), size=(N, R), p=e.p_N.numpy() / e.p_N.numpy().sum())
    r = e.rewards_N.numpy()[rows]
    usable = r.max(axis=1) > r.min(axis=1)
    K = np.where(usable[:, None, None], e.gram_NN.numpy()[rows[:, :, None], rows[:, None, :]], np.nan)
    same = np.argmax(rows[:, :, None] == rows[:, None, :], axis=2)
    step, prompt = np.repeat(np.arange(N // 4), 4), np.full(N, "p", dtype=object)
    return e, StepGroups(step, prompt, r, np.ones((N, R)), K, same, np.zeros(N), usable, np.zeros(N, bool))


def exact_variance(e, function, R: int) -> float:
    """tr Cov(g) over every tuple of R sequences."""
    p, r, psi = e.p_N.numpy(), e.rewards_N.numpy(), e.psi_ND.numpy()
    tuples = np.array(list(itertools.product(range(len(p)), repeat=R)))
    g = np.einsum(
        "nr,nrd->nd", function(r[tuples], e.gram_NN.numpy()[tuples[:, :, None], tuples[:, None]]), psi[tuples]
    )
    weight, g = p[tuples].prod(axis=1), g / R
    return float(weight @ (g**2).sum(axis=1) - ((weight @ g) ** 2).sum())


@pytest.mark.parametrize("name", ["grpo", "rloo", "score_norm"])
def test_the_variance_is_the_exact_one(name: str, drawn) -> None:
    e, groups = drawn
    functions = {"grpo": lambda r, K: grpo(r), "rloo": lambda r, K: rloo(r), "score_norm": score_norm}
    truth = exact_variance(e, functions[name], 4)
    if name != "score_norm":
        weights = one_group_weights(DECLARATIONS[name].function, "sum", 2)
        assert group_moments(e, weights, 4, by_length=False).variance == pytest.approx(truth)
    found = values_of(BY_NAME[name], groups)["variance"]
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - truth) < 4 * error and error < 0.03 * truth
    mixed = found[groups.usable_N].mean()
    assert abs(mixed - truth) > 10 * error, "over mixed groups alone it would be another number"


@every
def test_a_variance_is_given_where_it_can_be(one: Alternative, drawn) -> None:
    _, groups = drawn
    few = StepGroups(*(getattr(groups, f.name)[:400] for f in dataclasses.fields(StepGroups)))
    has = bool(np.isfinite(values_of(one, few)["variance"]).any())
    assert has == one.has_variance == (measure.why_no_variance(one, 4) == "")
    assert one.has_variance == (one.name in ("grpo", "rloo", "score_norm"))
    assert measure.why_no_variance(one, 3)
    assert (measure.why_no_factor(one) == "") == np.isfinite(measure.mean_factor(one, few))


def test_a_step_with_an_unmeasured_mixed_group_does_not_count_for_the_variance(drawn) -> None:
    _, groups = drawn
    few = StepGroups(*(getattr(groups, f.name)[:400].copy() for f in dataclasses.fields(StepGroups)))
    gone = int(np.flatnonzero(few.usable_N)[3])
    few.usable_N[gone], few.lacking_N[gone], few.gram_NRR[gone] = False, True, np.nan
    found = values_of(BY_NAME["rloo"], few)
    same_step = few.step_N == few.step_N[gone]
    assert np.array_equal(np.isnan(found["variance"]), same_step)
    assert np.isfinite(found["effective_rank"][same_step & few.usable_N]).all()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("runs")
    es = enumerations()
    for seed in (0, 1):
        write_exact(root, "one", es, 4, steps=12, G=4, estimator="rloo", seed=seed)
    write_exact(root, "one", es, 2, steps=12, G=4, estimator="rloo")
    write_exact(root, "one", es, 8, steps=3, G=4, estimator="rloo", measure=False)
    return load_sweep("one", root)


def test_the_table_is_the_mean_over_the_records(sweep) -> None:
    found = estimator_table(sweep)
    assert list(found.columns) == COLUMNS and set(found["R"]) == {2, 4}, "R = 8 has no Gram"
    row = found[(found["R"] == 4) & (found["estimator"] == "score_norm")].iloc[0]
    groups = sweep.groups[(sweep.groups["R"] == 4) & sweep.groups["mixed"]]
    norms, cosines, variances = [], [], []
    for i in groups.index:
        record = sweep.record(int(i))
        r, K = np.array(record.rewards), record.gram
        w, m = score_norm(r[None], K[None])[0] / 4, (r - r.mean()) / 4
        norms.append(math.sqrt(w @ K @ w))
        cosines.append(w @ K @ m / math.sqrt((w @ K @ w) * (m @ K @ m)))
        variances.append(w @ K @ w - sum(
            (r[a] - r[b]) * (r[c] - r[d]) * K[a, c] for a, b, c, d in itertools.permutations(range(4))
        ) / 24)  # fmt: skip
    every_group = len(sweep.groups[sweep.groups["R"] == 4])
    assert (row["groups"], row["variance_groups"], row["factor"]) == (len(groups), every_group, 1.0)
    assert row["gradient_norm"] == pytest.approx(np.mean(norms)) and row["cosine"] == pytest.approx(np.mean(cosines))
    assert row["variance"] == pytest.approx(np.sum(variances) / every_group)
    assert row["variance_low"] < row["variance"] < row["variance_high"]
    own = found[(found["R"] == 4) & found["trained_with"]]
    assert list(own["estimator"]) == ["rloo"]
    pooled = sweep.groups.loc[groups.index, "effective_rank"].mean()
    assert float(own["effective_rank"].iloc[0]) == pytest.approx(pooled), "Table 1's value"
    assert np.allclose(found.loc[found["estimator"] == "grpo", "factor"], [0.5, 0.75])
    step = found[(found["R"] == 4) & (found["estimator"] == "batch_mean")]
    assert float(step["factor"].iloc[0]) == pytest.approx(15 / 16)


@pytest.mark.parametrize(
    ("path", "aggregation", "rows"),
    [
        ("group.grpo_std", "sum", ["grpo_std"]),
        ("group.grpo_std", "length", ["grpo_std, 1/length"]),
        ("group.dapo", "token_mean", ["grpo_std"]),
        ("group.dr_grpo", "constant", ["grpo"]),
        ("group.grpo", "length", []),  # no row of the table
        ("my_module.grpo_like", "sum", []),
    ],
)
def test_the_rows_that_an_arm_was_trained_with(
    path: str, aggregation: str, rows: list[str], sweep, monkeypatch
) -> None:
    runs = sweep.runs.assign(estimator=f"grpo_sweeps.estimators.{path}", aggregation=aggregation)
    monkeypatch.setattr(sweep, "runs", runs)
    found = estimator_table(sweep)
    assert list(found.loc[found["trained_with"] & (found["R"] == 4), "estimator"]) == rows


def test_every_column_has_its_line_in_the_docs() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "one_gram.md").read_text(encoding="utf-8")
    assert all(f"`{name.removesuffix('_low').removesuffix('_high')}`" in text for name in COLUMNS)


def test_the_section_says_why_a_cell_is_empty(sweep) -> None:
    found = estimator_table(sweep)
    (section,) = estimator_section(found)
    assert len(section.rows) == len(found) == 2 * (len(alternatives()) + 1)
    assert all(len(row) == len(section.header) for row in section.rows)
    by_name = {row[1]: row for row in section.rows if row[0] == "4"}
    letters = dict(part.split(": ", 1) for part in section.after[0].rstrip(".").split(". "))
    assert letters[by_name["grpo_std: group mean over std"][6].split()[-1]] == "no factor holds for every reward"
    assert "prefix" in letters[by_name["OTB (arXiv 2602.07078)"][5].split()[-1]]
    assert by_name["rloo: leave-one-out (trained with)"][6] == "1.000"
    assert "–" not in by_name["score_norm: leave-one-out by score norm"][5]
    assert {"grpo: group mean, no std", "grpo_std, 1/length: group mean over std"} <= set(by_name), "which grpo it is"
    assert "| R | estimator |" in estimator_markdown(found) and "CISPO" in estimator_markdown(found)
    assert estimator_section(found.iloc[:0]) == []


def test_a_run_whose_record_is_damaged_meanwhile_is_left_out_and_named(tmp_path) -> None:
    for seed in (0, 1):
        run = write_exact(tmp_path, "two", enumerations(), 4, steps=4, G=4, seed=seed)
    sweep = load_sweep("two", tmp_path)
    whole = estimator_table(sweep)["groups"].iloc[0]
    (run / "grams" / "journal.jsonl").write_text('{"step": 0}\n', encoding="utf-8")
    assert 0 < estimator_table(sweep)["groups"].iloc[0] < whole
    assert any(note.startswith("The table of estimators is without run") for note in sweep.notes)


def test_rewards_that_an_estimator_refuses_and_groups_that_were_chosen(sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.step_groups

    def doubled(*args) -> StepGroups:
        found = real(*args)
        return dataclasses.replace(found, rewards_NR=2 * found.rewards_NR)

    for run, config in sweep.configs.items():
        monkeypatch.setitem(sweep.configs, run, config | {"objective": {"resample": True}})
    monkeypatch.setattr(measure, "step_groups", doubled)
    found = estimator_table(sweep).set_index(["R", "estimator"])
    refused = found.loc[(4, "bnpo")]
    assert pd.isna(refused["effective_rank"]) and refused["no_variance"] == table.UNSUITED
    assert found.loc[(4, "rloo"), "no_variance"] == table.CHOSEN and pd.isna(found.loc[(4, "rloo"), "variance"])
    assert np.isfinite(found.loc[(4, "rloo"), "effective_rank"])
