"""query and arms: what load_sweep returns, which sweep is the newest, what varies."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from omegaconf import OmegaConf

from grpo_sweeps.config import IRRELEVANT
from grpo_sweeps.report.read.arms import LONGEST, find_arms, readable
from grpo_sweeps.report.read.query import ReportError, find_sweep, load_sweep
from grpo_sweeps.spectra import summary
from grpo_sweeps.tracking.local import read_groups
from hydra_plugins.grpo_launcher.registration import composed


def test_frames_agree_with_the_records(full_sweep):
    sweep = load_sweep("full", full_sweep)
    assert len(sweep.runs) == 9 and set(sweep.runs["state"]) == {"finished"} and not sweep.notes
    assert len(sweep.groups) == 9 * 40 and sweep.cells == [("all", 2), ("all", 4), ("all", 8)]
    for frame in (sweep.metrics, sweep.evals, sweep.completions):
        assert set(frame["run"]) == set(sweep.runs["run"])
    for label, row in sweep.groups.iloc[::37].iterrows():
        record = sweep.record(label)
        assert (record.step, record.prompt_id, record.R, record.mixed) == (row.step, row.prompt_id, row.R, row.mixed)
        if record.gram is None:
            assert np.isnan(row.effective_rank)
            continue
        assert np.array_equal(sweep.gram(label), record.gram)
        expected = summary(record.gram, record.weights, record.floor)
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        alone = summary(record.gram, None, record.floor)
        assert row.scores_effective_rank == pytest.approx(alone["effective_rank"])
        assert row.k == sum(record.rewards)


def test_groups_of_one_run_come_in_the_order_of_the_record(paper_sweep):
    sweep = load_sweep(None, paper_sweep)
    path = sweep.runs["path"].iloc[1]
    labels = sweep.groups.index[sweep.groups["run"] == sweep.runs["run"].iloc[1]]
    for label, record in zip(labels, read_groups(path), strict=True):
        assert sweep.record(label).rewards == record.rewards and sweep.groups.at[label, "prompt_id"] == record.prompt_id


def test_a_group_without_a_gram_has_none(paper_sweep):
    sweep = load_sweep("paper", paper_sweep)
    label = sweep.groups.index[~sweep.groups["measured"]][0]
    with pytest.raises(KeyError, match="was not measured"):
        sweep.gram(label)
    with pytest.raises(KeyError, match="'layer 0'"):
        sweep.gram(sweep.groups.index[sweep.groups["measured"]][0], by="layer 0")


def test_the_newest_sweep_is_the_one_last_written(write, tmp_path):
    for i, name in enumerate(("b_old", "a_new")):
        run = write(tmp_path, name, 2, 0, steps=2)
        for file in run.rglob("*"):
            os.utime(file, (time.time() - 100 + i,) * 2)
    assert find_sweep(None, tmp_path).name == "a_new"
    assert find_sweep("b_old", tmp_path).name == "b_old"


@pytest.mark.parametrize("name", ["../runs", "a/b", "", ".hidden"])
def test_names_that_are_no_folder_are_refused(paper_sweep, name):
    with pytest.raises(ReportError, match="one folder name"):
        find_sweep(name, paper_sweep)


def test_a_sweep_that_is_not_there_is_named_with_those_that_are(paper_sweep, tmp_path):
    with pytest.raises(ReportError, match=r"no such sweep .*there are paper"):
        load_sweep("other", paper_sweep)
    with pytest.raises(ReportError, match="no sweep was found"):
        load_sweep(None, tmp_path / "nowhere")


def test_a_damaged_run_is_left_out_and_named(paper_copy):
    runs = sorted((paper_copy / "paper").iterdir())
    (runs[0] / "config.yaml").write_text("R: [1")
    (runs[1] / "status.json").write_text("{")
    sweep = load_sweep("paper", paper_copy)
    assert len(sweep.runs) == 1 and len(sweep.notes) == 2
    assert runs[0].name in sweep.notes[0] and "config.yaml" in sweep.notes[0] and "\n" not in sweep.notes[0]
    (runs[2] / "config.yaml").write_text("seed: 1")
    with pytest.raises(ReportError, match="none of its runs can be read"):
        load_sweep("paper", paper_copy)


def test_a_record_that_cannot_be_read_is_named_and_the_sweep_is_read_on(paper_copy, tmp_path):
    runs = sorted((paper_copy / "paper").iterdir())
    for segment in (runs[0] / "grams").glob("*.parquet"):
        segment.write_bytes(segment.read_bytes()[:200])
    (runs[1] / "metrics.jsonl").unlink()
    (runs[1] / "metrics.jsonl").mkdir()
    sweep = load_sweep("paper", paper_copy)
    assert set(sweep.groups["run"]) == {runs[2].name} and len(sweep.notes) == 2
    assert runs[0].name in sweep.notes[0] and ".parquet" in sweep.notes[0] and runs[1].name in sweep.notes[1]


def test_a_queued_run_without_status_is_listed(paper_copy):
    run = sorted((paper_copy / "paper").iterdir())[0]
    for name in ("status.json", "metrics.jsonl"):
        (run / name).unlink()
    sweep = load_sweep("paper", paper_copy)
    assert list(sweep.runs["state"]) == ["queued", "finished", "finished"]


def base(R, seed, **changes):
    config = {
        "R": R, "seed": seed, "reward": {"_target_": "pkg.exact_match"},
        "model": {"name": "tiny", "path": "a"},
        "trainer": {"lr": 0.1, "steps": 10, "micro_batch": R}, "tracking": {"kind": "local"},
    }  # fmt: skip
    for key, value in changes.items():
        group, _, name = key.partition("__")
        config[group] = {**config[group], name: value}
    return config


def test_R_seed_and_what_cannot_change_a_result_make_no_arms():
    arms = find_arms([base(2, 0), base(4, 1, tracking__kind="mlflow"), base(4, 1, trainer__steps=99)])
    assert arms.labels == ("all",) * 3 and arms.varies == ()


def test_what_a_runs_identity_leaves_out_makes_no_arms():
    names = {"model.name", "task.name"}  # these name what makes an arm
    for key in sorted({*IRRELEVANT, "tracking.uri"} - {*names, "tracking"}):
        for configs in ([base(2, 0), base(4, 0)], [base(2, 0), base(2, 1)]):  # what follows R makes no arm anyway
            group, _, name = key.partition(".")
            for config, value in zip(configs, ("a", "b"), strict=True):
                config[group] = {**config.get(group, {}), name: value} if name else value
            found = find_arms(configs)
            assert found.labels == ("all",) * 2 and not found.tied_to_R, key
    two = [{**base(R, seed), "analysis": {"update_every": every}} for R, seed, every in ((2, 0, 0), (2, 1, 10))]
    assert find_arms(two).labels == ("all",) * 2


def test_names_of_arms_fit_a_line_with_hidden_characters_as_python_writes_them():
    texts = ["Question: {question}\nAnswer:", "Question: {question}\n" + "Think step by step. " * 9 + "\nAnswer:"]
    tasks = [(texts[0], ["\n\n"]), (texts[1], ["\n"]), (texts[1], ["\nQ:"])]
    configs = [{**base(R, 0), "task": {"prompt": text, "stop": stop}} for R in (2, 4) for text, stop in tasks]
    arms = find_arms(configs)
    labels = arms.labels[:3]
    assert labels[0] == r"prompt='Question: {question}\nAnswer:', stop=['\n\n']"
    assert len(set(labels)) == 3 and all(len(label) <= LONGEST and label.isprintable() for label in labels)
    assert labels[1].startswith(r"prompt='Question: {question}\nThink") and labels[1].endswith(r"stop=['\n']")
    assert set(arms.whole) == set(labels[1:])
    assert all(whole.count("step") == texts[1].count("step") for whole in arms.whole.values())
    twins = readable(["a" * 80 + "b" + "a" * 80, "a" * 80 + "c" + "a" * 80])
    assert len(set(twins.values())) == 2 and all(len(cut) <= LONGEST for cut in twins.values())


def test_arms_are_named_by_what_varies():
    configs = [base(R, 0, reward___target_=f"pkg.{name}", trainer__lr=lr)
               for R in (2, 4) for name in ("exact_match", "bernoulli") for lr in (0.1, 0)]  # fmt: skip
    arms = find_arms(configs)
    assert arms.varies == ("reward._target_", "trainer.lr")
    assert arms.labels[:2] == ("reward=pkg.exact_match, lr=0.1", "reward=pkg.exact_match, lr=0")
    assert len(set(arms.labels)) == 4


def test_a_model_is_one_arm_though_many_of_its_settings_differ():
    arms = find_arms([base(2, 0), base(2, 1), base(2, 0, model__name="big", model__path="b")])
    assert arms.varies == ("model.name",) and arms.labels == ("model=tiny", "model=tiny", "model=big")


def test_settings_that_follow_R_are_no_arms_but_named():
    configs = [base(R, seed, trainer__prompts=16 // R) for R in (2, 4) for seed in (0, 1)]
    arms = find_arms(configs)
    assert arms.tied_to_R == ("trainer.prompts",) and set(arms.labels) == {"all"}
    assert find_arms([base(2, 0, trainer__prompts=p) for p in (4, 8)]).labels == ("prompts=4", "prompts=8")


def settings(*words):
    """The run's own part of what Hydra composes."""
    config = OmegaConf.to_container(composed(*words), resolve=True)
    return {key: value for key, value in config.items() if key != "hydra"}


def test_objectives_are_named_by_their_choices():
    """The choices of conf/objective, composed; their own settings tell arms apart where the names do not."""
    names = ("reinforce", "ppo_clip", "ppo", "vine", "oracle", "gspo")
    arms = find_arms([settings(f"objective={name}") for name in names])
    assert arms.varies == ("aggregation", "estimator._target_", "objective")
    assert arms.labels[0] == "aggregation=sum, estimator=grpo, objective=reinforce"
    assert [label.split("objective=")[1] for label in arms.labels] == list(names)
    several = [settings("objective=vine", f"objective.continuations={M}") for M in (4, 8)]
    assert find_arms(several).labels == ("continuations=4", "continuations=8")
