"""What is not covered is refused by name; the model is as it was after every block; mutations (check 6) are caught."""

import pytest
import torch
from torch import nn

from grpo_sweeps.engine.gram import GradientGram, GramCheckError, GramError, Measurement, verify_against_autograd
from grpo_sweeps.engine.gram import embedding as embedding_module
from grpo_sweeps.engine.gram import layout as layout_module
from grpo_sweeps.engine.gram.linear import WeightSums
from grpo_sweeps.engine.gram.norm import RowWeightRecorder, takes_row_weights
from grpo_sweeps.engine.gram.recorder import Rows
from grpo_sweeps.engine.gram.uses import layer_of
from tests.unit.engine.gram_oracle import batch, build, head_sums, measured, plain_sums

WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)


class Chain(nn.Module):
    """A stand-in for a model: modules applied one after the other, then summed to one number a row."""

    def __init__(self, *modules):
        super().__init__()
        self.steps = nn.ModuleList(modules)

    def forward(self, x):
        for module in self.steps:
            x = module(x)
        return x.square().flatten(1).sum(1)


def run(model, x, rows=2, weights=None):
    with GradientGram(model).measure([rows], weights) as m:
        model(x).sum().backward()
    return m


def x3(rows=2):
    return torch.randn(rows, 3, 4, generator=torch.Generator().manual_seed(0))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.gain


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class BatchRMSNorm(nn.Module):
    """Looks like an RMS norm, but takes its scale over the whole batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * x / x.square().mean().sqrt()


@pytest.mark.parametrize(
    "module, named",
    [
        (Scale(), r"steps\.0\.gain.*Scale"),
        (Doubled(4, 4), r"steps\.0\.weight.*Doubled"),
        (nn.Conv1d(4, 4, 1), r"steps\.0\.weight.*Conv1d"),
        (nn.BatchNorm1d(4), r"steps\.0.*BatchNorm1d.*over the batch"),
        (BatchRMSNorm(), r"steps\.0\.weight.*BatchRMSNorm"),
        (nn.Embedding(4, 4, sparse=True), r"steps\.0.*sparse"),
        (nn.LayerNorm((3, 4)), r"steps\.0\.weight.*LayerNorm"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), r"parametrizations\.weight\.original0"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_unknown_parameters_are_named(module, named):
    with pytest.raises(GramError, match=named):
        GradientGram(Chain(module))
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if "BatchNorm" not in type(module).__name__:
        GradientGram(Chain(module, nn.Linear(4, 4)))  # frozen parameters are nobody's business


def test_shared_weights_are_named():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with pytest.raises(GramError, match=r"steps\.0\.weight is shared by steps\.0 .* and steps\.1"):
        GradientGram(Chain(first, second))


def test_a_module_called_twice_is_named_before_anything_is_added():
    linear = nn.Linear(4, 4)
    model = Chain(linear, nn.SiLU(), linear)
    with pytest.raises(GramError, match=r"module steps\.0 was called 2 times"):
        run(model, x3())
    assert linear.weight.grad is None and "forward" not in linear.__dict__


def test_second_forward_and_second_backward_are_refused():
    model = Chain(nn.Linear(4, 4))
    gram = GradientGram(model)
    with pytest.raises(GramError, match="called 2 times"), gram.measure([2]):
        model(x3()).sum().backward()
        model(x3())
    with pytest.raises(GramError, match="second backward"), gram.measure([2]):
        rows = model(x3()).sum()
        rows.backward(retain_graph=True)
        rows.backward()


def test_forward_without_gradient_inside_a_block_is_free():
    model = Chain(nn.Linear(4, 4))
    with GradientGram(model).measure([2]) as m:
        with torch.no_grad():
            model(x3(5))
        model(x3()).sum().backward()
    assert m.check() < 1e-6


def test_backward_outside_the_block_and_reading_too_early():
    model = Chain(nn.Linear(4, 4))
    gram = GradientGram(model)
    with gram.measure([2]) as m:
        rows = model(x3()).sum()
    with pytest.raises(GramError, match="nothing was measured"):
        m.matrices()
    with pytest.raises(GramError, match="inside the measure"):
        rows.backward()


@pytest.mark.parametrize(
    "x, message",
    [(torch.randn(1, 6, 4), "packed rows"), (torch.randn(6, 4), "flattened tokens"), (torch.randn(3, 3, 4), "3 rows")],
)
def test_rows_that_cannot_be_told_apart(x, message):
    with pytest.raises(GramError, match=rf"module steps\.0.*{message}"):
        run(Chain(nn.Linear(4, 4)), x)


def test_position_ids_of_one_row_are_refused_by_name():
    model, b = build("gpt2", True), batch(4)
    with pytest.raises(GramError, match=r"transformer\.wpe.*\(1, T\)"), GradientGram(model).measure([4]):
        model(input_ids=b.input_ids).logits.sum().backward()


def test_autocast_is_refused():
    model = Chain(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(GramError, match="autocast"):
        run(model, x3())
    with (
        pytest.raises(GramError, match="autocast"),
        GradientGram(model).measure([2]),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(x3())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(group_sizes=[]), "group_sizes"),
        (dict(group_sizes=[2, 0]), "group_sizes"),
        (dict(group_sizes=[2], weights=[1.0]), "one weight per row"),
        (dict(group_sizes=[2], weights=[1.0, float("nan")]), "finite"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(GramError, match=message), GradientGram(Chain(nn.Linear(4, 4))).measure(**arguments):
        raise AssertionError("must not be entered")


def test_cross_products_must_have_been_asked_for():
    model = Chain(nn.Linear(4, 4))
    with GradientGram(model).measure([1, 1]) as m:
        model(x3()).sum().backward()
    for read in (m.matrix, m.check):
        with pytest.raises(GramError, match="cross_groups=True"):
            read()
    with pytest.raises(GramError, match="whole, layer or parameter"):
        m.matrices(by="module")


def test_changes_since_the_claim_are_named():
    model = Chain(nn.Linear(4, 4), nn.Linear(4, 4))
    gram = GradientGram(model)
    model.steps[1].bias.requires_grad_(False)
    with pytest.raises(GramError, match=r"steps\.1\.bias was frozen"), gram.measure([2]):
        raise AssertionError("must not be entered")


def test_blocks_do_not_nest():
    model = Chain(nn.Linear(4, 4))
    gram = GradientGram(model)
    with gram.measure([2]) as m:
        with pytest.raises(GramError, match="another measure"), gram.measure([2]):
            raise AssertionError("must not be entered")
        model(x3()).sum().backward()
    assert m.check() < 1e-6


@pytest.mark.parametrize("name", ["llama", "nemotron"])
def test_model_is_as_it_was_also_after_an_exception(name):
    model, b = build(name, True), batch(4)
    before = {n: set(m.__dict__) for n, m in model.named_modules()}
    expected = plain_sums(model, b)
    measured(model, b, [4])
    with pytest.raises(ZeroDivisionError), GradientGram(model).measure([4]):
        plain_sums(model, b)
        raise ZeroDivisionError
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == before
    assert torch.equal(plain_sums(model, b), expected)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


def fused(model, b):
    """A loss that reads the head's weight instead of running the head."""
    hidden = model.model(input_ids=b.input_ids, attention_mask=b.attention_mask, use_cache=False)[0]
    return (hidden @ model.lm_head.weight.T).log_softmax(-1)[..., 3].sum(1)


