"""The per-layer picture: names, effective rank and shares of parts against plain sums, figure 5, what it lacks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.premise import ALIKE, NOT_ALIKE, premise_section
from grpo_sweeps.report.figures.layers import layer_figure
from grpo_sweeps.report.measure.parts import KINDS, TIED, kind_of, layer_of, parts_of, run_parts
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.report.tables.layers import COLUMNS, layer_table
from grpo_sweeps.types import GroupRecord

NAMES = (
    "model.embed_tokens.weight", *(f"model.layers.{i}.{m}.weight" for i in (0, 1, 2, 10) for m in
                                   ("self_attn.q_proj", "mlp.down_proj", "input_layernorm")),
    "model.norm.weight",
)  # fmt: skip
R = 4


def split(group: GroupRecord, names=NAMES, ranks: dict[str, int] | None = None) -> GroupRecord:
    """The group with made-up scores for each name; `ranks` bounds the rank of a part's rows."""
    if group.gram is None:
        return group
    rng = np.random.default_rng([group.step, group.group])
    parts = {}
    for name in names:
        basis = rng.standard_normal(((ranks or {}).get(name, 12), 12))
        rows = rng.standard_normal((group.R, len(basis))) @ basis
        parts[name] = rows @ rows.T
    return dataclasses.replace(group, gram=sum(parts.values()), gram_by=parts)


def by_layer(group: GroupRecord) -> GroupRecord:
    """What analysis.by=layer keeps of the same group."""
    sums: dict[str, np.ndarray] = {}
    for name, gram in split(group).gram_by.items():
        number = [i for i, c in enumerate(name.split(".")) if c.isdigit()]
        layer = ".".join(name.split(".")[: number[0] + 1]) if number else name.removesuffix(".weight")
        sums[layer] = sums.get(layer, 0) + gram
    return dataclasses.replace(group, gram=sum(sums.values()), gram_by=sums) if sums else group


def plain(record: GroupRecord, gram: np.ndarray) -> tuple[float, ...]:
    """Effective rank, energy share, norm share, correlation and cosine of one part, from the definitions."""
    w = np.array(record.weights)
    part, whole = np.outer(w, w) * gram, np.outer(w, w) * record.gram
    s = np.sqrt(np.linalg.eigvalsh(part).clip(0))
    text = record.same_as or range(record.R)
    pairs = [(i, j) for i in range(record.R) for j in range(i) if text[i] != text[j]]
    x, y = ([K[i, j] for i, j in pairs] for K in (gram, record.gram))
    u, v = (np.linalg.svd(K)[0][:, 0] for K in (gram, record.gram))
    correlation = np.corrcoef(x, y)[0, 1] if len(pairs) > 2 else np.nan
    energy, norm = np.trace(part) / np.trace(whole), part.sum() / whole.sum()
    return s.sum() ** 2 / (s**2).sum(), energy, norm, correlation, abs(u @ v)


