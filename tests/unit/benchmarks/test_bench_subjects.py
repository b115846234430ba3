"""The subjects of `bench gram`: the same Gram and the same gradient by every way, and a model left as it was."""

from functools import partial

import pytest
import torch

from grpo_sweeps.benchmarks import subjects as subjects_module
from grpo_sweeps.benchmarks import timing
from grpo_sweeps.benchmarks.setup import (
    NotInstalled,
    drop_grads,
    model_config,
    one_line,
    random_batch,
    random_model,
    small_config,
    trainable,
)
from grpo_sweeps.benchmarks.subjects import (
    LOWER_BOUND,
    SUBJECTS,
    Naive,
    RowProducts,
    Vmap,
    autograd_gram,
    frobenius_error,
    parameter_sets,
    products,
    unchanged,
)
from grpo_sweeps.benchmarks.timing import Row, time_once, time_subjects

CPU = torch.device("cpu")
REASON = "needs the extra bench: pip install grpo_sweeps[bench]"


def setting(name="test", checkpointing=False, dtype="float64"):
    """A tiny model and two groups of three rows."""
    config = model_config(name) if name == "test" else small_config(name)
    model = random_model(config, dtype, CPU, checkpointing)
    return model, random_batch(model, R=3, groups=2, T=8, prompt=2)


def one_step(name, model, batch):
    """(Grams, gradient flattened), `.grad` empty before and after."""
    subject = SUBJECTS[name](model, batch)
    with subject.attached():
        grams = subject.step()
    grad = torch.cat([p.grad.flatten() for p in trainable(model).values()])
    drop_grads(model)
    return grams, grad


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("model", ["test", "nemotron_mini_4b"], ids=["llama tied", "nemotron untied"])
@pytest.mark.parametrize("name", ["ours", "vmap", "opacus"])
def test_gram_and_gradient_agree_with_naive(name, model, checkpointing):
    if name == "opacus":
        pytest.importorskip("opacus", reason=REASON)
    model, batch = setting(model, checkpointing)
    exact, grad = one_step("naive", model, batch)
    found, found_grad = one_step(name, model, batch)
    assert [gram.shape for gram in found] == [(3, 3), (3, 3)] and found[0].dtype == torch.float64
    assert frobenius_error(found, exact) < 1e-10
    assert (found_grad - grad).norm() < 1e-10 * grad.norm()
    assert model.training == checkpointing == model.is_gradient_checkpointing


@pytest.mark.parametrize("model, tol", [("test", 1e-5), ("nemotron_mini_4b", 1e-12)])
def test_plain_stock_naive_and_ours_add_the_same_gradient(model, tol):
    # Llama's norms work in float32, and the weights enter before them in plain and stock, after them in the others.
    model, batch = setting(model)
    grads = {name: one_step(name, model, batch)[1] for name in ("plain", "stock", "naive", "ours")}
    for name, grad in grads.items():
        assert (grad - grads["plain"]).norm() < tol * grad.norm(), name


def test_backpack_has_no_rule_for_rms_norms_and_leaves_no_trace():
    pytest.importorskip("backpack", reason=REASON)
    model, batch = setting(dtype="float32")
    before = one_step("ours", model, batch)
    with pytest.raises(RuntimeError, match="no grad_batch for parameter"):
        one_step("backpack", model, batch)
    drop_grads(model)
    after = one_step("ours", model, batch)
    assert frobenius_error(after[0], before[0]) == 0 and torch.equal(after[1], before[1])


def test_a_missing_rival_is_one_line(monkeypatch):
    monkeypatch.setattr(subjects_module, "installed", lambda package: False)
    model, batch = setting()
    for name in ("opacus", "backpack"):
        with pytest.raises(NotInstalled) as raised:
            SUBJECTS[name](model, batch)
        assert one_line(raised.value) == "not installed: pip install grpo_sweeps[bench]"


def test_hooks_and_attributes_are_taken_away_after_an_error():
    model, _ = setting()
    before = {module: set(vars(module)) for module in model.modules()}
    with pytest.raises(ZeroDivisionError), unchanged(model):
        for module in model.modules():
            module.register_forward_hook(print)
            module.register_full_backward_hook(print)
            module.kept = torch.zeros(1)
        for parameter in model.parameters():
            parameter.grad_sample = torch.zeros(1)
        raise ZeroDivisionError
    assert all(set(vars(module)) == names for module, names in before.items())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())


