"""The graph sampler on a card: its kernels against torch's operators, its rollouts against the eager engine's."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading

import numpy as np
import pytest
import torch

from grpo_sweeps.config import ModelConfig, RolloutConfig
from grpo_sweeps.engine.policy import Policy, load_policy
from grpo_sweeps.engine.rollouts import row_seed
from grpo_sweeps.engine.samplers import attention, draw, load
from grpo_sweeps.engine.samplers.eager import EagerSampler
from grpo_sweeps.engine.samplers.graph import GraphSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda")
EPSILONS = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
PROMPTS = ["Question: 1+1?\nAnswer:", "a", "Question: a longer one, of many words?\nAnswer:", "7*8="]


@pytest.mark.parametrize("dtype", EPSILONS)
@pytest.mark.parametrize("heads", [(14, 2), (24, 8), (8, 8), (40, 2)])
@pytest.mark.parametrize("dims", [64, 80, 128, 256])
def test_attention_is_that_of_float64(dtype: torch.dtype, heads: tuple[int, int], dims: int) -> None:
    (H, K), B, T, S = heads, 9, 256, 12
    torch.manual_seed(0)
    query_BHD = torch.randn(B, H, dims, device=DEVICE, dtype=dtype)
    key_BKD, value_BKD = torch.randn(2, B, K, dims, device=DEVICE, dtype=dtype)
    keys_SKTD, values_SKTD = torch.randn(2, S, K, T, dims, device=DEVICE, dtype=dtype)
    slots_B = torch.randperm(S, device=DEVICE)[:B]
    lengths_B = torch.tensor([0, 1, 15, 16, 17, 63, 64, 200, 255], device=DEVICE)
    for window, softcap in itertools.product((None, 50), (None, 0.7)):
        ours, plain = [keys_SKTD.clone(), values_SKTD.clone()], [keys_SKTD.double(), values_SKTD.double()]
        rest = (slots_B, lengths_B, dims**-0.5, window, softcap)
        found = attention.attend(query_BHD, key_BKD, value_BKD, *ours, *rest)
        expected = attention.plain(query_BHD.double(), key_BKD.double(), value_BKD.double(), *plain, *rest)
        assert (found.double() - expected).abs().max() < EPSILONS[dtype]
        for a, b in zip(ours, plain, strict=True):
            assert torch.equal(a.double(), b)


@pytest.mark.parametrize("V", [97, 4096, 4097, 49152, 151936, 256000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_draw_is_that_of_torch(V: int, dtype: torch.dtype, temperature: float) -> None:
    """But where a uniform number lies within float32's rounding of an edge: a few of ten thousand words' draws."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    differ = 0
    for _ in range(10):
        logits_BV = (torch.randn(128, V, device=DEVICE, generator=generator) * 4).to(dtype)
        uniforms_B1 = torch.rand(128, 1, device=DEVICE, dtype=torch.float64, generator=generator)
        tokens_B, logprobs_B = draw.draw(logits_BV, uniforms_B1, temperature)
        plain_B, plain_logprobs_B = draw.plain(logits_BV, uniforms_B1, temperature)
        same_B = tokens_B == plain_B
        differ += int((~same_B).sum())
        assert (logprobs_B - plain_logprobs_B)[same_B].abs().max() < 4e-6
    assert differ <= 3


def test_the_draw_of_words_without_probability() -> None:
    none = -float("inf")
    logits_BV = torch.full((4, 9000), none, device=DEVICE)
    logits_BV[0, 8999], logits_BV[1, 0], logits_BV[2, 4096], logits_BV[3] = 0.0, 0.0, 1.0, 0.0
    uniforms_B1 = torch.tensor([[0.0], [0.999999], [0.5], [1 - 1e-16]], device=DEVICE, dtype=torch.float64)
    tokens_B, logprobs_B = draw.draw(logits_BV, uniforms_B1, 1.0)
    assert tokens_B.tolist() == [8999, 0, 4096, 8999]
    assert logprobs_B.tolist() == pytest.approx([0.0, 0.0, 0.0, -np.log(9000)])


@pytest.fixture
def policy() -> Policy:
    """The embedded model on the card, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_policy(ModelConfig(name="tiny", path="embedded", dtype="float32"), DEVICE)


def rows_of(policy: Policy, repeats: int) -> tuple[list[list[int]], list[int]]:
    prompts = [ids for ids in policy.encode(PROMPTS) for _ in range(repeats)]
    return prompts, [row_seed("graph", i) for i in range(len(prompts))]


@pytest.mark.parametrize("batch", [64, 12])
@pytest.mark.parametrize("greedy", [False, True])
def test_rollouts_are_those_of_eager(policy: Policy, batch: int, greedy: bool) -> None:
    """Over updates in place, by one recording; in float32, so that rounding moves no token of so few."""
    config = RolloutConfig(max_new_tokens=40, batch=batch)
    sampler = GraphSampler(policy)
    prompts, seeds = rows_of(policy, 16)
    for _ in range(3):
        found = sampler.sample(prompts, seeds, config, ("4",), greedy)
        expected = EagerSampler(policy).sample(prompts, seeds, config, ("4",), greedy)
        assert [r.completion_ids for r in found] == [r.completion_ids for r in expected]
        assert [(r.text, r.truncated) for r in found] == [(r.text, r.truncated) for r in expected]
        assert max(abs(a.logprobs - b.logprobs).max() for a, b in zip(found, expected, strict=True)) < 1e-4
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.05)
    assert len({r.length for r in found}) > 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_model_gives_the_same_bits_after_sampling(dtype: str) -> None:
    policy = load_policy(ModelConfig(name="tiny", path="embedded", dtype=dtype), DEVICE)
    prompts, seeds = rows_of(policy, 8)
    ids = torch.tensor(policy.encode(["Question: what is 12+30?\nAnswer: 42"]), device=DEVICE)
    with torch.no_grad():
        before = policy.model(input_ids=ids).logits.clone()
        rollouts = load("auto", policy).sample(prompts, seeds, RolloutConfig(max_new_tokens=32))
        after = policy.model(input_ids=ids).logits
    assert torch.equal(before, after)
    assert not [name for name, module in policy.model.named_modules() if "forward" in vars(module)]
    assert len({r.completion_ids for r in rollouts}) > 8


def test_a_copy_of_the_model_runs_its_own_weights_after_sampling(policy: Policy) -> None:
    """What stays on a module would be taken over by a copy, the reference of a KL term for one."""
    prompts, seeds = rows_of(policy, 2)
    GraphSampler(policy).sample(prompts, seeds, RolloutConfig(max_new_tokens=8))
    other = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    ids = torch.tensor([prompts[0]], device=DEVICE)
    with torch.no_grad():
        before = other.model(input_ids=ids).logits
        for parameter in policy.model.parameters():
            parameter.zero_()
        assert torch.equal(other.model(input_ids=ids).logits, before)


def test_recording_beside_another_thread_that_uses_the_card(policy: Policy) -> None:
    stop = threading.Event()

    def busy() -> None:
        x = torch.randn(256, 256, device=DEVICE)
        while not stop.is_set():
            x = torch.tanh(x @ x)

    prompts, seeds = rows_of(policy, 4)
    config = RolloutConfig(max_new_tokens=24)
    alone = GraphSampler(policy).sample(prompts, seeds, config)
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        found = GraphSampler(policy).sample(prompts, seeds, config)
    finally:
        stop.set()
        thread.join()
    assert [r.completion_ids for r in found] == [r.completion_ids for r in alone]
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(found, alone, strict=True))
