"""Steps with values by fresh continuations: against VinePPO by token, and against one continuation at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from grpo_sweeps.config import ObjectiveConfig, RolloutConfig, RunConfig
from grpo_sweeps.engine.rollouts import row_seed
from grpo_sweeps.estimators.token_level import vine
from grpo_sweeps.loop.continuations import Credit, by_segment, edges_of, step_credit
from grpo_sweeps.loop.inner import backward_of_loss, inner_step, prepare_terms, take_step
from grpo_sweeps.loop.results import RatioTally
from grpo_sweeps.loop.rollouts import Rated, rollouts_with_advantages
from grpo_sweeps.loop.setup import Setup, prepare
from tests.sampling import sample
from tests.unit.loop.slow_loss import added_gradient, rows_of_loss

pytestmark = pytest.mark.integration

MakeConfig = Callable[..., RunConfig]
REINFORCE = "grpo_sweeps.estimators.reinforce.reinforce"
M = 3


def setup_of(make_config: MakeConfig, every: int, ratio: str = "none", batch: int = 256) -> Setup:
    objective = ObjectiveConfig(ratio=ratio, continuations=M, value_every=every)
    rollout = RolloutConfig(max_new_tokens=8, batch=batch)
    return prepare(make_config(estimator=REINFORCE, objective=objective, rollout=rollout))


def credit_of(setup: Setup, rated: Rated, step: int) -> Credit:
    return step_credit(setup, rated.problems, rated.rollouts, rated.rewards_GR.flatten(), step)


def test_edges() -> None:
    assert edges_of(1, 1) == [0, 1] and edges_of(4, 2) == [0, 2, 4]
    assert edges_of(3, 10) == [0, 3] and edges_of(7, 3) == [0, 3, 6, 7]


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_advantages_are_vine_s_on_segments(every: int) -> None:
    """A segment is one action of `vine`; its tokens all get what that gets."""
    rng = np.random.default_rng(0)
    lengths, rewards = [1, 4, 6, 7], rng.normal(size=4)
    edges = [edges_of(length, every) for length in lengths]
    segments = [len(edges_E) - 1 for edges_E in edges]
    values_NK, rewards_NK = rng.normal(size=(4, max(segments))), np.zeros((4, max(segments)))
    mask_NK = np.arange(max(segments)) < np.array(segments)[:, None]
    rewards_NK[np.arange(4), np.array(segments) - 1] = rewards
    A_NK = vine(*(torch.from_numpy(x)[None] for x in (rewards_NK, values_NK, mask_NK)))[0]
    for i, length in enumerate(lengths):
        found = by_segment(values_NK[i, : segments[i]].tolist(), edges[i], float(rewards[i]))
        assert found.dtype == torch.float64 and len(found) == length
        for t in range(length):
            assert float(found[t]) == pytest.approx(float(A_NK[i, t // every]), abs=1e-12)
        if every > length:
            assert found.tolist() == pytest.approx([rewards[i] - values_NK[i, 0]] * length), "the oracle's"


def slow_value(setup: Setup, rated: Rated, i: int, edge: int, step: int) -> float:
    """The mean reward of the continuations of one prefix, each sampled by itself with the tokens that are left."""
    problem, o, rewards = rated.problems[i // 4], rated.rollouts[i], []
    rollout = dataclasses.replace(setup.config.rollout, max_new_tokens=8 - edge)
    for c in range(M):
        ids = o.completion_ids[:edge]
        seed = row_seed(setup.config.seed, "train value", step, problem.id, *ids, c)
        rest = sample(setup.policy, [(*o.prompt_ids, *ids)], [seed], rollout)[0].completion_ids
        text = setup.policy.tokenizer.decode([*ids, *rest], skip_special_tokens=True)
        rewards.append(len(text) % 2 == 0)
    return float(np.mean(rewards))


@pytest.mark.parametrize("every", [0, 1, 3])
def test_values_are_those_of_one_continuation_at_a_time(make_config: MakeConfig, every: int) -> None:
    setup = setup_of(make_config, every)
    rated = rollouts_with_advantages(setup, 1)
    found = credit_of(setup, rated, 1)
    varied, prefixes = set[float](), set()
    for i, (o, A_T) in enumerate(zip(rated.rollouts, found.by_token, strict=True)):
        assert len(A_T) == o.length
        for t in range(o.length):
            before = t // every * every if every else 0
            after = min(before + every, o.length) if every else o.length
            reward = float(rated.rewards_GR.flatten()[i])
            ahead = reward if after == o.length else slow_value(setup, rated, i, after, 1)
            assert float(A_T[t]) == pytest.approx(ahead - slow_value(setup, rated, i, before, 1), abs=1e-12)
            varied.add(round(float(A_T[t]), 6))
            prefixes.add((i // 4, o.completion_ids[:before]))
    assert len(varied) > 2, "values that say something"
    assert found.metrics["value/prefixes"] == len(prefixes) and (every or len(prefixes) == 4)
    assert found.metrics["value/continuations"] == M * len(prefixes)
    assert M * len(prefixes) <= found.metrics["value/tokens"] <= M * sum(8 - len(ids) for _, ids in prefixes)


def test_values_belong_to_the_step_and_not_to_the_batch(make_config: MakeConfig) -> None:
    one, other = setup_of(make_config, 2), setup_of(make_config, 2, batch=5)
    rated = rollouts_with_advantages(one, 1)
    first, second, later = credit_of(one, rated, 1), credit_of(other, rated, 1), credit_of(one, rated, 2)
    assert torch.equal(torch.cat(first.by_token), torch.cat(second.by_token)) and first.metrics == second.metrics
    assert not torch.equal(torch.cat(first.by_token), torch.cat(later.by_token))


def test_without_continuations_nothing_is_drawn(make_config: MakeConfig) -> None:
    setup = prepare(make_config())
    assert credit_of(setup, rollouts_with_advantages(setup, 0), 0) == Credit()


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("ratio", ["none", "token"])
def test_rows_carry_each_token_s_advantage(make_config: MakeConfig, ratio: str, every: int) -> None:
    """Each rollout's gradient written out by hand; a group's is their sum, and the Gram theirs."""
    setup = setup_of(make_config, every, ratio)
    rated = rollouts_with_advantages(setup, 1)
    by_token = credit_of(setup, rated, 1).by_token
    terms = prepare_terms(setup, rated, by_token)
    rows_BD = rows_of_loss(setup, rated, by_token)
    measured = backward_of_loss(setup, terms, terms.cuts[0], RatioTally(ratio), 1, True)
    found = added_gradient(setup)
    assert torch.allclose(found, rows_BD.sum(0), rtol=0, atol=1e-5 * float(rows_BD.norm()))
    assert len(measured) > 1
    for g, part in measured.items():
        gram = rows_BD[4 * g : 4 * g + 4] @ rows_BD[4 * g : 4 * g + 4].T
        assert part.gram == pytest.approx(gram.numpy(), abs=1e-5 * float(gram.abs().max()))
    assert terms.rated.advantages_GR.flatten().tolist() == pytest.approx([float(A.mean()) for A in by_token])


def test_a_step_s_record_is_of_the_loss(make_config: MakeConfig) -> None:
    setup = setup_of(make_config, 3)
    result = take_step(setup, 0)
    assert {g.rows for g in result.groups} == {"loss"} and result.metrics["time/continuations"] > 0
    assert result.metrics["value/continuations"] == M * result.metrics["value/prefixes"] > 0
    assert not any(name.startswith("scores/") for name in result.metrics)


def test_a_reward_that_is_always_the_same_leaves_nothing_to_learn(make_config: MakeConfig) -> None:
    """Values by continuations know it at once, where a critic has to learn it."""
    config = make_config(
        reward="always", estimator=REINFORCE, objective=ObjectiveConfig(ratio="token", continuations=2, value_every=2)
    )
    result = inner_step(prepare(config), 0)
    assert all(set(g.advantages) == {0.0} and g.gram is None for g in result.groups)
    assert result.metrics["grad_norm"] == 0.0
