"""What training setups do to a block: LoRA in its variants, frozen parameters, several micro-batches a step,
checkpointing that makes no product twice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grpo_sweeps.engine.gram import GradientGram, GramError
from tests.unit.engine.gram_oracle import (
    SUMS,
    Batch,
    batch,
    build,
    measured,
    oracle_rows,
    plain_sums,
    relative,
    trainable,
    whole,
)

TOL = 1e-12
WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25], dtype=torch.float64)


def adapted(name="llama", tied=True, **settings):
    peft = pytest.importorskip("peft", reason="the lora extra is not installed")
    given = {"r": 3, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | settings
    return peft.get_peft_model(build(name, tied), peft.LoraConfig(**given)).double().eval()


def assert_exact(model, sums, b=None):
    b = batch(5) if b is None else b
    rows = oracle_rows(model, b, sums)
    m = measured(model, b, [5], WEIGHTS, sums)
    assert relative(m.matrix(), whole(rows)) < TOL
    assert m.check() < TOL
    for name, parameter in trainable(model).items():
        assert (parameter.grad.flatten() - WEIGHTS @ rows[name]).norm() < TOL * (1 + rows[name].norm()), name
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("active, count", [(["default"], 28), (["other"], 28), (["default", "other"], 56)])
def test_several_adapters(active, count, path):
    """Those that are not active are frozen by peft and take no part."""
    model = adapted()
    model.add_adapter("other", model.peft_config["default"])
    model.double().base_model.set_adapter(active)
    assert len(trainable(model)) == count
    assert_exact(model, SUMS[path])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("path", list(SUMS))
def test_adapters_with_dropout(path, checkpointing):
    """A row's mask is its own; a recomputation draws it again from the state that checkpointing keeps."""
    model = adapted(lora_dropout=0.3)
    if checkpointing:
        model.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    SUMS[path](model, batch(5))  # the head looks at a model once

    def same_masks(model, b):
        torch.manual_seed(3)
        return SUMS[path](model, b)

    assert not torch.equal(SUMS[path](model, batch(5)), SUMS[path](model, batch(5)))
    assert_exact(model, same_masks)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("saved", [["norm"], ["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_modules_trained_beside_the_adapters(saved, tied):
    assert_exact(adapted(tied=tied, modules_to_save=saved), plain_sums)


@pytest.mark.parametrize("settings", [dict(bias="all"), dict(target_modules=["q_proj", "lm_head"])], ids=str)
def test_other_settings_of_peft(settings):
    assert_exact(adapted("qwen2", False, **settings), plain_sums)


@pytest.mark.parametrize(
    "settings, named",
    [
        (dict(use_dora=True), r"q_proj\.lora_magnitude_vector\.default\.weight.*DoraLinearLayer"),
        (dict(target_modules=["embed_tokens"]), r"embed_tokens\.lora_embedding_A\.default"),
        (dict(trainable_token_indices=[1, 2]), r"embed_tokens\.token_adapter\.trainable_tokens_delta\.default"),
    ],
    ids=["dora", "embedding adapter", "trainable tokens"],
)
def test_what_peft_adds_and_nobody_knows_is_named(settings, named):
    with pytest.raises(GramError, match=named):
        GradientGram(adapted(tied=False, **settings))


@pytest.mark.parametrize(
    "settings, named",
    [(dict(modules_to_save=["lm_head"]), "ModulesToSaveWrapper"), (dict(target_modules=["lm_head"]), "a Linear")],
    ids=["saved", "adapted"],
)
def test_a_head_inside_a_wrapper_goes_through_logits(settings, named):
    with pytest.raises(GramError, match=rf"the output head is .*{named}.*model\(\.\.\.\)\.logits instead"):
        SUMS["head"](adapted(tied=False, **settings), batch(5))


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]], [[0, 1, 2]]], ids=str)
def test_micro_batches_of_one_and_of_several_groups(groups, path):
    """Each group's Gram, whatever shares its micro-batch, and one gradient over all of them."""
    model, b = build("llama", True), batch(6)
    weights = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.25, 0.0], dtype=torch.float64)
    rows = oracle_rows(model, b)
    gram, found = GradientGram(model), []
    for micro_batch in groups:
        chosen = slice(2 * micro_batch[0], 2 * micro_batch[-1] + 2)
        part = Batch(b.input_ids[chosen], b.attention_mask[chosen], b.completion_mask[chosen])
        with gram.measure([2] * len(micro_batch), weights[chosen]) as m:
            SUMS[path](model, part).sum().backward()
        found += m.matrices()
    for g, matrix in enumerate(found):
        assert relative(matrix, whole(rows)[2 * g : 2 * g + 2, 2 * g : 2 * g + 2]) < TOL
    for name, parameter in trainable(model).items():
        assert (parameter.grad.flatten() - weights @ rows[name]).norm() < TOL * (1 + rows[name].norm()), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "nemotron"])
def test_checkpointing_makes_no_more_products_than_it_must(name, reentrant, monkeypatch):
    """A recomputation ends at the last tensor that is needed: the last product of a layer is not made again. A block
    may make it again the first time, while it finds out where that is."""
    model, b = build(name, True), batch(5)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    products, linear = [], F.linear

    def counting(x, weight, bias=None):
        products.append(torch._C._current_graph_task_id() != -1)
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", counting)

    def in_backward(step):
        products.clear()
        model.zero_grad()
        step()
        return sum(products)

    gram = GradientGram(model)

    def block():
        with gram.measure([5], WEIGHTS):
            plain_sums(model, b).sum().backward()

    plain = in_backward(lambda: (plain_sums(model, b) * WEIGHTS).sum().backward())
    assert plain > 0
    assert in_backward(block) <= plain + (0 if reentrant else 2)
    # a plain recomputation begins the last product of both layers, and is stopped in it
    assert in_backward(block) == plain - (0 if reentrant else 2)


class Block(nn.Module):
    """What follows a measured module: an activation in place, and a hook that changes the gradient of its output."""

    def __init__(self, kind: str, hooked: bool) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        made = {"linear": nn.Linear(6, 7), "conv1d": Conv1D(7, 6), "norm": nn.LayerNorm(6)}
        self.embed, self.first, self.hooked = nn.Embedding(11, 6), made[kind], hooked
        self.last = nn.Linear(6 if kind == "norm" else 7, 3)

    def forward(self, ids_BT):
        x = self.embed(ids_BT)
        x.mul_(1.5)
        y = self.first(x)
        if self.hooked:
            y.register_hook(lambda g: 0.5 * g.clamp(-0.2, 0.2))
        return self.last(y if self.hooked else torch.relu_(y)).tanh().sum((1, 2))


@pytest.mark.parametrize("hooked", [False, True], ids=["in_place", "hooked"])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "norm"])
def test_what_follows_a_measured_module_may_change_its_output_or_its_gradient(kind, hooked):
    torch.manual_seed(0)
    model = Block(kind, hooked).double()
    ids = torch.randint(0, 11, (4, 5))
    names = list(trainable(model))
    rows = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(model(ids[r : r + 1]).sum(), list(trainable(model).values()))]
        )
        for r in range(4)
    ]
    expected = torch.stack(rows)
    with GradientGram(model).measure([4]) as m:
        model(ids).sum().backward()
    assert relative(m.matrix(), expected @ expected.T) < 1e-12
    grads = torch.cat([dict(model.named_parameters())[name].grad.flatten() for name in names])
    assert relative(grads, expected.sum(0)) < 1e-12
