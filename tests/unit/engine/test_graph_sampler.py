"""The graph sampler on a CPU, its decode step recorded by `tests.tape`, against the eager one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from grpo_sweeps.config import ModelConfig, RolloutConfig
from grpo_sweeps.engine.policy import Policy, load_policy
from grpo_sweeps.engine.rollouts import Rollout, row_seed
from grpo_sweeps.engine.samplers import decode, draw, graph, kernels, served
from grpo_sweeps.engine.samplers.eager import EagerSampler
from grpo_sweeps.engine.samplers.graph import GraphSampler
from grpo_sweeps.types import ConfigError
from tests.tape import HostRead, tape

PROMPTS = ["Question: 1+1?\nAnswer:", "a", "Question: a longer one, of many words?\nAnswer:", "7*8="]
CONFIG = RolloutConfig(max_new_tokens=24, batch=64)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


Make = Callable[[int], nn.Module]


def shape(kind: type, attention: str = "sdpa", without: tuple[str, ...] = (), **more: Any) -> Make:
    def make(vocabulary: int) -> nn.Module:
        keys = {key: value for key, value in SMALL.items() if key not in without}
        config = kind(vocab_size=vocabulary, **keys | more)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    return make


MODELS: dict[str, Make] = {
    "llama": shape(transformers.LlamaConfig),
    "llama, llama3 rope": shape(
        transformers.LlamaConfig, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64}
    ),
    "qwen2": shape(transformers.Qwen2Config, tie_word_embeddings=True),
    "qwen2, eager attention": shape(transformers.Qwen2Config, "eager"),
    "qwen2, a window on some layers": shape(
        transformers.Qwen2Config, use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "qwen3": shape(transformers.Qwen3Config, head_dim=16),
    "mistral, a window": shape(transformers.MistralConfig, sliding_window=12),
    "smollm3": shape(transformers.SmolLM3Config, pad_token_id=0),
    "nemotron": shape(transformers.NemotronConfig, head_dim=8),
    "phi3": shape(transformers.Phi3Config),
    "olmo2": shape(transformers.Olmo2Config),
    "gpt_neox": shape(transformers.GPTNeoXConfig, without=("num_key_value_heads",)),
    "gemma2, windows and softcaps": shape(
        transformers.Gemma2Config, "eager", head_dim=8, sliding_window=12, attn_logit_softcapping=0.5
    ),
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    """The embedded model, in float32."""
    return load_policy(ModelConfig(name="tiny", path="embedded"), torch.device("cpu"))


@pytest.fixture(params=MODELS)
def policy_of(request: pytest.FixtureRequest, policy: Policy) -> Policy:
    """A random model of each kind, its distribution sharp enough for long and short rollouts to be told apart."""
    torch.manual_seed(1)
    model = MODELS[request.param](len(policy.tokenizer)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)
    return dataclasses.replace(policy, model=model)


def rows_of(policy: Policy, repeats: int) -> tuple[list[list[int]], list[int]]:
    prompts = [ids for ids in policy.encode(PROMPTS) for _ in range(repeats)]
    return prompts, [row_seed("graph", i) for i in range(len(prompts))]


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    assert [r.completion_ids for r in found] == [r.completion_ids for r in expected]
    assert [(r.prompt_ids, r.text, r.truncated) for r in found] == [
        (r.prompt_ids, r.text, r.truncated) for r in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs.dtype == np.float32
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


def compare(
    policy: Policy, repeats: int = 4, config: RolloutConfig = CONFIG, stop: tuple[str, ...] = (), greedy: bool = False
) -> list[Rollout]:
    prompts, seeds = rows_of(policy, repeats)
    found = GraphSampler(policy, tape).sample(prompts, seeds, config, stop, greedy)
    assert_same(found, EagerSampler(policy).sample(prompts, seeds, config, stop, greedy))
    return found


def test_every_served_architecture_draws_what_eager_draws(policy_of: Policy) -> None:
    rollouts = compare(policy_of)
    assert len({r.completion_ids for r in rollouts}) > len(rollouts) / 2


def test_every_served_architecture_is_among_them() -> None:
    assert {name.split(",")[0] for name in MODELS} == set(served.SERVED)


def test_slots_take_what_is_said_of_them(policy_of: Policy) -> None:
    prompts, seeds = rows_of(policy_of, 1)
    sampler = GraphSampler(policy_of, tape)
    sampler.sample(prompts, seeds, CONFIG)
    step = sampler.step
    assert step is not None and step._cache is not None
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in step._cache.layers)
    assert taken == (step.slots + 1) * decode.slot_bytes(policy_of, step.length)


def test_no_more_rows_at_once_than_there_is_room_for(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where longer rows come later: the slots that there were would be too many of the longer ones."""
    room = 6 * decode.slot_bytes(policy, 64)
    monkeypatch.setattr(GraphSampler, "_room", lambda self, longest: room // decode.slot_bytes(policy, longest))
    sampler = GraphSampler(policy, tape)
    for limit in (8, 90):
        prompts, seeds = rows_of(policy, 4)
        config = dataclasses.replace(CONFIG, max_new_tokens=limit)
        assert_same(sampler.sample(prompts, seeds, config), EagerSampler(policy).sample(prompts, seeds, config))
        assert sampler.step is not None
        assert 1 <= sampler.step.slots <= room // decode.slot_bytes(policy, sampler.step.length)


@pytest.mark.parametrize("batch", [64, 9, 3, 1])
def test_freed_slots_take_the_next_rows(policy: Policy, batch: int) -> None:
    rollouts = compare(policy, 6, dataclasses.replace(CONFIG, batch=batch))
    assert len({r.length for r in rollouts}) > 3  # rows end at different times


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_temperature(policy: Policy, temperature: float) -> None:
    compare(policy, config=dataclasses.replace(CONFIG, temperature=temperature))


def test_greedy(policy: Policy) -> None:
    compare(policy, greedy=True)


def test_stop_strings(policy: Policy) -> None:
    rollouts = compare(policy, 8, stop=("4", "\n", "12"))
    assert sum(not r.truncated for r in rollouts) > len(rollouts) / 2


def test_several_end_tokens(policy: Policy) -> None:
    free = compare(policy)
    often = max((t for r in free for t in r.completion_ids), key=[t for r in free for t in r.completion_ids].count)
    ended = compare(dataclasses.replace(policy, eos_ids=(*policy.eos_ids, often)))
    assert sum(r.length for r in ended) < sum(r.length for r in free)


@pytest.mark.parametrize("limit", [1, 7, 8, 9])
def test_limits_beside_a_look(policy: Policy, limit: int) -> None:
    compare(policy, config=dataclasses.replace(CONFIG, max_new_tokens=limit))


def test_a_prompt_of_one_token(policy: Policy) -> None:
    prompts, seeds = [[5], [5], [7, 9, 5], [5]], [1, 2, 3, 4]
    found = GraphSampler(policy, tape).sample(prompts, seeds, CONFIG)
    assert_same(found, EagerSampler(policy).sample(prompts, seeds, CONFIG))


def test_no_rows(policy: Policy) -> None:
    assert GraphSampler(policy, tape).sample([], [], CONFIG) == []


def test_prompts_are_read_in_parts(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_sweeps.engine.samplers.graph.PROMPT_TOKENS", 50)
    compare(policy)


def test_one_recording_follows_weights_that_change_in_place(policy: Policy) -> None:
    policy = dataclasses.replace(policy, model=copy_of(policy.model))
    recordings = []
    sampler = GraphSampler(policy, lambda step: recordings.append(1) or tape(step))
    prompts, seeds = rows_of(policy, 4)
    last: list[Rollout] = []
    for _ in range(3):
        found = sampler.sample(prompts, seeds, CONFIG)
        assert_same(found, EagerSampler(policy).sample(prompts, seeds, CONFIG))
        assert [r.completion_ids for r in found] != [r.completion_ids for r in last]
        last, once = found, len(recordings)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.05)
    sampler.sample(prompts, seeds, CONFIG)
    assert len(recordings) <= once + 1  # a size that was not needed before, at most


def test_a_weight_that_moved_is_recorded_anew_and_said(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    policy = dataclasses.replace(policy, model=copy_of(policy.model))
    sampler = GraphSampler(policy, tape)
    prompts, seeds = rows_of(policy, 2)
    sampler.sample(prompts, seeds, CONFIG)
    for parameter in policy.model.parameters():
        parameter.data = parameter.data * 1.1
    with caplog.at_level("INFO"):
        found = sampler.sample(prompts, seeds, CONFIG)
    assert_same(found, EagerSampler(policy).sample(prompts, seeds, CONFIG))
    assert "recorded anew, since the weights' place or dtype changed" in caplog.text


def test_another_dtype_is_recorded_anew(policy: Policy) -> None:
    policy = dataclasses.replace(policy, model=copy_of(policy.model))
    sampler = GraphSampler(policy, tape)
    prompts, seeds = rows_of(policy, 3)
    sampler.sample(prompts, seeds, CONFIG)
    policy.model.to(torch.float64)
    assert_same(sampler.sample(prompts, seeds, CONFIG), EagerSampler(policy).sample(prompts, seeds, CONFIG))


def test_fewer_rows_go_through_the_step_of_more(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recording serves every smaller call, and no call has more rows at once than it may."""
    recordings = []
    sampler = GraphSampler(policy, lambda step: recordings.append(1) or tape(step))
    live, place = list[int](), decode.DecodeStep.place

    def counted(step: decode.DecodeStep, b: int, tokens_B: np.ndarray, *rest: np.ndarray) -> None:
        live.append(len(tokens_B))
        place(step, b, tokens_B, *rest)

    monkeypatch.setattr(decode.DecodeStep, "place", counted)
    for repeats, batch in ((6, 64), (5, 64), (1, 64), (6, 5), (6, 64)):
        prompts, seeds = rows_of(policy, repeats)
        config = dataclasses.replace(CONFIG, batch=batch)
        live.clear()
        found = sampler.sample(prompts, seeds, config)
        assert_same(found, EagerSampler(policy).sample(prompts, seeds, config))
        assert max(live) <= min(batch, len(prompts))
    assert len(recordings) == 1


def test_prompts_that_come_back_later_are_read_again_and_not_kept(policy: Policy) -> None:
    prompts, seeds = rows_of(policy, 1)
    prompts, seeds, config = prompts * 4, list(range(16)), dataclasses.replace(CONFIG, batch=3)
    sampler, kept = GraphSampler(policy, tape), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        admit = graph._Call._admit
        patch.setattr(graph._Call, "_admit", lambda self: (admit(self), kept.append(len(self.read))))
        found = sampler.sample(prompts, seeds, config)
    assert_same(found, EagerSampler(policy).sample(prompts, seeds, config))
    assert max(kept) <= 1


def test_an_interrupted_call_leaves_the_next_one_right(policy: Policy) -> None:
    sampler = GraphSampler(policy, tape)
    prompts, seeds = rows_of(policy, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph._Call, "_keep", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(prompts, seeds, CONFIG)
    assert_same(sampler.sample(prompts, seeds, CONFIG), EagerSampler(policy).sample(prompts, seeds, CONFIG))


def test_more_rows_or_longer_ones_get_new_slots(policy: Policy) -> None:
    sampler = GraphSampler(policy, tape)
    for repeats, limit in ((1, 8), (5, 8), (2, 90), (5, 24)):
        prompts, seeds = rows_of(policy, repeats)
        config = dataclasses.replace(CONFIG, max_new_tokens=limit)
        assert_same(sampler.sample(prompts, seeds, config), EagerSampler(policy).sample(prompts, seeds, config))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was(policy: Policy, training: bool) -> None:
    policy = dataclasses.replace(policy, model=copy_of(policy.model).train(training))
    before = [dict(vars(m)) for m in policy.model.modules()], policy.model.config.to_dict()
    sampled(policy)
    after = [dict(vars(m)) for m in policy.model.modules()], policy.model.config.to_dict()
    assert [list(v) for v in after[0]] == [list(v) for v in before[0]]
    assert all("forward" not in v for v in after[0])
    assert after[1] == before[1]
    assert policy.model.training is training
    assert policy.model.config._attn_implementation == "sdpa"
    assert decode.ATTENTION not in decode.ALL_ATTENTION_FUNCTIONS


def test_the_model_is_as_it_was_after_a_failed_recording(policy: Policy) -> None:
    policy = dataclasses.replace(policy, model=copy_of(policy.model))

    def fails(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        step()
        raise RuntimeError("no graph")

    with pytest.raises(RuntimeError, match="no graph"):
        GraphSampler(policy, fails).sample(*rows_of(policy, 1), CONFIG)
    assert decode.ATTENTION not in decode.ALL_ATTENTION_FUNCTIONS
    assert policy.model.config._attn_implementation == "sdpa"


def test_compiled_regions_leave_nothing_behind(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *a, **k: function(*a, **k))
    model = copy_of(policy.model)
    source = __import__(type(model).__module__, fromlist=["_"])
    rotary = source.apply_rotary_pos_emb
    with decode.compiled_regions(model):
        assert sum("forward" in vars(m) for m in model.modules()) >= 2 * len(model.model.layers)
        assert source.apply_rotary_pos_emb is not rotary
    assert not any("forward" in vars(m) for m in model.modules())
    assert source.apply_rotary_pos_emb is rotary


def test_a_step_that_cannot_be_compiled_is_recorded_as_it_is_and_said(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C compiler\nmore")

    monkeypatch.setattr(torch, "compile", lambda function, **_: no_compiler)
    monkeypatch.setattr(decode, "COMPILED_ON", "cpu")
    compare(policy)
    assert "the decode step is not compiled, and slower (RuntimeError: no C compiler)" in caplog.text
    assert not any("forward" in vars(m) for m in policy.model.modules())


def test_lora_is_served(policy: Policy) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy_of(policy.model), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    lora = dataclasses.replace(policy, model=model.eval())
    sampler = GraphSampler(lora, tape)
    prompts, seeds = rows_of(lora, 4)
    with_adapter = sampler.sample(prompts, seeds, CONFIG)
    assert_same(with_adapter, EagerSampler(lora).sample(prompts, seeds, CONFIG))
    model.set_scale("default", 3.0) if hasattr(model, "set_scale") else scaled(model, 3.0)
    assert_same(sampler.sample(prompts, seeds, CONFIG), EagerSampler(lora).sample(prompts, seeds, CONFIG))
    with model.disable_adapter():
        without = sampler.sample(prompts, seeds, CONFIG)
        assert_same(without, EagerSampler(lora).sample(prompts, seeds, CONFIG))
    assert [r.completion_ids for r in without] != [r.completion_ids for r in with_adapter]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            shape(transformers.GPT2Config, without=("intermediate_size", "num_key_value_heads")),
            "models of type gpt2 are not served",
        ),
        (
            shape(transformers.LlamaConfig, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope type dynamic",
        ),
        (
            shape(
                transformers.SmolLM3Config,
                pad_token_id=0,
                use_sliding_window=False,
                sliding_window=5,
                layer_types=["sliding_attention"] * 3,
            ),
            "layers with a window, and windows switched off",
        ),
        (shape(transformers.LlamaConfig, is_causal=False), "not causal"),
    ],
)
def test_what_is_not_served_is_named(policy: Policy, model: Make, reason: str) -> None:
    other = dataclasses.replace(policy, model=model(len(policy.tokenizer)))
    with pytest.raises(ConfigError, match=f"rollout.engine=graph: .*{reason}.*; choose auto or eager"):
        GraphSampler(other, tape)


def test_a_cpu_is_refused(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="it needs a CUDA GPU, and the policy is on cpu"):
        GraphSampler(policy)


def test_a_step_that_reads_on_the_host_cannot_be_recorded() -> None:
    x = torch.ones(3)
    with pytest.raises(HostRead):
        tape(lambda: x * float(x.sum()))


def test_attention_with_more_than_is_known_is_refused(policy: Policy) -> None:
    step = decode.DecodeStep(policy, 1, 8, tape)
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(NotImplementedError, match="attention with s_aux is not known"):
        step._attention(policy.model, x, x, x, None, s_aux=x)


def test_float64_is_not_for_the_kernels() -> None:
    assert "the policy is in float64" in kernels.fault(torch.device("cpu"), torch.float64)


def test_where_the_kernels_fail_their_trial_the_draw_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the eager engine too, which is what takes over there."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(kernels, "fault", lambda device, dtype: "no C compiler")
    logits_BV, uniforms_B1 = torch.randn(3, 50), torch.rand(3, 1, dtype=torch.float64)
    found = draw.draw(logits_BV.as_subclass(OnGpu), uniforms_B1, 1.0)
    assert torch.equal(found[0], draw.plain(logits_BV, uniforms_B1, 1.0)[0])


def scaled(model: Any, scale: float) -> None:
    for module in model.modules():
        if hasattr(module, "merged"):
            module.set_scale("default", scale)


def copy_of(model: nn.Module) -> Any:
    return copy.deepcopy(model)


def sampled(policy: Policy) -> list[Rollout]:
    return GraphSampler(policy, tape).sample(*rows_of(policy, 3), CONFIG, ("4",))
