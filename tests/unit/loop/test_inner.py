"""Steps of several updates and of other losses: the gradient written out by hand, what is measured, what is logged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_sweeps.config import LoraConfig, ObjectiveConfig, RunConfig
from grpo_sweeps.estimators import row_weights
from grpo_sweeps.loop.inner import Terms, backward_of_loss, inner_step, prepare_terms, take_step
from grpo_sweeps.loop.results import RatioTally
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.scoring import scored
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.loop.step import backward, training_step
from grpo_sweeps.loop.train import train
from grpo_sweeps.spectra import null_measured_norms
from grpo_sweeps.tracking.local import read_groups, read_metrics

MakeConfig = Callable[..., RunConfig]
ROUNDING = 1e-6  # transformers' RMSNorm computes in float32 whatever the model's dtype


def with_objective(make_config: MakeConfig, objective: dict[str, Any], **changes: Any) -> RunConfig:
    return make_config(objective=ObjectiveConfig(**objective), **changes)


def gradients(setup: Setup) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in setup.policy.model.parameters() if p.grad is not None])


def weights_of(setup: Setup) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in setup.policy.model.parameters()])


def move(setup: Setup, size: float = 0.02) -> None:
    """A policy that is no longer the sampling one."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in setup.policy.model.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p))


def one_by_one(setup: Setup, model: torch.nn.Module, rollout: Any) -> torch.Tensor:
    """Log-probabilities of one rollout's tokens from one unpadded forward, by the model's own logits."""
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    logprobs = torch.log_softmax(model(ids).logits[0] / setup.config.rollout.temperature, dim=-1)
    start = len(rollout.prompt_ids)
    return torch.stack([logprobs[t - 1, ids[0, t]] for t in range(start, ids.shape[1])])


def textbook_rows(setup: Setup, terms: Terms, old: list[torch.Tensor], initial: torch.nn.Module) -> torch.Tensor:
    """The gradient of each rollout's loss as the papers write it, one rollout and one backward at a time."""
    objective, rows = setup.config.objective, []
    parameters = [p for p in setup.policy.model.parameters() if p.requires_grad]
    triples = zip(terms.rated.rollouts, terms.rated.advantages_GR.flatten(), terms.factors_GR.flatten(), strict=True)
    for i, (rollout, A, a) in enumerate(triples):
        logp = one_by_one(setup, setup.policy.model, rollout)
        rho = (logp - old[i]).exp() if objective.ratio == "token" else (logp - old[i]).mean().exp().expand(len(logp))
        surrogate = torch.minimum(rho * A, rho.clamp(1 - objective.clip_low, 1 + objective.clip_high) * A)
        loss = -a * (logp * A if objective.ratio == "none" else surrogate).sum()
        if objective.kl_beta:
            d = logp - one_by_one(setup, initial, rollout).detach()
            loss = loss + objective.kl_beta * a * ((-d).exp() - 1 + d).sum()
        grads = torch.autograd.grad(loss, parameters)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("ratio", ["none", "token", "sequence"])
@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
@pytest.mark.parametrize(("measuring", "micro_batch"), [(False, 8), (True, 8), (True, 3), (False, 3)])
def test_rows_and_gradient_are_the_textbook_s_on_a_policy_that_has_moved(
    make_config: MakeConfig, ratio: str, kl_beta: float, measuring: bool, micro_batch: int
) -> None:
    objective = {"ratio": ratio, "inner_updates": 2, "kl_beta": kl_beta, "clip_low": 0.01, "clip_high": 0.02}
    config = with_objective(make_config, objective, trainer={"micro_batch": micro_batch}, aggregation="length")
    setup, initial = prepare(config), prepare(config).policy.model
    rated = rollouts_with_advantages(setup, 0)
    terms = prepare_terms(setup, rated)
    old = [one_by_one(setup, setup.policy.model, o).detach() for o in rated.rollouts]
    move(setup)
    rows_BD = textbook_rows(setup, terms, old, initial)
    tally = RatioTally(ratio)
    measured = backward_of_loss(setup, terms, terms.cuts[0], tally, 1, measuring)
    expected = rows_BD.sum(0)
    assert float(expected.norm()) > 0
    assert torch.allclose(gradients(setup), expected, rtol=0, atol=1e-5 * float(rows_BD.norm()))
    mixed = [g for g in range(4) if bool(terms.rated.weights_GR[g].any())]
    assert list(measured) == ([0, 1, 2, 3] if kl_beta else mixed)
    for g, part in measured.items():
        rows = rows_BD[4 * g : 4 * g + 4]
        scale = float((rows @ rows.T).abs().max())
        if measuring and scale > 0:
            assert part.gram == pytest.approx((rows @ rows.T).numpy(), abs=1e-4 * scale)
        else:
            assert part.gram is None
    if ratio != "none":
        assert tally.metrics()["clip_ratio/region_mean"] > 0, "nothing was clipped: the case says little"