def test_a_weight_read_around_its_module():
    """A fused loss reads lm_head.weight: its gradient comes, its rows do not."""
    model, b = build("llama", False), batch(4)

    with pytest.raises(GramError, match=r"lm_head\.weight gained a gradient that did not pass through module lm_head"):
        measured(model, b, [4], None, fused)


@pytest.mark.parametrize(
    "weights, message",
    [
        (WEIGHTS, "the measured gradient has norm"), (None, "the measured gradient has norm"),
        ([1.0] * 4, r"w'Kw = \S+ but ordinary autograd's gradient"),
    ],
)  # fmt: skip
def test_verification_sees_a_weight_read_beside_its_module(weights, message, monkeypatch):
    """With unit weights even the gradient is right, and w'Kw fits it. The block sees it too where .grad was empty."""
    model, b = build("llama", False), batch(4)

    def regularised(model=model, b=b):
        return plain_sums(model, b) + model.lm_head.weight.sum() * torch.arange(4)

    with pytest.raises(
        GramError, match=r"lm_head\.weight gained a gradient of norm .* something else reads the weight"
    ):
        measured(model, b, [4], None, regularised)
    monkeypatch.setattr(Measurement, "_refuse_bypasses", lambda *_: None)
    measured(model, b, [4], None, regularised).check()
    with pytest.raises(GramCheckError, match=rf"parameter lm_head\.weight: {message}"):
        verify_against_autograd(model, GradientGram(model), regularised, [4], weights)


