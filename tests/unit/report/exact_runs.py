"""Sweeps drawn from policies whose sequences can all be listed: what the report estimates is known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, binary, enumerate_policy
from grpo_sweeps.science.budget import Budget
from grpo_sweeps.science.claim import Prompt
from grpo_sweeps.spectra.equal import first_equal
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.types import GroupRecord
from tests.unit.report.conftest import config_of

FACTOR = {"grpo": lambda R: 1.0, "rloo": lambda R: R / (R - 1)}


def enumerations(prompts: int = 6, seed: int = 2) -> list[Enumeration]:
    policy = SoftmaxPolicy(prompts=prompts, tokens=3, max_length=3, width=4, seed=seed)
    return [enumerate_policy(policy, i, binary(2 + i % 3, i % 2)) for i in range(prompts)]


def write_exact(
    root: Path, sweep: str, es: Sequence[Enumeration], R: int, steps: int, G: int, estimator: str = "grpo",
    seed: int = 0, measure: bool = True, **changes: Any,
) -> Path:  # fmt: skip
    """A run at one policy: G prompts a step, independent and uniform, R rollouts each; Grams of mixed groups only."""
    run = root / sweep / f"run{R}-{estimator}-{seed}"
    run.mkdir(parents=True)
    settings = {"estimator._target_": f"grpo_sweeps.estimators.group.{estimator}", "trainer.prompts": G} | changes
    (run / "config.yaml").write_text(yaml.safe_dump(config_of(R, seed, sweep, settings)))
    rng = np.random.default_rng([R, seed])
    with LocalRecord(run) as record:
        for step in range(steps):
            whole, groups = 0.0, []
            for g in range(G):
                x = int(rng.integers(len(es)))
                rows = rng.choice(len(es[x].p_N), size=R, p=es[x].p_N.numpy() / es[x].p_N.numpy().sum())
                r, psi = es[x].rewards_N.numpy()[rows], es[x].psi_ND.numpy()[rows]
                A = FACTOR[estimator](R) * (r - r.mean())
                w = A / (G * R)
                whole = whole + w @ psi
                right = tuple(bool(v) for v in r)
                gram = psi @ psi.T if measure and r.min() < r.max() else None
                groups.append(
                    GroupRecord(
                        step=step,
                        prompt_id=f"p{x}",
                        R=R,
                        rewards=tuple(r),
                        advantages=tuple(A),
                        weights=tuple(w),
                        lengths=(3,) * R,
                        logprob_sums=(-3.0,) * R,
                        strict=right,
                        flexible=right,
                        gram=gram,
                        group=g,
                        same_as=tuple(first_equal(rows).tolist()),
                    )
                )
            record.log_groups(groups)
            record.log_metrics(step, {"reward": 0.5, "grad_norm": float(np.linalg.norm(whole))})
    return run


def truth(es: Sequence[Enumeration], R: int, G: int = 8) -> dict[str, float]:
    """What `best_size` estimates at steps of G groups, from the enumerated prompts."""
    budget = Budget(tuple(Prompt(e) for e in es))
    signal = float(np.mean([float(e.grad_J_D.square().sum()) for e in es]))
    N = R * G
    target = float(budget.target_D @ budget.target_D)
    return {
        "signal": signal, "spread": budget.V2 - signal, "V1": budget.V1, "V2": budget.V2, "signal_of_mean": target,
        "V_between": budget.between, "best_R": budget.best_R, "snr": target / budget.leave_one_out(R, N),
        "error_here": N * budget.leave_one_out(R, N),
    }  # fmt: skip
