"""Nothing outlives a block but its results. Autograd's graphs are C++ objects: a cycle through them is never freed."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from grpo_sweeps.engine.gram import GradientGram
from tests.unit.engine.gram_oracle import ARCHITECTURES, SUMS, batch, build


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new() -> None:
    """The collector looks at nothing older: what other tests have left is much, and no block's doing."""
    gc.collect()
    gc.freeze()


def growth(step, times=4):
    """What there is more of after every further step, {type: how many in `times` steps}; what is made once does not
    count."""
    grown: dict[str, int] = {}
    for _ in range(3):
        step()
        gc.collect()
        before = Counter(type(o).__name__ for o in gc.get_objects())
        for _ in range(times):
            step()
        gc.collect()
        after = Counter(type(o).__name__ for o in gc.get_objects())
        grown = {name: count - before[name] for name, count in after.items() if count - before[name] >= times}
        if not grown:
            break
    return grown


@pytest.mark.parametrize("path", SUMS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_leave_nothing_behind(name, tied, checkpointing, path):
    model, b = build(name, tied), batch(4)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    gram = GradientGram(model)

    def step():
        with gram.measure([4]) as m:
            SUMS[path](model, b).sum().backward()
        m.matrices()
        model.zero_grad()

    assert growth(step) == {}


@pytest.mark.parametrize("path", SUMS)
@pytest.mark.parametrize("fault", ["forward", "between", "backward", "never"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_blocks_that_fail_leave_nothing_behind(tied, fault, path):
    model, b = build("qwen2", tied), batch(4)
    gram = GradientGram(model)

    def fail(*args):
        raise ZeroDivisionError

    def fail_backward(module, args, y):
        if y.requires_grad:
            y.register_hook(fail)

    def step():
        layer = model.model.layers[0 if fault == "backward" else 1]
        hook = layer.register_forward_hook(fail) if fault == "forward" else None
        if fault == "backward":
            hook = layer.self_attn.o_proj.register_forward_hook(fail_backward)
        try:
            with gram.measure([4]):
                loss = SUMS[path](model, b).sum()
                if fault == "between":
                    fail()
                if fault != "never":
                    loss.backward()
        except ZeroDivisionError:
            pass
        if hook is not None:
            hook.remove()
        model.zero_grad()

    assert growth(step) == {}


def test_groups_in_parts_leave_nothing_behind():
    model, b = build("qwen2", True), batch(4)
    gram = GradientGram(model)

    def step():
        with gram.measure_group(8) as group:
            for _ in range(2):
                with group.part(4):
                    SUMS["head"](model, b).sum().backward()
        group.matrix()
        model.zero_grad()

    assert growth(step) == {}


def test_a_kept_loss_keeps_no_measurement():
    model, b = build("llama", False), batch(4)
    gram, losses = GradientGram(model), []
    with gram.measure([4]):
        losses.append(SUMS["head"](model, b).sum())
        losses[0].backward()
    rows = [t for t in gc.get_objects() if type(t).__name__ in ("Rows", "Slots", "Record")]
    assert not rows and torch.isfinite(losses[0])
