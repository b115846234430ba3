"""The one node by which a block hands its gradients to autograd: they arrive as autograd's own would, whatever the
model does around it, and where they may not wait it stays out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from grpo_sweeps.engine.gram import GradientGram, GramError
from grpo_sweeps.engine.gram.delivery import Deliver, Delivery
from tests.unit.engine.gram_oracle import batch, build, head_sums, plain_sums, relative

WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0], dtype=torch.float64)
TOL = 1e-12


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    return build("qwen2", request.param)


@pytest.fixture
def handed(monkeypatch):
    """What the node handed out, a list of gradients for each time it ran."""
    runs: list[list[torch.Tensor | None]] = []
    take = Delivery.take

    def noting(self):
        runs.append(take(self))
        return list(runs[-1])

    monkeypatch.setattr(Delivery, "take", noting)
    return runs


def plain_gradients(model, b, sums=plain_sums):
    for parameter in model.parameters():
        parameter.grad = None
    (sums(model, b) * WEIGHTS).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def assert_gradients(model, expected, times=1):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert relative(grad, times * expected[name]) < TOL, name


def measured(model, b, sums=plain_sums):
    with GradientGram(model).measure([5], WEIGHTS) as m:
        sums(model, b).sum().backward()
        inside = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert m.check() < TOL
    return inside


@pytest.mark.parametrize("sums", [plain_sums, head_sums])
def test_gradients_are_there_when_the_backward_is_over(model, sums, handed):
    b = batch(5)
    expected = plain_gradients(model, b, sums)
    inside = measured(model, b, sums)
    assert inside.keys() == expected.keys()
    assert_gradients(model, expected)
    # all but those of the embedding and of the blockwise head, which have nodes of their own
    (grads,) = handed
    by_node = {name for (name, _), g in zip(model.named_parameters(), grads, strict=True) if g is not None}
    own = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if sums is head_sums else set())
    if sums is plain_sums and "lm_head.weight" not in expected:
        own = set()  # tied: the head's part comes by the node
    assert by_node == expected.keys() - own


def test_the_gradient_itself_becomes_grad(model):
    """Autograd copies a gradient that somebody else holds: twice the memory, and the check of bypasses must read it."""
    given: dict[str, int] = {}
    put = Delivery.put
    b = batch(5)

    def noting(self, parameter, gradient):
        given[id(parameter)] = gradient.data_ptr()
        put(self, parameter, gradient)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Delivery, "put", noting)
        measured(model, b)
    weights = [p for name, p in model.named_parameters() if "proj.weight" in name]
    assert len(weights) == 14 and all(p.grad.data_ptr() == given[id(p)] for p in weights)
    small = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    assert len({p.grad.untyped_storage().data_ptr() for p in small}) == len(small)
    assert all(p.grad.untyped_storage().nbytes() == p.numel() * p.element_size() for p in small)


def test_a_backward_that_does_not_come_to_the_head_of_the_block(handed):
    """The embedding's output is detached: what the layers gathered is delivered all the same."""
    model = build("llama", tied=False)
    model.model.embed_tokens.register_forward_hook(lambda module, args, y: y.detach().requires_grad_())
    b = batch(5)
    expected = plain_gradients(model, b)
    assert "model.embed_tokens.weight" not in expected
    with GradientGram(model).measure([5], WEIGHTS) as m:
        plain_sums(model, b).sum().backward()
    assert len(handed) == 1
    assert_gradients(model, expected)
    assert m.check() < TOL


def test_hooks_of_parameters_see_their_gradients(model, handed):
    seen: dict[str, torch.Tensor] = {}
    b = batch(5)
    expected = plain_gradients(model, b)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.clone()))
    measured(model, b)
    assert handed and seen.keys() == expected.keys()
    assert all(relative(seen[name], expected[name]) < TOL for name in seen)


def test_it_stays_out_where_a_hook_frees_gradients_one_by_one(model, handed):
    b = batch(5)
    expected = plain_gradients(model, b)
    parameter = next(p for name, p in model.named_parameters() if "down_proj" in name)
    calls = []
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    measured(model, b)
    assert not handed and calls == [True]
    assert_gradients(model, expected)


