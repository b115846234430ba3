"""The rules of what looks wrong: each on rows in which it holds, on rows in which it just does not, and too early."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_sweeps.tracking.symptoms import LEAST, Course, known, percent, symptoms

CONFIG: dict[str, Any] = {
    "R": 4, "trainer": {"prompts": 8, "lr": 1e-6}, "rollout": {"max_new_tokens": 256, "temperature": 1.0},
    "reward": {"_target_": "grpo_sweeps.rewards.exact_match.strict"}, "model": {"path": "owner/name"},
    "estimator": {"_target_": "grpo_sweeps.estimators.group.grpo"}, "task": {"stop": ["\nQ:"]},
}  # fmt: skip
WELL: dict[str, float] = {
    "reward": 0.25, "reward_std": 0.3, "reward/strict": 0.25, "reward/flexible": 0.3, "grad_norm": 1.0, "entropy": 0.5,
    "entropy/normalized": 0.05, "groups/mixed": 0.5, "groups/all_right": 0.0, "groups/all_wrong": 0.5,
    "groups/same_text": 0.1, "completions/clipped_ratio": 0.2, "update/relative_norm": 1e-4,
}  # fmt: skip
ZERO = {"reward": 0.0, "reward_std": 0.0, "grad_norm": 0.0, "groups/mixed": 0.0, "groups/all_wrong": 1.0}


def config(**changes: Any) -> dict[str, Any]:
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in CONFIG.items()}
    for key, value in changes.items():
        group, _, last = key.partition("__")
        if last:
            found[group][last] = value
        else:
            found[group] = value
    return found


def found(changes: dict[str, float], steps: int = 4, **of_config: Any) -> dict[str, str]:
    return {s.kind: s.sentence for s in symptoms(config(**of_config), [WELL | changes] * steps)}


def test_a_good_run_has_none() -> None:
    assert found({}) == {}
    assert symptoms(CONFIG, []) == []


def test_reward_zero_names_the_reward_and_the_parsing_that_would_give_more() -> None:
    rows = ZERO | {"reward/strict": 0.0, "reward/flexible": 0.19}
    sentence = found(rows)["reward 0"]
    assert "128 rollouts of 32 prompts: at 95% confidence less than 8.9% would be right" in sentence
    assert "flexible parsing (the last number of the text) finds 19% right: reward=exact_match_flexible" in sentence
    sentence = found(ZERO | {"reward/strict": 0.0, "reward/flexible": 0.0})["reward 0"]
    assert "neither strict nor flexible parsing finds a right answer" in sentence
    assert "reward 0" not in found({"reward": 0.001})
    assert set(found(ZERO)) == {"reward 0"}, "that no group is mixed follows, and is not said again"
    rows_with_kl = ZERO | {"reward": -0.03, "reward_std": 0.01, "reward/task": 0.0, "groups/mixed": 1.0}
    assert "reward 0" in found(rows_with_kl), "the KL in the reward is no answer"
    assert "reward 0" not in found({"reward": 0.0, "reward_std": 1.0}), "rewards of 1 and -1"


def test_reward_zero_speaks_of_the_tasks_verdict() -> None:
    none = ZERO | {"reward/strict": 0.0, "reward/flexible": 0.0}
    assert "neither strict nor flexible" in found(none, task__verdict="choice")["reward 0"]
    without = {name: value for name, value in WELL.items() if name not in ("reward/strict", "reward/flexible")}
    (said,) = symptoms(config(task__verdict="none"), [without | ZERO] * 4)
    assert "parsing" not in said.sentence and "read some completions" in said.sentence
    looser = found(ZERO | {"reward/strict": 0.0, "reward/flexible": 0.2}, task__verdict="exact")["reward 0"]
    assert "finds 20% right: the prompt should ask for an answer after #### or in \\boxed{}" in looser
    strict = found(ZERO | {"reward/strict": 0.2, "reward/flexible": 0.2}, task__verdict="exact")["reward 0"]
    assert strict.endswith("finds 20% right: reward=correct takes it")


def test_rewards_that_lack_something_are_named_and_not_blamed_on_the_model() -> None:
    by_kind = found(ZERO | {"reward/failed": 1.0})
    assert "100% of 128 rewards lack something (reward/failed)" in by_kind["reward failed"]
    assert "reward 0" not in by_kind
    assert "reward failed" not in found({"reward/failed": 0.01})


def test_verdicts_that_do_not_come_are_named_and_not_blamed_on_the_model() -> None:
    by_kind = found(ZERO | {"verdict/stopped": 128.0}, task__verdict="my_verdicts.hangs")
    assert by_kind["verdict stopped"].startswith("128 verdicts so far, of 128 rollouts")
    assert "task.verdict=my_verdicts.hangs" in by_kind["verdict stopped"] and "reward 0" not in by_kind
    assert "verdict stopped" not in found({"verdict/stopped": 1.0})


def test_where_all_completions_are_masked_nothing_is_learned() -> None:
    cut = {"completions/clipped_ratio": 1.0, "reward/strict": 0.0}
    by_kind = found(cut, rollout__max_new_tokens=2, rollout__cut="mask")
    assert "rollout.cut=mask leaves them out: there is no gradient" in by_kind["cut"]


def test_one_reward_ends_it() -> None:
    rows = [WELL | ZERO] * 3 + [WELL]
    assert symptoms(CONFIG, rows) == []


def test_cut_completions() -> None:
    assert "cut" not in found({"completions/clipped_ratio": 0.25})
    sentence = found({"completions/clipped_ratio": 0.43})["cut"]
    assert "43% of 128 completions are cut at rollout.max_new_tokens=256" in sentence
    late = [WELL | {"completions/clipped_ratio": 0.0}] * 100 + [WELL | {"completions/clipped_ratio": 0.5}] * 20
    (symptom,) = symptoms(CONFIG, late)
    assert "50% of 640 completions" in symptom.sentence, "the last 20 steps, which the first 100 do not hide"


def test_no_end_token_is_told_from_a_short_limit() -> None:
    cut = {"completions/clipped_ratio": 1.0, "reward/strict": 0.0, "reward/flexible": 0.0}
    short = found(cut, rollout__max_new_tokens=8)
    assert set(short) == {"cut"} and "100% of 128 completions are cut at rollout.max_new_tokens=8" in short["cut"]
    assert "none ended: if a longer limit changes nothing, check the model's end tokens" in short["cut"]
    long = found(cut)
    assert set(long) == {"no end"} and "within rollout.max_new_tokens=256, which is no short limit" in long["no end"]
    assert (
        "eos_token_id" in long["no end"] and "owner/name" in long["no end"] and "task.stop=['\\nQ:']" in long["no end"]
    )
    right = found(cut | {"reward/strict": 0.4}, rollout__max_new_tokens=8)
    assert set(right) == {"no end"} and "though 40% hold their final answer by then" in right["no end"]
    midst = found(cut | {"reward/flexible": 0.4}, rollout__max_new_tokens=8)
    assert set(midst) == {"cut"}, "the last number of work that was cut is no end"


ALL_RIGHT = {"reward": 1.0, "groups/all_right": 1.0, "groups/all_wrong": 0.0}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({**ALL_RIGHT, "reward/strict": 1.0, "reward/flexible": 1.0}, "100% all right, 0% all wrong"),
        ({"groups/all_right": 0.25, "groups/all_wrong": 0.75}, "too hard"),
        ({**ALL_RIGHT, "reward/strict": 1.0, "reward/flexible": 1.0}, "too easy"),
        ({**ALL_RIGHT, "reward/strict": 0.4, "reward/flexible": 0.5}, "check that reward exact_match.strict tells"),
        (
            {"reward": 0.5, "groups/all_right": 0.0, "groups/all_wrong": 0.0},
            "check that reward exact_match.strict tells",
        ),
    ],
)
def test_no_group_mixed(rows: dict[str, float], words: str) -> None:
    sentence = found({"groups/mixed": 0.0, "reward_std": 0.0, "grad_norm": 0.0} | rows)["none mixed"]
    assert words in sentence and "no group is mixed (32 groups: " in sentence and "nothing is learned" in sentence


def test_groups_of_other_equal_rewards_are_accounted_for() -> None:
    rows = {"groups/mixed": 0.0, "reward": 0.5, "groups/all_right": 0.25, "groups/all_wrong": 0.0}
    assert "(32 groups: 25% all right, 0% all wrong, 75% equal otherwise)" in found(rows)["none mixed"]
    known = {"groups/all_right": 0.3, "groups/all_wrong": 0.7}  # 1 - 0.3 - 0.7 is not 0 in float64
    assert "otherwise" not in found({"groups/mixed": 0.0} | known)["none mixed"]


def test_no_group_mixed_without_a_baseline_of_the_group_and_in_older_records() -> None:
    own = found({"groups/mixed": 0.0}, estimator={"_target_": "grpo_sweeps.estimators.reinforce.reinforce"})
    assert "no spectrum is measured" in own["none mixed"]
    older = {k: v for k, v in WELL.items() if not k.startswith("groups/")} | {"frac_reward_zero_std": 1.0}
    (symptom,) = symptoms(CONFIG, [older] * 4)
    assert symptom.sentence.startswith("no group is mixed (32 groups), so that")


def test_same_text() -> None:
    assert "one text" not in found({"groups/same_text": 0.9})
    cold = found({"groups/same_text": 1.0}, rollout__temperature=0.01)["one text"]
    assert "in 100% of 32 groups all 4 rollouts are the same text" in cold and "raise it to 1" in cold
    assert "the policy writes one answer" in found({"groups/same_text": 0.95})["one text"]
    assert "one text" not in found({"groups/same_text": 1.0}, R=1), "one rollout is always one text"


def test_one_rollout() -> None:
    by_name = found({}, steps=1, R=1)
    assert set(by_name) == {"one rollout"} and "R=1: a group of one rollout" in by_name["one rollout"]
    own = {"_target_": "mine.centred"}
    assert set(found({"grad_norm": 0.0}, R=1, estimator=own)) == {"one rollout"}
    assert found({}, R=1, estimator=own) == {}
    assert found({}, R=1, estimator={"_target_": "grpo_sweeps.estimators.reinforce.reinforce"}) == {}


def test_divergence() -> None:
    sentence = found({"update/relative_norm": 3e29}, steps=1, trainer__lr=1e30)["divergence"]
    assert "the update of step 1 changed the weights by 3e+29 times their norm" in sentence and "1e+30" in sentence
    at_random = ZERO | {"entropy": 4.59, "entropy/normalized": 0.999}
    assert "drawn almost at random at step 1 (entropy 4.59 nats" in found(at_random, steps=1)["divergence"]
    assert "divergence" not in found(at_random | {"entropy/normalized": 0.98})
    assert "entropy is nan" in found({"entropy": float("nan")}, steps=1)["divergence"]
    assert "changed the weights by inf times" in found({"update/relative_norm": math.inf}, steps=1)["divergence"]


def divergence(*rows: dict[str, float]) -> str:
    return {s.kind: s.sentence for s in symptoms(CONFIG, [WELL | row for row in rows])}.get("divergence", "")


def test_weights_that_grow_are_a_divergence_where_no_update_is_measured() -> None:
    norms = [{"weights/norm": norm} for norm in (50.0, 90.0, 99.0)]
    assert divergence(*norms) == ""
    sentence = divergence(*norms, {"weights/norm": 8e29})
    assert "step 3 made the weights' norm 8.1e+27 times as large: the run has diverged" in sentence
    later = [{"weights/norm": 50.0 * 1.9**step} for step in range(5)]
    assert "the weights' norm is 652 at step 5, 13 times that of the first step" in divergence(*later)
    assert divergence(*later[:4]) == ""
    for value in (math.inf, math.nan):
        assert f"the weights' norm is {value} at step 2" in divergence(norms[0], {"weights/norm": value})
    assert divergence({"weights/norm": 0.0}, {"weights/norm": 1.0}) == "", "nothing to compare with"


def test_a_policy_that_becomes_uniform_has_diverged_whatever_its_reward() -> None:
    at_random = {"entropy": 4.59, "entropy/normalized": 0.999}
    assert "(entropy 4.59 nats, over 99% of a uniform policy's; 0.5 at the first step)" in divergence({}, at_random)
    assert divergence(at_random, at_random) == "", "untrained weights with a reward that ignores the answer"


def test_a_share_is_not_judged_early_unless_the_run_has_ended() -> None:
    course = Course(CONFIG)
    for step in range(1, 5):
        course.add(WELL | {"completions/clipped_ratio": 0.9})
        assert bool(course.symptoms()) == (32 * step >= LEAST)
        assert course.symptoms(ended=True)
    (note,) = course.notes()
    assert note.startswith("looks wrong after step 4 (cut): 90% of 128") and course.notes() == [], "each kind once"
    resumed = Course(CONFIG)
    for _ in range(5):
        resumed.add(WELL | {"completions/clipped_ratio": 0.8})
    resumed.said(["a checkpoint (cut): ", note])
    assert resumed.symptoms() and resumed.notes() == [], "the numbers have changed, the kind has not"
    other = Course(CONFIG)
    other.add(WELL | {"completions/clipped_ratio": 0.8})
    other.said(["a checkpoint (cut): "])
    assert other.notes(ended=True), "another kind of note says nothing of it"


def test_rows_of_evaluations_and_gaps_count_nothing() -> None:
    nan = float("nan")
    course = Course({"R": 2})
    course.add(known({"step": 3, "eval/accuracy": 0.5, "reward": nan, "grad_norm": None}))
    assert course.steps == 0
    course.add({"reward": 0.0})
    assert [s.kind for s in course.symptoms(ended=True)] == ["reward 0"], "a record with few metrics"


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1e-4, "under 0.1%"), (0.024, "2.4%"), (0.43, "43%"), (0.997, "over 99%"), (1.0, "100%")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text
