"""Shuffled rewards where texts repeat: true nulls are rejected as often as stated at most, a dependence is found."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.gradient import shuffled
from grpo_sweeps.report.claims.rules import UNDECIDED
from grpo_sweeps.report.measure.permutation import permutation_columns
from grpo_sweeps.report.measure.spectral import Groups
from grpo_sweeps.spectra.equal import first_equal

R, TEXTS = 8, 12
P_TEXTS = np.arange(1.0, TEXTS + 1) ** -1.5
P_TEXTS /= P_TEXTS.sum()
SWEEPS, GROUPS = 200, 120


def texts_of(prompts: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """For each prompt scores of its texts (P, TEXTS, D), likely texts with short ones as a policy has them; rollouts
    of GROUPS groups of each sweep: (SWEEPS, GROUPS, R) texts."""
    psi = rng.standard_normal((prompts, TEXTS, 12)) * (1.0 - P_TEXTS)[:, None] ** 4
    psi[:, 1] += 0.8 * psi[:, 0]  # texts that resemble one another
    return psi, rng.choice(TEXTS, size=(SWEEPS, GROUPS, R), p=P_TEXTS)


def groups_of(psi_NTD: np.ndarray, text_NR: np.ndarray, reward_NR: np.ndarray) -> Groups:
    rows_NRD = np.take_along_axis(psi_NTD, text_NR[:, :, None], axis=1)
    reward_NR = reward_NR.astype(float)
    advantages_NR = reward_NR - reward_NR.mean(axis=1, keepdims=True)
    N = len(text_NR)
    return Groups(
        step_N=np.zeros(N, np.int64), group_N=np.arange(N), gram_NRR=rows_NRD @ rows_NRD.transpose(0, 2, 1),
        weights_NR=advantages_NR, rewards_NR=reward_NR, advantages_NR=advantages_NR, binary_N=np.ones(N, bool),
        floor_N=np.zeros(N), same_NR=first_equal(text_NR), scores=True,
    )  # fmt: skip


def rejected(kind: str, prompts: int, seed: int = 0) -> float:
    """The share of synthetic sweeps in which "shuffled" is contradicted, at a stated rate of .05; each has groups
    enough to be decided."""
    rng = np.random.default_rng(seed)
    psi_PTD, text_SGR = texts_of(SWEEPS * prompts, rng)
    prompt_SG = np.arange(SWEEPS)[:, None] * prompts + np.arange(GROUPS) % prompts
    hash_PT = rng.integers(2, size=(SWEEPS * prompts, TEXTS))
    if kind == "hash":
        reward_SGR = np.take_along_axis(hash_PT[prompt_SG], text_SGR, axis=2)
    elif kind == "coin":
        reward_SGR = rng.integers(2, size=text_SGR.shape)
    else:  # right texts share a direction
        reward_SGR = np.take_along_axis(hash_PT[prompt_SG], text_SGR, axis=2)
        psi_PTD[..., 0] += 3.0 * hash_PT
    N = SWEEPS * GROUPS
    prompt_N, reward_NR = prompt_SG.reshape(N), reward_SGR.reshape(N, R)
    groups = groups_of(psi_PTD[prompt_N], text_SGR.reshape(N, R), reward_NR)
    frame = pd.DataFrame(permutation_columns(groups)).assign(
        prompt_id=prompt_N, sweep=np.repeat(range(SWEEPS), GROUPS), rows="scores"
    )
    frame = frame[np.ptp(reward_NR, axis=1) > 0]
    frames = [part for _, part in frame.groupby("sweep")]
    claims = [shuffled("all", {R: part}, 0.05) for part in frames]
    assert all(claim.findings[0].groups >= rules.MIN_GROUPS for claim in claims)
    assert {claim.verdict for claim in claims} <= {UNDECIDED, rules.LONGER, rules.SHORTER}
    return float(np.mean([claim.verdict != UNDECIDED for claim in claims]))


@pytest.mark.parametrize("prompts", [GROUPS, 10])
@pytest.mark.parametrize("kind", ["hash", "coin"])
def test_a_true_null_is_contradicted_as_often_as_stated_at_most(kind, prompts):
    """A function of problem and text, and a coin for each rollout; prompts that never and that do come again."""
    assert rejected(kind, prompts) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / SWEEPS)


@pytest.mark.parametrize("prompts", [GROUPS, 10])
def test_rewards_along_a_direction_are_still_found(prompts):
    assert rejected("along", prompts) > 0.9


@pytest.mark.parametrize(("mid_p", "expected"), [(0.2, rules.LONGER), (0.8, rules.SHORTER), (0.5, UNDECIDED)])
def test_a_null_that_is_rejected_says_to_which_side_and_contradicts_nothing(mid_p, expected):
    """Shorter than chance has a one-sided p of about 1 of being as long, which is no support of the paper."""
    frame = pd.DataFrame({"shuffle_mid_p": [mid_p] * 100, "shuffle_p": mid_p, "shuffle_variance": 1 / 12})
    frame = frame.assign(prompt_id=range(100), shuffle_assignments=6, rows="scores")
    claim = shuffled("all", {4: frame}, 0.05)
    assert claim.verdict == claim.findings[0].verdict == expected
    long, short = (float(claim.findings[0].measured.split(f"as {way} by chance ")[1].split(",")[0].split(";")[0])
                   for way in ("long", "short"))  # fmt: skip
    assert (
        long + short == pytest.approx(1, abs=1e-2)
        and (long < 1e-6) == (mid_p < 0.4)
        and (short < 1e-6) == (mid_p > 0.6)
    )


def test_a_null_rejected_to_both_sides_says_both():
    common = pd.DataFrame({"rows": "scores", "shuffle_p": 0.5, "shuffle_variance": 1 / 12, "prompt_id": range(100)})
    groups = {R: common.assign(shuffle_mid_p=mid_p, shuffle_assignments=6) for R, mid_p in ((4, 0.2), (8, 0.8))}
    assert shuffled("all", groups, 0.05).verdict == f"{rules.LONGER} and shorter than chance"


@pytest.mark.parametrize("texts", [(0, 0, 2, 3), (0, 0, 2, 2), (0, 0, 0, 3, 4), (0, 1, 2, 3), (0, 0, 2, 3, 4, 4)])
@pytest.mark.parametrize("by", ["text", "rollout"])
def test_over_all_rewards_that_chance_makes_the_mid_p_is_exact(texts, by):
    """Every reward of a coin for each text, or for each rollout, with its chance: mean 1/2 and the stated variance."""
    texts, size = np.array(texts), len(texts)
    units = np.unique(texts) if by == "text" else np.arange(size)
    coins = np.array(list(itertools.product([0, 1], repeat=len(units))))
    rewards = coins[:, np.searchsorted(units, texts)] if by == "text" else coins
    rewards = rewards[np.ptp(rewards, axis=1) > 0]
    psi = np.random.default_rng(size).standard_normal((size, 5))
    psi[:, 0] += 1.0
    found = permutation_columns(
        groups_of(np.broadcast_to(psi, (len(rewards), *psi.shape)), np.broadcast_to(texts, rewards.shape), rewards)
    )
    tested = found["shuffle_assignments"] > 1
    assert (np.isnan(found["shuffle_mid_p"]) == ~tested).all() and tested.any()
    assert found["shuffle_mid_p"][tested].mean() == pytest.approx(0.5, abs=1e-12)
    assert found["shuffle_mid_p"][tested].var() == pytest.approx(found["shuffle_variance"][tested].mean(), abs=1e-12)


def test_texts_that_occur_equally_often_change_places_and_a_group_without_such_is_left_out_and_counted():
    psi = np.random.default_rng(0).standard_normal((3, 4, 5))
    texts = np.array([[0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 1, 2]])
    rewards = np.array([[1, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]])
    found = permutation_columns(groups_of(psi, texts, rewards))
    assert found["shuffle_assignments"].tolist() == [2.0, 1.0, 2.0]  # 1 and 2; none; the two equal texts
    assert np.isnan(found["shuffle_p"]).tolist() == [False, True, False]
    frame = pd.DataFrame(found | {"prompt_id": range(3), "rows": "scores"})
    claim = shuffled("all", {4: frame}, 0.05)
    assert claim.verdict == UNDECIDED and claim.findings[0].groups == 2
    assert any(r.startswith("1 measured groups are left out: no two texts") for r in claim.remarks)
