"""A group in parts gives what the oracle gives for the group at once: Gram, gradient, norms and checks."""

import dataclasses

import pytest
import torch

from grpo_sweeps.engine.gram import GradientGram, GramCheckError, GramError
from grpo_sweeps.engine.gram.large_group import Store, together
from tests.unit.engine.gram_oracle import (
    ARCHITECTURES,
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
WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25, 1.5, 0.7], dtype=torch.float64)
PARTS = (slice(0, 3), slice(3, 6), slice(6, 7))


def part_of(b, rows):
    """The rows without the columns where all of them have padding, so that parts differ in length."""
    kept = b.attention_mask[rows].any(0)
    return Batch(*(getattr(b, item.name)[rows][:, kept] for item in dataclasses.fields(b)))


def in_parts(gram, b, sums=plain_sums, parts=PARTS, weights=WEIGHTS, **options):
    with gram.measure_group(len(b.input_ids), weights, **options) as group:
        for rows in parts:
            with group.part(rows.stop - rows.start):
                sums(gram.model, part_of(b, rows)).sum().backward()
    return group


def assert_equals_oracle(group, model, rows):
    gram = whole(rows)
    assert relative(group.matrix(), gram) < TOL
    assert torch.equal(group.matrices()[0], group.matrix())
    for name, parameter in trainable(model).items():
        assert (group.parameter_matrix(name) - rows[name] @ rows[name].T).abs().max() < TOL * gram.abs().max(), name
        weighted = WEIGHTS @ rows[name]
        assert (parameter.grad.flatten() - weighted).norm() < TOL * (1 + rows[name].norm()), name
        assert group.parameter_grad_sq_norm(name) == pytest.approx(float(weighted @ weighted), rel=1e-11, abs=1e-11)
    assert group.check() < TOL


@pytest.mark.parametrize("form", ["blocks", "ghost"])
@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_equals_separate_backward_passes(name, tied, path, form):
    model, b = build(name, tied), batch(7)
    rows = oracle_rows(model, b)
    assert_equals_oracle(in_parts(GradientGram(model, form=form), b, SUMS[path]), model, rows)


@pytest.mark.parametrize("path", list(SUMS))
@pytest.mark.parametrize("parts", [[slice(i, i + 1) for i in range(7)], [slice(0, 7)]], ids=["single rows", "one part"])
def test_size_of_the_parts_does_not_matter(parts, path):
    model, b = build("llama", True), batch(7)
    rows = oracle_rows(model, b)
    assert_equals_oracle(in_parts(GradientGram(model), b, SUMS[path], parts), model, rows)


@pytest.mark.parametrize("path", list(SUMS))
def test_under_checkpointing_and_compiled(path):
    model, b = build("qwen2", True), batch(7)
    rows = oracle_rows(model, b)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    SUMS[path](model, b)
    for layer in model.get_decoder().layers:
        layer.compile(backend="eager")
    assert_equals_oracle(in_parts(GradientGram(model), b, SUMS[path]), model, rows)


def test_partly_frozen_model():
    model, b = build("qwen2", True), batch(7)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj.bias" in name or "down_proj" in name or "embed" in name)
    rows = oracle_rows(model, b)
    assert_equals_oracle(in_parts(GradientGram(model), b), model, rows)


def test_several_groups_accumulate():
    model, b = build("llama", True), batch(7)
    rows = oracle_rows(model, b)
    gram = GradientGram(model)
    for _ in range(2):
        assert in_parts(gram, b).check() < TOL
    for name, parameter in trainable(model).items():
        assert torch.allclose(parameter.grad.flatten(), 2 * WEIGHTS @ rows[name], atol=1e-11), name


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_passes_its_checks(dtype, size):
    """Also that of the gradient in .grad, which rounds once a part."""
    model, b = build("llama", True, dtype), batch(12)
    weights = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [slice(start, min(start + size, 12)) for start in range(0, 12, size)]
    for sums in SUMS.values():
        at_once = measured(model, b, [12], weights, sums).matrix()
        model.zero_grad()
        group = in_parts(GradientGram(model), b, sums, parts, weights)
        exact = whole(oracle_rows(build("llama", True).to(dtype).double(), b, sums))
        assert relative(group.matrix(), exact) < 1.5 * relative(at_once, exact)
        group.check()


def test_what_is_kept_is_what_the_docstring_says():
    """i + o numbers a token and linear layer, an input that is shared once; the head's hidden states and scores."""
    model, b = build("llama", False), batch(6, prompt=4, completion=5)
    b = Batch(*(torch.ones_like(t) for t in (b.input_ids, b.attention_mask, b.completion_mask)))
    b.completion_mask[:, :4] = 0
    parts = (slice(0, 3), slice(3, 6))
    tokens, scored = b.input_ids.numel(), int(b.completion_mask.sum())
    H, kv, inner = 16, 8, 24
    layer = (H + H + kv + kv) + (H + H) + (H + inner + inner) + (inner + H)  # q k v, o, gate and up, down
    embedding = H + 1  # and its ids
    head = H + 3
    group = in_parts(GradientGram(model), b, SUMS["head"], parts, WEIGHTS[:6])
    assert group._store.bytes == 8 * (tokens * (2 * layer + embedding) + scored * head)


