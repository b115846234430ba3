"""torch.compile around measured modules: exact in a block, plain outside it, and nothing is compiled every step."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from grpo_sweeps.engine.gram import GradientGram, GramError, measured_floor, verify_against_autograd
from grpo_sweeps.engine.gram.patch import PatchedForward
from grpo_sweeps.engine.gram.uses import plain_name
from tests.unit.engine.gram_oracle import SUMS, batch, build, oracle_rows, plain_sums, relative, trainable, whole

pytestmark = pytest.mark.integration
TOL = 1e-12
WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, -0.25], dtype=torch.float64)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def in_place(model, backend="aot_eager"):
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend)
    return model


def wrapped(model, backend="aot_eager"):
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, backend=backend)
    return model


def as_a_whole(model, backend="aot_eager"):
    return torch.compile(model, backend=backend)


def counting(runs):
    """A backend that counts how often compiled code runs."""

    def compiler(graph, _):
        def run(*inputs):
            runs.append(graph)
            return graph.forward(*inputs)

        return run

    return compiler


def plain_step(model, sums, b):
    model.zero_grad()
    (sums(model, b) * WEIGHTS).sum().backward()


def measured_step(gram, model, sums, b):
    model.zero_grad()
    with gram.measure([2, 3], WEIGHTS, cross_groups=True) as m:
        sums(model, b).sum().backward()
    return m


def assert_gradient(model, rows):
    for name, parameter in trainable(model).items():
        expected = rows[plain_name(name)]
        assert (parameter.grad.flatten() - WEIGHTS @ expected).norm() < TOL * (1 + expected.norm()), name


def assert_exact(m, rows):
    assert relative(m.matrix(), whole(rows)) < TOL
    for name, r in rows.items():
        assert (m.parameter_matrix(name) - r @ r.T).abs().max() < TOL * whole(rows).abs().max(), name
    assert m.check() < TOL


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("way, path", [(in_place, "head"), (wrapped, "head"), (as_a_whole, "logits")])
@pytest.mark.parametrize("first", ["plain step", "measured step"])
@pytest.mark.parametrize("compile_between", [False, True], ids=["eager", "between"])
def test_measured_and_plain_steps_in_turn(way, path, checkpointing, first, compile_between):
    """Whichever is compiled first: a stale graph that passes a claimed module by would leave its parameters unseen."""
    model, b, sums = build("llama", True), batch(5), SUMS[path]
    rows = oracle_rows(model, b)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    sums(model, b)  # the head looks at a model once
    compiled = way(model)
    gram = GradientGram(compiled, compile_between=compile_between)
    if first == "plain step":
        plain_step(compiled, sums, b)
        assert_gradient(compiled, rows)
    for step in range(3):
        assert_exact(measured_step(gram, compiled, sums, b), rows)
        assert_gradient(compiled, rows)
        plain_step(compiled, sums, b)
        assert_gradient(compiled, rows)
        if step == 0:
            frames = counters["frames"]["total"]
    assert counters["frames"]["total"] == frames, "later steps must be served from what was compiled"
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_plain_steps_keep_their_graphs_whole(checkpointing):
    model, b, runs = build("llama", True), batch(5), []
    backend = counting(runs)
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    gram = GradientGram(model)
    for _ in range(2):
        measured_step(gram, model, plain_sums, b)
        assert not runs
        plain_step(model, plain_sums, b)
        assert len(runs) == 2, "one compiled graph a layer"
        runs.clear()


def test_a_compiled_function_around_the_model():
    """It is not to be seen in the model: Dynamo knows that something was compiled."""
    model, b = build("llama", True), batch(5)
    rows = oracle_rows(model, b)
    compiled = torch.compile(lambda: plain_sums(model, b), backend="aot_eager")
    compiled()
    with GradientGram(model).measure([2, 3], WEIGHTS, cross_groups=True) as m:
        compiled().sum().backward()
    assert_exact(m, rows)


@pytest.mark.parametrize("way", [None, in_place, wrapped, as_a_whole])
def test_only_what_is_compiled_pays_for_its_suspension(way, monkeypatch):
    model, asked = build("llama", True), []
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: asked.append(stance) or nullcontext())
    compiled = model if way is None else way(model)
    torch._dynamo.reset()  # forgets what was compiled: the model's modules still tell
    gram = GradientGram(compiled)
    with gram.measure([2, 3]):
        pass
    assert asked == ([] if way is None else ["force_eager"])


def test_layers_share_the_pieces_between(monkeypatch):
    """Guards that named a layer's own objects would exhaust Dynamo's limit, and the layers after that run uncompiled.
    The pieces serve another GradientGram of the model too."""
    from tests.unit.engine import gram_oracle

    frames = []
    for layers in (2, 10):
        torch._dynamo.reset()
        counters.clear()
        monkeypatch.setitem(gram_oracle.SHAPE, "num_hidden_layers", layers)
        model, b, runs = build("llama", True), batch(5), []
        rows, backend = oracle_rows(model, b), counting(runs)
        for layer in model.get_decoder().layers:
            layer.compile(backend=backend)
        for _ in range(2):
            runs.clear()
            assert_exact(measured_step(GradientGram(model, compile_between=True), model, plain_sums, b), rows)
            assert len(runs) == 7 * layers
            frames.append(counters["frames"]["total"])
    assert len(set(frames)) == 1


def test_names_are_those_of_the_plain_model():
    plain = build("llama", False)
    names = list(trainable(plain))
    for way in (wrapped, as_a_whole):
        model = way(copy.deepcopy(plain))
        gram = GradientGram(model)
        assert [claim.name for claim in gram.claims] == names
        m = measured_step(gram, model, plain_sums, batch(5))
        assert list(m.matrices(by="layer")) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm",
                                                "lm_head"]  # fmt: skip
    assert plain_name("_orig_mod.model.layers.0._orig_mod.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"


def rounding(graph, _):
    """A backend whose code rounds otherwise than the model's own."""
    return lambda *inputs: [x * (1 + 1e-7) if torch.is_tensor(x) else x for x in graph.forward(*inputs)]


@pytest.mark.parametrize("compile_between", [False, True])
@pytest.mark.parametrize("way", [in_place, wrapped, as_a_whole])
def test_verification_and_floor_of_a_compiled_model(way, compile_between):
    model, b = way(build("llama", True), rounding), batch(5)
    gram = GradientGram(model, compile_between=compile_between)
    expected = verify_against_autograd(model, gram, lambda: plain_sums(model, b), [2, 3], WEIGHTS)
    assert expected.gradient < TOL and expected.norm < TOL
    model = way(build("llama", True, torch.float32))
    gram = GradientGram(model, compile_between=compile_between)
    assert 0 < measured_floor(model, gram, lambda: plain_sums(model, b), [2, 3]) < 1e-5


def test_compiled_code_that_passes_a_module_by_is_an_error(monkeypatch):
    """If Dynamo did not guard against replaced forwards, an old graph would run: imitated by a patch without effect."""
    model, b = in_place(build("llama", True)), batch(5)
    plain_step(model, plain_sums, b)
    monkeypatch.setattr(PatchedForward, "__call__", lambda self, *args: type(self.module).forward(self.module, *args))
    with pytest.raises(GramError, match="gained a gradient that did not pass through module"):
        measured_step(GradientGram(model, compile_between=True), model, plain_sums, b)