def test_a_fused_loss_on_a_tied_weight_is_refused():
    """The embedding's module runs, so the weight has a record; what the head's own product adds goes around it."""
    model, b = build("llama", True), batch(4)

    with pytest.raises(GramError, match=r"embed_tokens\.weight gained a gradient of norm"):
        measured(model, b, [4], None, fused)


def test_row_weight_probe():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert takes_row_weights(LlamaRMSNorm(6))
    assert not takes_row_weights(BatchRMSNorm())


def test_layer_names():
    assert layer_of("model.layers.11.mlp.up_proj.weight") == "model.layers.11"
    assert layer_of("base_model.model.model.layers.2.q.lora_A.default.weight") == "base_model.model.model.layers.2"
    assert layer_of("model.norm.weight") == "model.norm"


# Mutations: each is a mistake that someone could make; the run-time check must miss none.


def mutate_tied_cross_term(monkeypatch):
    gradients = embedding_module.TiedLink.head_row_gradients
    monkeypatch.setattr(embedding_module.TiedLink, "head_row_gradients", lambda *args: 0 * gradients(*args))


def mutate_one_norm(monkeypatch):
    keep = RowWeightRecorder.keep

    def skipping(self, grad, rows):
        if self.name == "model.layers.1.input_layernorm.weight":
            rows = Rows(0 * rows.values, rows.total)
        return keep(self, grad, rows)

    monkeypatch.setattr(RowWeightRecorder, "keep", skipping)


def mutate_scale(monkeypatch):
    inner = layout_module.unit_inner
    monkeypatch.setattr(layout_module, "unit_inner", lambda left, right: inner(left, right) / left.shape[0])


def mutate_drop_last_block(monkeypatch):
    keep = WeightSums._keep

    def dropping(self, gram, sq_norm):
        keep(self, 0 * gram if self.grad.shape[1] == 24 else gram, sq_norm)

    monkeypatch.setattr(WeightSums, "_keep", dropping)


def mutate_swap_rows(monkeypatch):
    inner = layout_module.unit_inner
    monkeypatch.setattr(layout_module, "unit_inner", lambda left, right: inner(left.flip(0), right.flip(0)))


@pytest.mark.parametrize("sums", [plain_sums, head_sums])
@pytest.mark.parametrize(
    "mutate", [mutate_tied_cross_term, mutate_one_norm, mutate_scale, mutate_drop_last_block, mutate_swap_rows]
)
def test_the_check_catches_mutations(mutate, sums, monkeypatch):
    model, b = build("llama", True), batch(4)
    assert measured(model, b, [4], WEIGHTS, sums, form="blocks").check() < 1e-12
    mutate(monkeypatch)
    m = measured(model, b, [4], WEIGHTS, sums, form="blocks")
    with pytest.raises(GramCheckError, match=r"w'Kw = \S+ but the gradient that was added has squared norm \S+"):
        m.check()


def test_the_check_does_not_pass_on_nan():
    model = Chain(nn.Linear(4, 4))
    with GradientGram(model).measure([2]) as m:
        (model(x3()) * float("nan")).sum().backward()
    with pytest.raises(GramCheckError):
        m.check()