@pytest.mark.parametrize("ratio", ["none", "token", "sequence"])
@pytest.mark.parametrize("aggregation", ["sum", "length", "token_mean", "constant"])
def test_the_first_update_is_the_plain_one(make_config: MakeConfig, ratio: str, aggregation: str) -> None:
    """At ratio 1 the loss's rows are the scores' times the weights, and their sum the plain gradient."""
    config = with_objective(make_config, {"ratio": ratio, "inner_updates": 2}, aggregation=aggregation)
    setup = prepare(config)
    rated = rollouts_with_advantages(setup, 0)
    scores = backward(setup, rated, 0)
    plain = gradients(setup)
    setup.optimizer.zero_grad()
    terms = prepare_terms(setup, rated)
    assert torch.allclose(terms.rated.weights_GR, rated.weights_GR, rtol=1e-12)
    loss = backward_of_loss(setup, terms, terms.cuts[0], RatioTally(ratio), 0, True)
    assert torch.allclose(gradients(setup), plain, rtol=0, atol=ROUNDING * float(plain.norm()))
    assert list(loss) == list(scores) and loss
    for g, part in loss.items():
        w, gram = rated.weights_GR[g].numpy(), scores[g].gram
        assert gram is not None and part.gram == pytest.approx(w[:, None] * gram * w, abs=1e-6 * np.abs(gram).max())
        assert part.logprob_sums == pytest.approx(scores[g].logprob_sums)


def test_minibatches_are_updates_of_their_own(make_config: MakeConfig) -> None:
    """Two halves, each weighted and updated by hand, against the step that cuts them."""
    everything = {"estimator": "grpo_sweeps.estimators.reinforce.reinforce", "aggregation": "token_mean"}
    config = with_objective(make_config, {"minibatches": 2}, **everything)
    setup, slow = prepare(config), prepare(config)
    result = inner_step(setup, 0)
    rated = rollouts_with_advantages(slow, 0)
    lengths = torch.tensor([o.length for o in rated.rollouts]).view(4, 4)
    norms = []
    for half in (slice(0, 2), slice(2, 4)):
        weights = torch.zeros_like(rated.weights_GR)
        weights[half] = torch.from_numpy(row_weights(rated.advantages_GR[half], lengths[half], "token_mean", 8))
        for rollout, weight in zip(rated.rollouts, weights.flatten(), strict=True):
            if weight:
                (-weight * one_by_one(slow, slow.policy.model, rollout).sum()).backward()
        norms.append(slow.optimizer.step(config.trainer.lr))
    assert min(norms) > 0
    assert result.metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)
    assert torch.allclose(
        weights_of(setup), weights_of(slow), rtol=0, atol=1e-5
    )  # AdamW divides by the gradient's size


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_policy_that_does_not_move_has_ratios_of_exactly_1(make_config: MakeConfig, ratio: str) -> None:
    objective = {"ratio": ratio, "inner_updates": 2, "minibatches": 2, "kl_beta": 0.1}
    setup = prepare(with_objective(make_config, objective, trainer={"lr": 0.0, "micro_batch": 4}))
    metrics = inner_step(setup, 0).metrics
    assert [metrics[f"importance_ratio/{name}"] for name in ("mean", "min", "max")] == [1.0, 1.0, 1.0]
    assert metrics["clip_ratio/region_mean"] == metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0.0
    assert metrics["kl"] == 0.0


def test_a_second_update_with_and_without_ratio(make_config: MakeConfig) -> None:
    one, two = ({"ratio": "none", "inner_updates": n} for n in (1, 2))
    token = {"ratio": "token", "inner_updates": 2}
    after = {}
    for name, objective in {"one": one, "none": two, "token": token}.items():
        setup = prepare(with_objective(make_config, objective))
        metrics = [take_step(setup, step).metrics for step in range(2)]
        after[name] = weights_of(setup)
        if name != "one":
            assert metrics[0]["importance_ratio/min"] < 1 < metrics[0]["importance_ratio/max"]
        assert ("clip_ratio/region_mean" in metrics[0]) == (name == "token")
    for a, b in (("one", "none"), ("one", "token"), ("none", "token")):
        assert float((after[a] - after[b]).abs().max()) > 1e-4