@pytest.mark.parametrize("room", [0, 30, 10**6])
def test_what_has_no_room_goes_to_the_host(room):
    """On a device that only looks like one: `meta` tensors have a size and no content."""
    store = Store(room)
    moved = []

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")

        def detach(self):
            return self

        def to(self, place):
            moved.append(place)
            return torch.zeros(self.shape)

    for _ in range(3):
        store._put(0, torch.zeros(1, 5).as_subclass(Elsewhere))
    assert store.bytes == 60
    assert len(moved) == {0: 3, 30: 2, 10**6: 0}[room]


def test_together_fills_up_with_zeros():
    parts = [torch.ones(1, 2, 3), torch.ones(2, 1, 3)]
    found = together(parts, [slice(0, 1), slice(2, 4)], 5, torch.device("cpu"))
    assert found[:, :, 0].tolist() == [[1, 1], [0, 0], [1, 0], [1, 0], [0, 0]]


def test_parts_must_make_up_the_group():
    model, b = build("llama", True), batch(7)
    gram = GradientGram(model)
    with pytest.raises(GramError, match="the parts hold 6 rows, but the group was opened with 7"):
        in_parts(gram, b, parts=PARTS[:2])
    with pytest.raises(GramError, match=r"part\(2\): 1 of the group's 7 rows are left"):
        in_parts(gram, b, parts=[*PARTS[:2], slice(6, 8)])
    with pytest.raises(GramError, match=r"part\(0\)"):
        in_parts(gram, b, parts=[slice(0, 0)])
    with (
        pytest.raises(GramError, match="rows 0 to 2 of the group were not measured"),
        gram.measure_group(7) as group,
        group.part(3),
    ):
        plain_sums(model, part_of(b, PARTS[0]))
    with pytest.raises(GramError, match="one weight per row"):
        in_parts(gram, b, weights=WEIGHTS[:3])


def test_a_step_of_the_optimiser_between_parts_is_refused():
    model, b = build("llama", True), batch(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def stepping(model, b):
        optimizer.step()
        return plain_sums(model, b)

    with pytest.raises(GramError, match="a parameter changed while the group was open"):
        in_parts(GradientGram(model), b, stepping)


def test_a_weight_read_beside_its_module():
    model, b = build("llama", False), batch(7)

    def regularised(model, b):
        return plain_sums(model, b) + model.lm_head.weight.sum() * torch.arange(len(b.input_ids))

    with pytest.raises(GramError, match=r"lm_head\.weight gained a gradient of norm"):
        in_parts(GradientGram(model), b, regularised)


def test_something_added_to_grad_between_the_parts():
    """.grad was empty when the group opened: in the end it must be what the rows make of it."""
    model, b = build("llama", True), batch(7)
    with pytest.raises(GramError, match="gained a gradient of norm"), GradientGram(model).measure_group(7) as group:
        for rows in PARTS:
            with group.part(rows.stop - rows.start):
                plain_sums(model, part_of(b, rows)).sum().backward()
            plain_sums(model, part_of(b, rows)).sum().backward()


@pytest.mark.parametrize("lost", ["rows", "operands"])
def test_the_check_compares_the_parts_with_the_whole(lost, monkeypatch):
    """Mutation: what is brought together is not what the parts saw, consistently in Gram and norm."""
    model, b = build("llama", True), batch(7)
    add = Store.add

    def losing(self, recorder, partial, operands, again=None):
        if again is None and recorder.name == "model.layers.1.mlp.down_proj.weight" and lost == "operands":
            operands = (operands[0] * 1.001, operands[1])
        if recorder.name == "model.norm.weight" and lost == "rows":
            partial = type(partial)(partial.values * 1.001, partial.total * 1.001)
        add(self, recorder, partial, operands, again)

    gram = GradientGram(model)
    plain_sums(model, b).sum().backward()  # .grad is not empty, so its norm cannot tell
    assert in_parts(gram, b).check() < TOL
    monkeypatch.setattr(Store, "add", losing)
    with pytest.raises(GramCheckError, match="their Gram differs from the whole group's"):
        in_parts(gram, b).check()


def test_nothing_is_kept_after_an_exception():
    model, b = build("llama", True), batch(7)
    gram = GradientGram(model)
    with pytest.raises(ZeroDivisionError), gram.measure_group(7) as group:
        with group.part(3):
            plain_sums(model, part_of(b, PARTS[0])).sum().backward()
        raise ZeroDivisionError
    assert not group._store._kept
    with pytest.raises(GramError, match="nothing was measured"):
        group.matrix()
    assert not any("forward" in module.__dict__ for module in model.modules())
