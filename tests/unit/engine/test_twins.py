"""A small random twin of every model in conf/model: real tying, grouped-query attention, biases, norm and head size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.engine.policy import Policy
from grpo_sweeps.models.shapes import SHAPES, twin_config
from tests.sampling import sample
from tests.unit.engine.gram_oracle import SUMS, batch, measured, oracle_rows, relative, whole

WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25], dtype=torch.float64)


def twin(name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(twin_config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def test_every_model_of_conf_has_a_twin() -> None:
    names = {path.stem for path in (Path(__file__).parents[3] / "conf" / "model").glob("*.yaml")}
    assert names - {"tiny"} == set(SHAPES)


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_gram_of_a_twin(name: str, path: str) -> None:
    model, b = twin(name), batch(5)
    m = measured(model, b, [5], WEIGHTS, SUMS[path])
    assert relative(m.matrix(), whole(oracle_rows(model, b))) < 1e-12


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_twin_is_sampled_as_it_is_scored(name: str) -> None:
    """Left-padded with a cache against right-padded without: positions, masks and the head agree."""
    from grpo_sweeps.engine.head import completion_log_probs
    from grpo_sweeps.engine.rollouts import collate

    policy = Policy(twin(name, torch.float32), Characters(), (2,), 2, torch.device("cpu"))  # type: ignore[arg-type]
    rollouts = sample(policy, [[5, 6, 7], [8], [9, 10, 11, 12, 13]], [0, 1, 2], RolloutConfig(max_new_tokens=6))
    b = collate(rollouts, policy.pad_id, policy.device)
    scored = completion_log_probs(policy.model, b.input_ids_BT, b.attention_mask_BT, b.completion_mask_BT)
    for rollout, row in zip(rollouts, scored.sum(1).tolist(), strict=True):
        assert row == pytest.approx(float(rollout.logprobs.sum()), abs=1e-3)


class Characters:
    """As much of a tokenizer as the sampler needs."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids)