def test_it_stays_out_where_gradients_would_lie_beside_others(model, handed):
    b = batch(5)
    expected = plain_gradients(model, b)
    for times in (1, 2, 3):
        measured(model, b)
        assert_gradients(model, expected, times)
        assert len(handed) == 1


def test_what_autograd_saves_may_be_taken_over(model, handed):
    """Offloaded or packed tensors come back by autograd; inputs kept here would stay where they are."""
    b, packed = batch(5), []
    expected = plain_gradients(model, b)
    inputs = {tuple(p.shape[1:]) for name, p in model.named_parameters() if "proj.weight" in name}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape[2:])) or t, lambda t: t):
        measured(model, b)
    assert inputs <= set(packed)
    assert_gradients(model, expected)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.between = lambda x, y: y

    def forward(self, ids_BT):
        x = self.embed(ids_BT) * 1.0
        y = self.between(x, self.first(x))
        return self.last(y).tanh().sum((1, 2))


def test_an_input_that_is_changed_after_its_use_is_refused():
    model, ids = Chain().double(), torch.randint(0, 11, (5, 4))

    def change(x, y):
        x.add_(1.0)
        return y

    model.between = change
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(ids).sum().backward()
    model.zero_grad()  # some were formed before
    with (
        pytest.raises(GramError, match="module first: its input was changed in place after it had been used"),
        GradientGram(model).measure([5]),
    ):
        model(ids).sum().backward()


def test_inputs_are_let_go_as_the_backward_goes():
    """While the loss is still held: autograd frees what it saved node by node."""
    model, ids = Chain().double(), torch.randint(0, 11, (5, 4))
    alive, seen = [], []
    model.embed.weight.register_hook(lambda grad: seen.append([ref() is not None for ref in alive]))

    def between(x, y):
        alive.append(weakref.ref(x))
        return y

    model.between = between
    with GradientGram(model).measure([5]):
        loss = model(ids).sum()
        gc.collect()
        assert alive[0]() is not None
        loss.backward()
        assert seen == [[False]] and loss.grad_fn is not None


def test_a_second_backward_is_refused(model):
    b = batch(5)
    with pytest.raises(GramError, match="met a second backward"), GradientGram(model).measure([5]):
        loss = plain_sums(model, b).sum()
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("asked", ["grad", "inputs", "one input"])
def test_a_backward_for_some_inputs_alone_is_refused(model, asked):
    """It leaves out nodes of the graph, and what they measure would be lacking without a word."""
    parameters = list(model.parameters())
    with (
        pytest.raises(GramError, match=r"autograd.grad and backward\(inputs=...\) leave out"),
        GradientGram(model).measure([5], WEIGHTS),
    ):
        loss = plain_sums(model, batch(5)).sum()
        if asked == "grad":
            torch.autograd.grad(loss, parameters)
        else:
            loss.backward(inputs=parameters if asked == "inputs" else parameters[5:6])
    assert all(p.grad is None for p in model.parameters())


def test_adapters_deliver_after_the_first_that_is_called(handed):
    from peft import LoraConfig, get_peft_model

    base = build("llama", tied=False)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model = model.double().eval()
    b = batch(5)
    expected = plain_gradients(model, b)
    measured(model, b)
    assert_gradients(model, expected)
    (grads,) = handed
    assert sum(g is not None for g in grads) == len(expected) - 1  # the first has a node of its own


def test_the_node_runs_last(model, monkeypatch):
    order: list[str] = []
    backward = Deliver.backward
    monkeypatch.setattr(Deliver, "backward", staticmethod(lambda ctx, gy: order.append("node") or backward(ctx, gy)))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: order.append(name))
    measured(model, batch(5), head_sums)
    assert order[0] == "node" and sorted(order[1:]) == sorted(name for name, _ in model.named_parameters())


def test_data_parallel_training_sees_every_gradient(handed, tmp_path):
    """DistributedDataParallel counts gradients by hooks on autograd's accumulators: one missing, and the next forward
    fails."""
    if not dist.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = build("qwen2", tied=False)
        b = batch(5)
        expected = plain_gradients(model, b)
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=False)
        gram = GradientGram(wrapped)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            with gram.measure([5], WEIGHTS) as m:
                plain_sums(wrapped, b).sum().backward()
            assert_gradients(model, expected)
            assert m.check() < TOL
        assert handed
    finally:
        dist.destroy_process_group()