@pytest.fixture(scope="module")
def runs(write, tmp_path_factory):
    """runs/ with two seeds that kept Grams by parameter. To be read only."""
    folder = tmp_path_factory.mktemp("layers")
    for seed in (0, 1):
        write(folder, "parts", R, seed, steps=3, change=split, config={"analysis.by": "parameter"})
    return folder


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.embed_tokens.weight", "embedding", "embedding"),
        ("model.layers.3.self_attn.q_proj.weight", "3", "q"),
        ("model.layers.3.self_attn.k_proj.bias", "3", "biases"),
        ("model.layers.3.self_attn.q_norm.weight", "3", "norms"),
        ("model.layers.3.self_attn.o_proj.weight", "3", "o"),
        ("model.layers.12.mlp.gate_proj.weight", "12", "gate"),
        ("model.layers.12.mlp.experts.5.up_proj.weight", "12", "up"),
        ("model.layers.12.block_sparse_moe.gate.weight", "12", "router"),
        ("model.norm.weight", "norm", "norms"),
        ("lm_head.weight", "head", "head"),
        ("lm_head.bias", "head", "biases"),
        ("transformer.wte.weight", "embedding", "embedding"),
        ("transformer.wpe.weight", "embedding", "positions"),
        ("transformer.h.0.ln_1.bias", "0", "norms"),
        ("transformer.h.0.attn.c_attn.weight", "0", "qkv"),
        ("transformer.h.0.attn.c_proj.weight", "0", "o"),
        ("transformer.h.0.mlp.c_fc.weight", "0", "up"),
        ("transformer.h.0.mlp.c_proj.weight", "0", "down"),
        ("transformer.ln_f.weight", "norm", "norms"),
        ("transformer.word_embeddings_layernorm.weight", "embedding", "norms"),
        ("gpt_neox.layers.5.attention.dense.weight", "5", "o"),
        ("gpt_neox.layers.5.mlp.dense_4h_to_h.weight", "5", "down"),
        ("embed_out.weight", "head", "head"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.default.weight", "7", "q A"),
        ("base_model.model.model.layers.7.mlp.down_proj.lora_B.weight", "7", "down B"),
        ("base_model.model.model.embed_tokens.lora_embedding_A.default", "embedding", "embedding A"),
        ("something.new", "other", "other"),
        ("weight", "other", "other"),
        ("bias", "other", "biases"),
        ("", "other", "other"),
        ("a..3.²", "3", "other"),
    ],
)  # fmt: skip
def test_names_of_many_models(name, layer, kind):
    assert (layer_of(name), kind_of(name)) == (layer, kind) and kind.split()[0] in KINDS


def test_an_embedding_without_a_head_is_both():
    tied = parts_of(["model.embed_tokens.weight", "transformer.wpe.weight", "model.norm.weight"])
    assert [(p.layer, p.kind) for p in tied] == [(TIED, TIED), (TIED, "positions"), ("norm", "norms")]
    own = parts_of(["model.embed_tokens.weight", "lm_head.weight"])
    assert [(p.layer, p.kind) for p in own] == [("embedding", "embedding"), ("head", "head")]


def test_every_part_against_the_definitions(runs):
    sweep = load_sweep("parts", runs)
    table = layer_table(sweep)
    assert list(table.columns) == COLUMNS
    used = [r for r in sweep.records if r.mixed]
    for row in table.to_dict("records"):
        chosen = [p.name for p in parts_of(NAMES) if row["name"] in ("", p.name)
                  and row["layer"] in ("all", p.layer) and row["kind"] in ("all", p.kind)]  # fmt: skip
        values = np.array([plain(r, sum(r.gram_by[n] for n in chosen)) for r in used])
        names = ("effective_rank", "energy_share", "norm_share", "correlation", "cosine")
        assert [row[name] for name in names] == pytest.approx(values.mean(axis=0))
        assert row["ci_low"] < row["effective_rank"] < row["ci_high"]
        assert row["groups"] == row["groups_with_rank"] == len(used) and row["seeds"] == 2
    shares = table.groupby("level")[["energy_share", "norm_share"]].sum().to_numpy()
    assert shares == pytest.approx(np.ones((4, 2)))
    whole = table[table["level"] == "whole"].iloc[0]
    assert whole["effective_rank"] == pytest.approx(sweep.groups.loc[sweep.groups["mixed"], "effective_rank"].mean())
    assert list(table[table["level"] == "layer"]["layer"]) == [TIED, "0", "1", "2", "10", "norm"]
    assert list(table[table["level"] == "kind"]["kind"]) == [TIED, "q", "down", "norms"]


def test_reading_without_the_grams_of_parts_gives_the_same_table(runs):
    kept, lean = load_sweep("parts", runs), load_sweep("parts", runs, keep_parts=False)
    pd.testing.assert_frame_equal(layer_table(kept), layer_table(lean))
    assert any(r.gram_by for r in kept.records) and not any(r.gram_by for r in lean.records)


