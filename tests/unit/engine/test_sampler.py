"""The sampler against a slow one without cache, padding or batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.engine.policy import Policy
from grpo_sweeps.engine.rollouts import Rollout, row_seed
from tests.sampling import sample

PROMPTS = ["Question: 1+1?\nAnswer:", "a", "Question: a longer one, of many words?\nAnswer:"]
LIMIT = 24


def slow_sample(
    policy: Policy, prompt: list[int], seed: int, temperature: float, limit: int
) -> tuple[list[int], list[float]]:
    """One row: the whole text through the model for each token, the inverse of the cumulative sum by a loop."""
    uniforms = np.random.Generator(np.random.Philox(seed)).random(limit)
    ids, logprobs = list(prompt), []
    for u in uniforms:
        with torch.no_grad():
            logits = policy.model(torch.tensor([ids])).logits[0, -1]
        distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
        total, threshold = 0.0, u * float(distribution.double().exp().sum())
        token = -1
        for probability in distribution.double().exp().tolist():
            token += 1
            total += probability
            if total > threshold:
                break
        ids.append(token)
        logprobs.append(float(distribution[token]))
        if token in policy.eos_ids:
            break
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_slow_sampler(policy64: Policy, temperature: float) -> None:
    prompts = policy64.encode(PROMPTS)
    rows = [prompts[i % 3] for i in range(12)]
    seeds = [row_seed("test", i) for i in range(12)]
    found = sample(policy64, rows, seeds, RolloutConfig(temperature=temperature, max_new_tokens=LIMIT))
    for rollout, prompt, seed in zip(found, rows, seeds, strict=True):
        ids, logprobs = slow_sample(policy64, prompt, seed, temperature, LIMIT)
        assert list(rollout.completion_ids) == ids
        assert rollout.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert rollout.truncated == (ids[-1] not in policy64.eos_ids)


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_other_rows_do_not_matter(policy64: Policy, batch: int) -> None:
    prompts = policy64.encode(PROMPTS) * 4
    seeds = list(range(12))
    reference = sample(policy64, prompts, seeds, RolloutConfig(max_new_tokens=LIMIT, batch=12))
    found = sample(policy64, prompts[::-1], seeds[::-1], RolloutConfig(max_new_tokens=LIMIT, batch=batch))
    assert [r.completion_ids for r in found[::-1]] == [r.completion_ids for r in reference]
    assert len({r.length for r in reference}) > 1  # rows ended at different times: the batch was compacted


@pytest.mark.parametrize("batch", [4, 12])
def test_a_shared_prompt_is_as_good_as_one_a_row(policy64: Policy, batch: int) -> None:
    prompts = policy64.encode(PROMPTS)
    rows = [prompts[i] for i in (0, 2, 0, 0, 1, 2, 1, 1, 0, 2, 2, 1)]
    config = RolloutConfig(max_new_tokens=LIMIT, batch=batch)
    apart = sample(policy64, rows, range(12), config)
    shared = sample(policy64, rows, range(12), config, share_prompts=True)
    assert [(r.prompt_ids, r.completion_ids) for r in shared] == [(r.prompt_ids, r.completion_ids) for r in apart]
    for one, other in zip(shared, apart, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_first_token_has_the_distribution_of_the_model(policy64: Policy) -> None:
    prompt = policy64.encode(PROMPTS[:1])[0]
    n = 4000
    rows = sample(policy64, [prompt] * n, list(range(n)), RolloutConfig(max_new_tokens=1, batch=n))
    with torch.no_grad():
        expected = torch.softmax(policy64.model(torch.tensor([prompt])).logits[0, -1], dim=-1).numpy() * n
    counts = np.bincount([r.completion_ids[0] for r in rows], minlength=len(expected))
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    # chi-square: mean = degrees of freedom, variance twice that; five standard deviations
    degrees = int(common.sum())
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_greedy_takes_the_most_probable_token(policy64: Policy) -> None:
    prompt = policy64.encode(PROMPTS[:1])[0]
    rollout = sample(policy64, [prompt], [0], RolloutConfig(max_new_tokens=5), greedy=True)[0]
    ids = list(prompt)
    for token in rollout.completion_ids:
        with torch.no_grad():
            assert int(policy64.model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_a_stop_string_ends_the_rollout_and_is_cut_from_its_text(policy64: Policy) -> None:
    prompt = policy64.encode(PROMPTS[:1])[0]
    config = RolloutConfig(max_new_tokens=LIMIT)
    free = sample(policy64, [prompt] * 30, list(range(30)), config)
    seed, rollout = next((i, r) for i, r in enumerate(free) if len(r.text) == r.length - (not r.truncated) > 8)
    stop = rollout.text[3:5]
    cut = sample(policy64, [prompt], [seed], config, stop=[stop])[0]
    end = rollout.text.index(stop)
    assert cut.text == rollout.text[:end] and stop not in cut.text
    assert cut.completion_ids == rollout.completion_ids[: end + len(stop)]  # one token a character
    assert not cut.truncated


def test_padding_may_be_the_end_token(policy64: Policy) -> None:
    same = dataclasses.replace(policy64, pad_id=policy64.eos_ids[0])
    prompts = policy64.encode(PROMPTS)
    config = RolloutConfig(max_new_tokens=LIMIT)
    ours = sample(same, prompts, [1, 2, 3], config)
    assert [r.completion_ids for r in ours] == [r.completion_ids for r in sample(policy64, prompts, [1, 2, 3], config)]


def test_row_seed_is_fixed_and_tells_rows_apart() -> None:
    assert row_seed(0, "train", 3, "p1", 2) == row_seed(0, "train", 3, "p1", 2)
    assert len({row_seed(0, "train", s, f"p{p}", r) for s in range(5) for p in range(5) for r in range(5)}) == 125
    assert row_seed("a", "bc") != row_seed("ab", "c")


def test_mode_is_restored(policy64: Policy) -> None:
    policy64.model.train()
    sample(policy64, policy64.encode(PROMPTS[:1]), [0], RolloutConfig(max_new_tokens=2))
    assert policy64.model.training
    policy64.model.eval()
    assert isinstance(Rollout((1,), (2,), "", np.zeros(1), False).length, int)