@pytest.mark.parametrize("how", ["estimate", "out of memory"])
def test_naive_without_memory_makes_the_passes_alone_and_says_so(how, monkeypatch):
    model, batch = setting()
    _, grad = one_step("naive", model, batch)
    if how == "estimate":
        monkeypatch.setattr(subjects_module, "rows_fit", lambda model, batch: False)
    else:
        monkeypatch.setattr(
            RowProducts, "add", lambda self, rows: (_ for _ in ()).throw(torch.OutOfMemoryError("card"))
        )
    subject = Naive(model, batch)
    assert subject.note == (LOWER_BOUND if how == "estimate" else "")
    assert subject.step() is None and subject.note == LOWER_BOUND
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (found - grad).norm() < 1e-5 * grad.norm()


def test_times_before_a_change_of_work_are_dropped(monkeypatch):
    model, batch = setting()
    subject = Naive(model, batch)
    row, plain = Row(times_ms=[1.0, 2.0], plain_ms=[50.0, 60.0]), Row(times_ms=[70.0])
    monkeypatch.setattr(subject, "keeps_rows", False)
    assert time_once(row, subject, CPU) == "" and (row.times_ms, row.plain_ms, row.note) == ([], [], LOWER_BOUND)
    row.pair_with(plain)
    assert row.plain_ms == []
    assert time_once(row, subject, CPU) == "" and len(row.times_ms) == 1
    row.pair_with(plain)
    result = row.as_json()
    assert result["ratio"]["median"] == row.times_ms[0] / 70 and result["note"] == LOWER_BOUND
    row.pair_with(None)
    assert "ratio" not in row.as_json()


class Broken(Vmap):
    def step(self):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")


def test_a_failing_subject_stops_no_other():
    model, batch = setting()
    makers = {"broken": lambda: Broken(model, batch), "plain": lambda: SUBJECTS["plain"](model, batch)}
    makers["unmade"] = lambda: 1 / 0
    rows = time_subjects(makers, model, CPU, repeats=2)
    assert rows["broken"].failed == "OutOfMemoryError: CUDA out of memory."
    assert rows["unmade"].failed.startswith("ZeroDivisionError")
    assert len(rows["plain"].times_ms) == 2 and rows["plain"].as_json()["ratio"]["median"] == 1


def test_subjects_apart_come_last_in_rounds_with_plain_and_every_other_round_is_reversed(monkeypatch):
    model, batch = setting()
    monkeypatch.setattr(timing, "WARM_UP", 0)
    said = []

    def make(name):
        subject = SUBJECTS["plain"](model, batch)
        monkeypatch.setattr(subject, "step", lambda: said.append(name))
        return subject

    makers = {name: partial(make, name) for name in ("naive", "plain", "ours")}
    rows = time_subjects(makers, model, CPU, 2, apart=["naive"])
    assert said == ["plain", "ours", "ours", "plain", "plain", "naive", "naive", "plain"]
    assert {name: (len(row.times_ms), len(row.plain_ms)) for name, row in rows.items()} == dict.fromkeys(makers, (2, 2))
    assert rows["naive"].plain_ms != rows["plain"].times_ms
    alone = time_subjects({"naive": makers["naive"]}, model, CPU, 2, apart=["naive"])["naive"]
    assert len(alone.times_ms) == 2 and "ratio" not in alone.as_json()


@pytest.mark.parametrize("n", [1, 4095, 4096, 10_000])
def test_products_of_any_length(n):
    piece_GRn = torch.randn(2, 3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    assert torch.allclose(products(piece_GRn), torch.einsum("grn,gsn->grs", piece_GRn, piece_GRn), rtol=1e-12)


def test_rows_in_parameter_sets_give_the_same_gram():
    model, batch = setting()
    whole = autograd_gram(model, batch, row_bytes=2**40)
    said = []
    pieces = autograd_gram(model, batch, row_bytes=1, say=said.append)
    assert len(said) == len(list(model.parameters())) > 3
    assert frobenius_error(pieces, whole) < 1e-13
    parameters = list(model.parameters())
    assert [p for one in parameter_sets(parameters, 300_000) for p in one] == parameters