def one_group(**changes) -> GroupRecord:
    values = {
        "step": 0, "prompt_id": "p", "R": R, "rewards": (1.0, 0.0, 0.0, 0.0), "advantages": (0.75,) + (-0.25,) * 3,
        "weights": (0.75,) + (-0.25,) * 3, "lengths": (3,) * R, "logprob_sums": (-1.0,) * R, "strict": (True,) * R,
        "flexible": (True,) * R, "gram": np.eye(R),
    }  # fmt: skip
    return GroupRecord(**(values | changes))


def test_a_part_of_rank_one_has_effective_rank_one():
    record = split(one_group(), ranks={"model.norm.weight": 1})
    (parts,) = run_parts("r", "parameter", [record])
    rank, energy, *_ = next(v for p, v in parts.values.items() if p.name == "model.norm.weight")
    assert rank == pytest.approx([1.0]) and 0 < energy[0] < 1


def test_groups_that_are_not_mixed_or_have_no_weight_are_left_out():
    flat, zero = one_group(rewards=(1.0,) * R, prompt_id="flat"), one_group(weights=(0.0,) * R, prompt_id="zero")
    bare = one_group(prompt_id="bare")
    records = [split(flat), split(zero), split(one_group()), bare, one_group(gram=None)]
    (parts,) = run_parts("r", "", records)
    assert parts.prompts == ("p",) and all(v.shape == (5, 1) for v in parts.values.values())
    assert run_parts("r", "", [split(zero), bare]) == []


def test_a_part_without_a_gradient_has_no_rank_and_rows_that_cancel_no_norm_share():
    zero, ones = np.zeros((R, R)), np.ones((R, R))
    (parts,) = run_parts("r", "", [one_group(gram=ones, gram_by={"a.weight": ones, "b.weight": zero})])
    value = {p.name: v[:, 0] for p, v in parts.values.items() if p.level == "parameter"}
    assert np.isnan(value["b.weight"][0]) and value["b.weight"][1] == 0.0
    assert value["a.weight"][:2] == pytest.approx([1.0, 1.0]) and np.isnan(value["a.weight"][2])


def test_likeness_leaves_equal_texts_out_and_is_unknown_without_three_pairs():
    record = split(dataclasses.replace(one_group(), same_as=(0, 1, 1, 3)))
    (parts,) = run_parts("r", "parameter", [record])
    for part, values in parts.values.items():
        if part.level == "parameter":
            assert values[3:, 0] == pytest.approx(plain(record, record.gram_by[part.name])[3:])
        elif part.level == "whole":
            assert values[3:, 0] == pytest.approx([1.0, 1.0])
    (parts,) = run_parts("r", "parameter", [split(dataclasses.replace(one_group(), same_as=(0, 1, 1, 1)))])
    assert all(np.isfinite(v[3, 0]) for v in parts.values.values()), "three pairs are left"
    (parts,) = run_parts("r", "parameter", [split(dataclasses.replace(one_group(), same_as=(0, 0, 0, 0)))])
    assert all(np.isnan(v[3, 0]) for v in parts.values.values())


def test_the_premise_is_judged_for_the_head_alone_and_every_layer_has_a_row(write, tmp_path):
    """Runs whose head holds nearly all of the gradient, and runs whose head is noise of its own."""

    def with_head(share):
        def change(group):
            made = split(group, names=("model.layers.0.q_proj.weight", "lm_head.weight"))
            if made.gram is None:
                return made
            scales = {"model.layers.0.q_proj.weight": 1.0 - share, "lm_head.weight": share}
            parts = {name: scales[name] * gram for name, gram in made.gram_by.items()}
            return dataclasses.replace(made, gram=sum(parts.values()), gram_by=parts)

        return change

    for name, share in (("most", 0.999), ("little", 0.01)):
        for seed in (0, 1):
            write(tmp_path, name, R, seed, steps=8, change=with_head(share), config={"analysis.by": "parameter"})
        (section,) = premise_section(layer_table(load_sweep(name, tmp_path)))
        verdicts = {row[1]: row[-1] for row in section.rows}
        assert verdicts == ({"0": NOT_ALIKE, "head": ALIKE} if name == "most" else {"0": ALIKE, "head": NOT_ALIKE})
        said = ALIKE if name == "most" else NOT_ALIKE
        assert section.after[0].startswith(f"R = {R}: the Gram of the head and the whole one: {said}. Correlation")
    assert premise_section(layer_table(load_sweep("most", tmp_path)).iloc[:0]) == []
    for seed in (0, 1):
        write(tmp_path, "none", R, seed, steps=2, change=by_layer, config={"analysis.by": "layer"})
    (section,) = premise_section(layer_table(load_sweep("none", tmp_path)))
    assert {row[-1] for row in section.rows} == {rules.UNDECIDED}, "few groups"


