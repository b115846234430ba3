"""GradientGram in other trainers: the classes of examples/ in the real ones, against separate backwards."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from grpo_sweeps import GradientGram
from grpo_sweeps.engine.gram import GramError
from grpo_sweeps.models import tiny_path
from grpo_sweeps.spectra import effective_rank, singular_values

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
R, PROMPTS, STEPS = 4, 2, 3
MOST_LINES = 30


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)


def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_path())


def gram_of(losses: Any, model: Any, rows: int) -> torch.Tensor:
    """K by a backward per row: losses(i) is the part of the loss that is row i's."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(losses(i), parameters) for i in range(rows)]
    flat = torch.stack([torch.cat([g.flatten() for g in of_row]).double() for of_row in grads])
    return flat @ flat.T


@pytest.mark.parametrize("name", ["trl_trainer", "transformers_trainer"])
def test_an_example_is_short(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) <= MOST_LINES


def test_a_transformers_trainer_logs_the_spectrum_of_each_batch() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_path())
    texts = [f"Question: Tom has {i} apples.\nAnswer: #### {i}" for i in range(2, 2 + 2 * STEPS)]
    rows = [{"input_ids": ids, "labels": ids} for ids in (tokenizer(text)["input_ids"] for text in texts)]
    expected: list[float] = []

    class Checked(importlib.import_module("transformers_trainer").MeasuredTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            def own(i: int) -> torch.Tensor:
                labels = inputs["labels"].masked_fill(torch.arange(len(inputs["labels"]))[:, None] != i, -100)
                count = kwargs["num_items_in_batch"]
                return twin(input_ids=inputs["input_ids"], labels=labels, num_items_in_batch=count).loss

            twin = tiny()
            twin.load_state_dict(self.model.state_dict())
            expected.append(effective_rank(singular_values(gram_of(own, twin, len(inputs["labels"])))))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-3, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Checked(model=tiny(), args=settings, train_dataset=rows)
    trainer.train()
    logged = [one["spectral/effective_rank"] for one in trainer.state.log_history if "spectral/effective_rank" in one]
    assert len(logged) == STEPS and len(set(logged)) == STEPS
    np.testing.assert_allclose(logged, expected, rtol=1e-4)


def grpo_trainer(kind: type, reward: Any, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig

    asked = [f"Question: Tom has {i} apples and buys {i + 1} more. How many?\nAnswer:" for i in range(2, 10)]
    settings = {
        "output_dir": "out", "max_steps": STEPS, "per_device_train_batch_size": R * PROMPTS, "num_generations": R,
        "max_completion_length": 12, "learning_rate": 1e-3, "beta": 0.0, "bf16": False, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "seed": 3,
    }  # fmt: skip
    return kind(
        model=tiny(), reward_funcs=reward, args=GRPOConfig(**(settings | changes)),
        train_dataset=Dataset.from_dict({"prompt": asked}), processing_class=AutoTokenizer.from_pretrained(tiny_path()),
    )  # fmt: skip


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def test_trls_trainer_logs_what_separate_backwards_give() -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed (extra: trl)")
    expected: list[list[float]] = []

    class Checked(importlib.import_module("trl_trainer").MeasuredGRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            def own(i: int) -> torch.Tensor:
                """TRL's own loss, by its own fused log-probabilities, where only row i has an advantage."""
                alone = inputs["advantages"] * (torch.arange(len(inputs["advantages"])) == i)
                return plain._compute_loss(plain.model, {**inputs, "advantages": alone})

            plain.model.load_state_dict(self.model.state_dict())
            plain.current_gradient_accumulation_steps = self.current_gradient_accumulation_steps
            K, groups = gram_of(own, plain.model, R * PROMPTS), self.groups
            ranks = [effective_rank(singular_values(K[groups == g][:, groups == g])) for g in groups.unique()]
            expected.append(ranks)
            return super()._compute_loss(model, inputs)

    plain = grpo_trainer(trl.GRPOTrainer, by_length)
    plain.model.train()
    trainer = grpo_trainer(Checked, by_length)
    trainer.train()
    logged = [one["spectral/effective_rank"] for one in trainer.state.log_history if "spectral/effective_rank" in one]
    assert len(logged) == STEPS == len(expected) and all(len(ranks) == PROMPTS for ranks in expected)
    assert all(1 < rank < R for ranks in expected for rank in ranks)
    np.testing.assert_allclose(logged, np.mean(expected, axis=1), rtol=1e-4)


def test_the_refusal_names_trl_and_the_remedy() -> None:
    model = tiny()
    ids = torch.arange(3, 15).reshape(2, 6)
    remedy = r"TRL's GRPOTrainer.*model\(\.\.\.\)\.logits.*examples/trl_trainer\.py"
    with pytest.raises(GramError, match=remedy), GradientGram(model).measure([2]):
        hidden = model.base_model(ids).last_hidden_state
        (hidden @ model.lm_head.weight.T).log_softmax(-1)[..., 0].sum().backward()


def test_trls_own_loss_is_refused_by_that_sentence() -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed (extra: trl)")

    class Fused(importlib.import_module("trl_trainer").MeasuredGRPOTrainer):  # type: ignore[misc]
        _get_per_token_logps_and_entropies = trl.GRPOTrainer._get_per_token_logps_and_entropies

    with pytest.raises(GramError, match=r"TRL's GRPOTrainer.*examples/trl_trainer\.py"):
        grpo_trainer(Fused, by_length).train()
