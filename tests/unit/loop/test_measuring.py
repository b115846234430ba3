"""What is measured, how often and in which micro-batches; what is off costs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_sweeps.config import LoraConfig, RunConfig
from grpo_sweeps.engine.gram import GradientGram, GramCheckError, LargeGroup
from grpo_sweeps.engine.gram.patch import Recorders
from grpo_sweeps.loop import verification
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.setup import micro_batch_groups, micro_batch_rows, prepare
from grpo_sweeps.loop.step import backward, training_step
from grpo_sweeps.loop.train import train
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.tracking.local import read_groups, read_metrics

MakeConfig = Callable[..., RunConfig]
TOL = 1e-12


def forbidden(*_: object, **__: object) -> Any:
    raise AssertionError("must not be called")


def gradients(setup: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in setup.policy.model.parameters()])


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("every", [0, 1])
def test_a_group_in_parts_is_the_group_at_once(
    make_config: MakeConfig, micro_batch: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same rollouts, all rows of one length, so that padding is the same and only the order of sums differs."""
    analysis = {"every": every, "by": "parameter", "groups": "all"}
    one = prepare(make_config(analysis=analysis, trainer={"micro_batch": 4}))
    other = prepare(make_config(analysis=analysis, trainer={"micro_batch": micro_batch}))
    assert micro_batch_rows(other) == micro_batch and micro_batch_groups(other) == 1
    rated = rollouts_with_advantages(one, 0)
    shortest = min(len(o.prompt_ids) + o.length for o in rated.rollouts)
    cut = [
        dataclasses.replace(o, completion_ids=o.completion_ids[: shortest - len(o.prompt_ids)]) for o in rated.rollouts
    ]
    rated = dataclasses.replace(rated, rollouts=cut)
    whole = backward(one, rated, 0)
    if every == 0:
        monkeypatch.setattr(Recorders, "__init__", forbidden)
    found = backward(other, rated, 0)
    assert list(found) == list(whole) and found
    for g, part in found.items():
        assert part.logprob_sums == pytest.approx(whole[g].logprob_sums, rel=TOL)
        if every:
            gram, parts = whole[g].gram, whole[g].gram_by
            assert gram is not None and parts and part.gram is not None and part.gram_by
            assert np.abs(part.gram - gram).max() < TOL * np.abs(gram).max()
            assert all(np.abs(part.gram_by[name] - parts[name]).max() < TOL * np.abs(gram).max() for name in parts)
    assert (gradients(other) - gradients(one)).norm() < TOL * gradients(one).norm()


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_run_in_parts(make_config: MakeConfig, tmp_path: Path, micro_batch: int) -> None:
    train(make_config(trainer={"micro_batch": 8}), tmp_path / "whole")
    train(make_config(trainer={"micro_batch": micro_batch}), tmp_path / "parts")
    whole, parts = read_groups(tmp_path / "whole"), read_groups(tmp_path / "parts")
    assert [g.rewards for g in parts] == [g.rewards for g in whole]
    assert any(g.gram is not None for g in parts)
    for a, b in zip(parts, whole, strict=True):
        assert (a.gram is None) == (b.gram is None)
        if a.gram is not None and b.gram is not None:
            assert np.allclose(a.gram, b.gram, rtol=1e-4)  # AdamW divides by the gradient's size


def test_every_part_is_checked_against_the_gradient(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    check = LargeGroup.check

    def counting(self: LargeGroup, tol: float | None = None) -> float:
        checks.append(len(self.parts))
        return check(self, tol)

    monkeypatch.setattr(LargeGroup, "check", counting)
    setup = prepare(make_config(trainer={"micro_batch": 3}, analysis={"groups": "all"}))
    training_step(setup, 1)
    assert checks == [2] * 4
    finish = LargeGroup.close

    def spoiled(self: LargeGroup) -> None:
        finish(self)
        self._read()[:, 0] *= 2

    monkeypatch.setattr(LargeGroup, "close", spoiled)
    with pytest.raises(GramCheckError, match=r"w'Kw = |their Gram differs"):
        training_step(setup, 2)


def test_the_first_step_is_verified_on_a_small_block(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[Any] = []
    verify = verification.verify_against_autograd

    def seeing(*args: Any) -> Any:
        verified.append((args[3], len(args[2]())))
        return verify(*args)

    monkeypatch.setattr(verification, "verify_against_autograd", seeing)
    for micro_batch in (1, 3, 8):
        setup = prepare(make_config(trainer={"micro_batch": micro_batch}))
        training_step(setup, 0)
        training_step(setup, 1)
        assert setup.precision.floor is not None and 0 < setup.precision.floor < 1e-5
    assert verified == [([4], 4)] * 3


def test_off_makes_no_gram_and_patches_nothing(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientGram, "__init__", forbidden)
    monkeypatch.setattr(Recorders, "__init__", forbidden)
    monkeypatch.setattr(verification, "verify_against_autograd", forbidden)
    setup = prepare(make_config(analysis={"every": 0}))
    assert setup.gram is None
    for step in (0, 1):
        result = training_step(setup, step)
        assert all(g.gram is None for g in result.groups)
        assert result.metrics["grad_norm"] > 0


def test_steps_in_between_run_the_plain_path(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare(make_config(analysis={"every": 2, "groups": "all"}))
    opened = Recorders.__init__
    for step in range(4):
        monkeypatch.setattr(Recorders, "__init__", forbidden if step % 2 else opened)
        result = training_step(setup, step)
        assert all((g.gram is None) == bool(step % 2) for g in result.groups)
        assert not any("forward" in module.__dict__ for module in setup.policy.model.modules())


@pytest.mark.parametrize("check_every, expected", [(0, 0), (1, 3), (2, 2)])
def test_how_often_micro_batches_of_several_groups_are_checked(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, check_every: int, expected: int
) -> None:
    from grpo_sweeps.engine.gram import Measurement

    setup = prepare(make_config(analysis={"check_every": check_every, "groups": "all"}, trainer={"micro_batch": 16}))
    checks: list[None] = []
    monkeypatch.setattr(Measurement, "check", lambda *_: checks.append(None))
    for step in range(3):
        training_step(setup, step)
    assert len(checks) == expected


def test_scores_may_be_left_out_of_the_metrics(make_config: MakeConfig, tmp_path: Path) -> None:
    """The records hold the unweighted Gram either way: the identity of a run does not depend on it."""
    logged, silent = make_config(), make_config(analysis={"scores": False})
    assert identity(logged) == identity(silent)
    train(logged, tmp_path / "logged")
    train(silent, tmp_path / "silent")
    for config, folder in ((logged, "logged"), (silent, "silent")):
        names = [str(name) for name in read_metrics(tmp_path / folder)]
        assert any(name.startswith("scores/") for name in names) == config.analysis.scores
        assert any(name.startswith("spectral/") for name in names)
    grams = [[g.gram for g in read_groups(tmp_path / folder)] for folder in ("logged", "silent")]
    assert all(
        (a is None and b is None) or np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(*grams, strict=True)
    )


@pytest.mark.parametrize("micro_batch", [8, 3])
def test_a_run_with_adapters(make_config: MakeConfig, tmp_path: Path, micro_batch: int) -> None:
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    config = make_config(trainer={"micro_batch": micro_batch}, analysis={"by": "parameter"})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig(r=2)))
    train(config, tmp_path / "run")
    measured = [g for g in read_groups(tmp_path / "run") if g.gram is not None]
    assert measured
    for group in measured:
        assert all("lora_" in name for name in group.gram_by)
        assert sum(group.gram_by.values()) == pytest.approx(group.gram, rel=1e-9)