def test_narrow_bounds_clip_on_both_sides(make_config: MakeConfig) -> None:
    objective = {"ratio": "token", "inner_updates": 3, "clip_low": 1e-4, "clip_high": 1e-4}
    metrics = inner_step(prepare(with_objective(make_config, objective)), 0).metrics
    low, high, both = (metrics[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region"))
    assert low > 0 and high > 0 and both == pytest.approx(low + high)
    assert both <= 2 / 3  # nothing is clipped in the first of the three


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_record_of_a_step(make_config: MakeConfig, ratio: str) -> None:
    setup = prepare(with_objective(make_config, {"ratio": ratio, "inner_updates": 2}))
    plain = training_step(prepare(make_config()), 0)
    result = take_step(setup, 0)
    assert {g.rows for g in result.groups} == {"loss"} and {g.rows for g in plain.groups} == {"scores"}
    assert [g.weights for g in result.groups] == [g.weights for g in plain.groups]
    assert [g.gram is None for g in result.groups] == [g.gram is None for g in plain.groups]
    names = [name for name in plain.metrics if name.startswith("spectral/")]
    assert len(names) >= 8
    names.remove("spectral/null_effective_rank")  # rows of the loss have norms of their own
    own = [null_measured_norms(g.gram) for g in result.groups if g.gram is not None]
    assert result.metrics["spectral/null_effective_rank"] == pytest.approx(np.mean(own))
    for name in names:  # of the same matrix: at the sampling policy the rows are w_i psi_i
        assert result.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-3), name
    assert not any(name.startswith("scores/") for name in result.metrics)
    assert result.metrics["sampling/logprob_difference"] < 1e-4
    assert {"time/score", "time/backward", "time/update"} <= set(result.metrics)


def test_a_group_clipped_whole_counts_as_not_measured(make_config: MakeConfig) -> None:
    objective = {"ratio": "sequence", "inner_updates": 2, "clip_low": 1e-9, "clip_high": 1e-9}
    setup = prepare(with_objective(make_config, objective))
    terms = prepare_terms(setup, rollouts_with_advantages(setup, 0))
    assert terms.old
    ahead = {
        g: [values + (-1.0 if A > 0 else 1.0) for values, A in zip(rows, terms.rated.advantages_GR[g], strict=True)]
        for g, rows in terms.old.items()
    }
    measured = backward_of_loss(
        setup, dataclasses.replace(terms, old=ahead), terms.cuts[0], RatioTally("sequence"), 0, True
    )
    assert measured and all(part.gram is None for part in measured.values())


def test_off_measures_nothing_and_trains_the_same(make_config: MakeConfig) -> None:
    objective = {"ratio": "token", "inner_updates": 2}
    measured, plain = (prepare(with_objective(make_config, objective, analysis={"every": n})) for n in (1, 0))
    first, second = inner_step(measured, 0), inner_step(plain, 0)
    assert plain.gram is None and all(g.gram is None for g in second.groups)
    assert first.metrics["grad_norm"] == pytest.approx(second.metrics["grad_norm"], rel=1e-6)
    assert torch.allclose(weights_of(measured), weights_of(plain), rtol=0, atol=1e-5)


def test_the_reference_stays_the_initial_policy(make_config: MakeConfig) -> None:
    config = with_objective(make_config, {"kl_beta": 0.5})
    setup, fresh = prepare(config), prepare(config)
    kls = [take_step(setup, step).metrics["kl"] for step in range(3)]
    assert kls[0] == 0.0 and kls[1] > 0 and kls[2] > kls[1]
    rollouts = rollouts_with_advantages(fresh, 0).rollouts
    assert setup.reference is not None
    with setup.reference.opened() as model:
        found = scored(setup, rollouts, model)
    assert all(torch.equal(a, b) for a, b in zip(found, scored(fresh, rollouts), strict=True))
    assert prepare(make_config()).reference is None


def test_the_reference_of_adapters_is_the_model_without_them(make_config: MakeConfig) -> None:
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    config = with_objective(make_config, {"ratio": "token", "inner_updates": 2, "kl_beta": 0.5})
    base = prepare(config)
    setup = prepare(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig(r=2))))
    assert setup.reference is not None and setup.reference.copy is None
    kls = [take_step(setup, step).metrics["kl"] for step in range(2)]
    assert min(kls) > 0
    rollouts = rollouts_with_advantages(base, 0).rollouts
    with setup.reference.opened() as model:
        found = scored(setup, rollouts, model)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, scored(base, rollouts), strict=True))


def test_kl_in_the_reward(make_config: MakeConfig, tmp_path: Path) -> None:
    beta = 0.5
    config = with_objective(make_config, {"kl_beta": beta, "kl_place": "reward", "kl_estimator": "k1"})
    train(config, tmp_path / "run")
    groups, metrics = read_groups(tmp_path / "run"), read_metrics(tmp_path / "run")
    assert {g.rows for g in groups} == {"scores"}
    assert all(set(g.rewards) <= {0.0, 1.0} for g in groups if g.step == 0), "the policy is still the reference"
    assert metrics["kl"].iloc[0] == 0.0 and metrics["kl"].iloc[1] != 0.0
    for step in range(1, 4):
        here = [g for g in groups if g.step == step]
        lengths = np.array([g.lengths for g in here])
        less = metrics["reward/task"].iloc[step] - metrics["reward"].iloc[step]
        assert less == pytest.approx(beta * metrics["kl"].iloc[step] * lengths.mean(), rel=1e-6)
        for g in here:
            assert g.advantages == pytest.approx(np.array(g.rewards) - np.mean(g.rewards), abs=1e-12)


def test_what_an_update_does_is_measured_of_the_first(make_config: MakeConfig) -> None:
    analysis = {"update_every": 1}
    once, twice = (
        inner_step(prepare(with_objective(make_config, {"ratio": "token", "inner_updates": n}, analysis=analysis)), 0)
        for n in (1, 2)
    )
    names = [name for name in once.metrics if name.startswith(("update/", "gradient/"))]
    assert len(names) == 6 and once.metrics["update/norm"] > 0
    assert [once.metrics[name] for name in names] == pytest.approx([twice.metrics[name] for name in names], rel=1e-9)
    assert [u.name for u in once.updates] == [u.name for u in twice.updates] and once.updates