def test_rows_of_the_loss_are_taken_as_they_stand():
    record = split(one_group(rows="loss"))
    (parts,) = run_parts("r", "parameter", [record])
    expected = plain(dataclasses.replace(record, weights=(1.0,) * R), record.gram_by[NAMES[1]])
    assert next(v for p, v in parts.values.items() if p.name == NAMES[1])[:, 0] == pytest.approx(expected)


def test_by_layer_gives_the_same_layers_and_no_kinds(write, runs, tmp_path):
    for seed in (0, 1):
        write(tmp_path, "parts", R, seed, steps=3, change=by_layer)  # no analysis.by recorded: the names tell
    table, full = layer_table(load_sweep("parts", tmp_path)), layer_table(load_sweep("parts", runs))
    assert set(table["level"]) == {"whole", "layer"}
    kept = full[full["level"].isin(["whole", "layer"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(table.drop(columns="kind"), kept.drop(columns="kind"))
    (plot,) = layer_figure(load_sweep("parts", tmp_path), table)
    assert [p.title for p in plot.panels] == ["by depth"] * 2 and "one Gram a layer" in plot.caption


def test_mixed_sweeps_are_one_arm_and_say_what_lacks(write, tmp_path):
    write(tmp_path, "mix", R, 0, steps=2, change=split, config={"analysis.by": "parameter"})
    write(tmp_path, "mix", R, 1, steps=2, change=by_layer, config={"analysis.by": "layer"})
    write(tmp_path, "mix", 8, 0, steps=2, config={"analysis.by": "whole"})
    sweep = load_sweep("mix", tmp_path)
    assert sweep.cells == [("all", R), ("all", 8)]
    text = "\n".join(missing(sweep))
    assert "Figure 5 is without R=8 seed=0" in text and "shows R=4 seed=1 by depth only" in text
    table = layer_table(sweep)
    seeds = table.groupby("level")["seeds"].max()
    assert (seeds["layer"], seeds["kind"], seeds["parameter"]) == (2, 1, 1) and set(table["R"]) == {R}
    assert len(layer_figure(sweep, table)[0].panels) == 4


def test_models_of_different_depth_are_arms_with_panels_of_their_own(write, tmp_path):
    deep = (*(f"h.{i}.attn.c_attn.weight" for i in range(30)), "ln_f.weight", "lm_head.weight", "odd")
    write(tmp_path, "depth", R, 0, steps=2, change=split, config={"model.name": "small"})
    write(tmp_path, "depth", R, 0, steps=2, change=lambda g: split(g, deep), config={"model.name": "deep"})
    sweep = load_sweep("depth", tmp_path)
    table = layer_table(sweep)
    (plot,) = layer_figure(sweep, table)
    assert len(plot.panels) == 8 and plot.panels[0].title == "model=deep, by depth"
    assert "R = 4: most" in plot.panels[0].alt and " for model=deep" in plot.panels[0].alt
    files = render(plot)
    assert {f"fig5_{i}.svg" for i in range(1, 9)} | {"fig5.png", "fig5.pdf"} == set(files)
    assert (table[table["level"] == "layer"].groupby("arm").size() == [33, 6]).all()
