"""Sweeps in memory, drawn or drawn anew: what `verdict_rates.py` and `coverage.py` share.

Two sources of groups. `Frozen` has the rollouts and Grams of runs of a fixed policy (`analysis.groups=all`), whose
rewards can be drawn anew. `Population` has the prompts of a small softmax policy whose sequences can all be listed:
everything is drawn from it, and its truth is a finite sum. Both become the rows that the report reads by the report's
own code (`measure.rows.table_rows`), advantages and weights by the product's own estimators.

Shape letters as in `grpo_sweeps.types`; N here: groups of one run. X: prompts. S: sequences of one prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from scipy import optimize, special

from grpo_sweeps import spectra
from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.estimators import grpo, row_weights
from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, binary, several_prompts
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.measure.rows import table_rows
from grpo_sweeps.report.read.query import Sweep, load_sweep
from grpo_sweeps.spectra.equal import first_equal, merged
from grpo_sweeps.spectra.stacked import stacked_summary
from grpo_sweeps.tracking.local import read_groups
from grpo_sweeps.tracking.status import RunStatus, write_status

SIZES = (2, 4, 8)
TEXT_GAP = 5e-5  # log-probabilities of one text differ by less, those of two texts of one length by more


def show(found: pd.DataFrame, lines: Sequence[str], csv: str) -> int:
    """Print a table and write it where `csv` names a file; the command's exit code."""
    print("\n".join(lines))
    if csv:
        found.to_csv(csv, index=False)
    return 0


@dataclass(frozen=True)
class Groups:
    """N groups of one run of one R. floor: how exactly each Gram is known. same_NR: as in `spectra.equal`."""

    step_N: np.ndarray
    group_N: np.ndarray
    prompt_N: np.ndarray
    rewards_NR: np.ndarray
    lengths_NR: np.ndarray
    gram_NRR: np.ndarray
    same_NR: np.ndarray
    floor_N: np.ndarray

    @cached_property
    def advantages_NR(self) -> np.ndarray:
        return grpo(self.rewards_NR)

    @cached_property
    def weights_NR(self) -> np.ndarray:
        """Step by step, as in training with aggregation=sum."""
        found = np.empty(self.rewards_NR.shape)
        for step in np.unique(self.step_N):
            rows = self.step_N == step
            found[rows] = row_weights(
                self.advantages_NR[rows], self.lengths_NR[rows], "sum", int(self.lengths_NR.max())
            )
        return found

    @property
    def mixed_N(self) -> np.ndarray:
        return np.ptp(self.rewards_NR, axis=1) > 0

    def table(self) -> pa.Table:
        """As the local record has it: the Grams of mixed groups alone."""
        N, R = self.rewards_NR.shape
        grams = [gram.ravel() if mixed else None for gram, mixed in zip(self.gram_NRR, self.mixed_N, strict=True)]
        lists = {
            "rewards": self.rewards_NR, "advantages": self.advantages_NR, "weights": self.weights_NR,
            "lengths": self.lengths_NR.astype(np.int64), "strict": self.rewards_NR > 0, "same_as": self.same_NR,
        }  # fmt: skip
        return pa.table({
            "step": self.step_N.astype(np.int64), "group": self.group_N.astype(np.int64),
            "prompt_id": self.prompt_N.astype(str).tolist(), "R": np.full(N, R), "rows": ["scores"] * N,
            "floor": self.floor_N.astype(float), "gram": pa.array(grams, pa.list_(pa.float64())),
            **{name: pa.array(list(values)) for name, values in lists.items()},
        })  # fmt: skip

    def rows(self, seed: int = 0) -> pd.DataFrame:
        """One row per group, by the report's own code."""
        return table_rows(self.table(), seed, None)


def skeleton(folder: Path, name: str, configs: Sequence[dict[str, Any]]) -> Sweep:
    """A sweep of finished runs of which nothing but the configurations is recorded."""
    for config in configs:
        run = folder / name / f"run{config['R']}-{config['seed']}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        write_status(run, RunStatus("finished", run.name, f"R={config['R']} seed={config['seed']}", name))
    return load_sweep(name, folder)


def config(R: int, seed: int, steps: int, prompts: int, **changes: Any) -> dict[str, Any]:
    """A resolved configuration of a fixed policy."""
    made = RunConfig.from_mapping({
        "R": R, "seed": seed, "sweep": "drawn", "aggregation": "sum", "runs_dir": "runs",
        "model": {"name": "softmax", "path": "exact"}, "task": {"_target_": "exact", "name": "exact"},
        "reward": {"_target_": "grpo_sweeps.rewards.exact_match.strict"},
        "estimator": {"_target_": "grpo_sweeps.estimators.group.grpo"}, "rollout": {}, "analysis": {},
        "trainer": {"steps": steps, "prompts": prompts, "lr": 0.0}, "tracking": {"kind": "local"},
    } | changes)  # fmt: skip
    return to_mapping(made)


def filled(
    sweep: Sweep, rows: Mapping[str, pd.DataFrame], metrics: Mapping[str, pd.DataFrame] | None = None, **frames: Any
) -> Sweep:
    """The sweep with these groups and metrics, by run; frames: other fields as they are."""
    tags = {run.run: {"run": run.run, "arm": run.arm, "R": run.R, "seed": run.seed} for run in sweep.runs.itertuples()}

    def joined(parts: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
        named = [
            pd.concat([pd.DataFrame(tags[run], index=part.index), part.drop(columns="R", errors="ignore")], axis=1)
            for run, part in parts.items()
        ]
        return pd.concat(named, ignore_index=True)

    more = {} if metrics is None else {"metrics": joined(metrics)}
    return replace(sweep, groups=joined(rows), **more, **frames)


@dataclass(frozen=True)
class Frozen:
    """The groups of one recorded run of a fixed policy, every one measured; text_NR numbers the texts of all prompts:
    equal numbers are equal texts of one prompt."""

    run: str
    groups: Groups
    text_NR: np.ndarray

    def with_rewards(self, rewards_NR: np.ndarray) -> Groups:
        return replace(self.groups, rewards_NR=rewards_NR.astype(float))

    def coin(self, rng: np.random.Generator) -> Groups:
        """Fair coins, one for each rollout."""
        return self.with_rewards(rng.integers(2, size=self.text_NR.shape))

    def hashed(self, salt: int) -> Groups:
        """A hash of problem, text and salt, modulo 2."""
        bits = [hashlib.sha256(f"{text} {salt}".encode()).digest()[0] & 1 for text in range(self.text_NR.max() + 1)]
        return self.with_rewards(np.array(bits)[self.text_NR])


def frozen_runs(sweep: Sweep) -> list[Frozen]:
    """Of each run of a sweep. A record has no texts, but at a fixed policy a text has one length and one
    log-probability. Texts are numbered through all runs, so that a hash gives one text one reward in all of them.

    Raises ValueError where a group has no Gram, or where the texts so found are not those of `same_as`.
    """
    records = {str(run): read_groups(sweep.path / str(run)) for run in sweep.runs["run"]}
    every = [record for part in records.values() for record in part]
    if any(record.gram is None for record in every):
        raise ValueError("every group needs its Gram: analysis.groups=all")
    lengths, sums = (np.concatenate([getattr(r, name) for r in every]) for name in ("lengths", "logprob_sums"))
    prompts = np.repeat([r.prompt_id for r in every], [r.R for r in every])
    order = np.lexsort((sums, lengths, prompts))
    new = (prompts[order][1:] != prompts[order][:-1]) | (np.diff(lengths[order]) != 0)
    new |= np.diff(sums[order]) > TEXT_GAP
    text = np.empty(len(order), dtype=np.int64)
    text[order] = np.concatenate([[0], np.cumsum(new)])
    found, start = [], 0
    for run, part in records.items():
        R, N = part[0].R, len(part)
        text_NR = text[start : start + N * R].reshape(N, R)
        start += N * R
        same_NR = np.array([r.same_as for r in part])
        if (first_equal(text_NR) != same_NR).any():
            raise ValueError(f"run {run}: texts cannot be told by length and log-probability")
        columns = {name: np.array([getattr(r, name) for r in part]) for name in ("step", "group", "floor")}
        groups = Groups(
            columns["step"], columns["group"], np.array([r.prompt_id for r in part]),
            np.array([r.rewards for r in part]), np.array([r.lengths for r in part]),
            np.array([r.gram for r in part]), same_NR, columns["floor"],
        )  # fmt: skip
        found.append(Frozen(run, groups, text_NR))
    return found


@dataclass(frozen=True)
class Population:
    """X prompts of a policy, each with the same S sequences.

    A sweep's problems are drawn from these X independently and uniformly, so that they are a sample of a population
    without end and the truth is the mean over X. Problem i is of prompt i % X, another number is another problem.
    """

    prompts: tuple[Enumeration, ...]

    @classmethod
    def made(cls, prompts: int = 64, tokens: int = 4, max_length: int = 2, seed: int = 0) -> Population:
        """Rewards of 0 and 1, by a rule that differs between prompts."""
        policy = SoftmaxPolicy(prompts=prompts, tokens=tokens, max_length=max_length, width=4, seed=seed)
        return cls(tuple(several_prompts(policy, [binary(3, i % 3) for i in range(prompts)])))

    @cached_property
    def p_XS(self) -> np.ndarray:
        p_XS = np.array([e.p_N.numpy() for e in self.prompts])
        return p_XS / p_XS.sum(axis=1, keepdims=True)

    @cached_property
    def rewards_XS(self) -> np.ndarray:
        return np.array([e.rewards_N.numpy() for e in self.prompts])

    @cached_property
    def lengths_S(self) -> np.ndarray:
        return self.prompts[0].lengths_N.numpy()

    @cached_property
    def psi_XSD(self) -> np.ndarray:
        return np.array([e.psi_ND.numpy() for e in self.prompts])

    @cached_property
    def gram_XSS(self) -> np.ndarray:
        return self.psi_XSD @ self.psi_XSD.transpose(0, 2, 1)

    def problems(self, steps: int, groups: int, times: int, rng: np.random.Generator) -> np.ndarray:
        """(steps * groups,) problems of a sweep, in which each comes about so many times: once, or drawn from as many
        fewer. Runs of all R share them, as those of one seed do."""
        X, N = len(self.prompts), steps * groups
        some = rng.integers(X, size=max(1, N // times)) + X * np.arange(max(1, N // times))
        return some if times == 1 else rng.choice(some, size=N)

    def draw(self, problem_N: np.ndarray, R: int, groups: int, rng: np.random.Generator) -> tuple[Groups, np.ndarray]:
        """R independent rollouts for each problem, and (N, R) which sequences they are."""
        N = len(problem_N)
        cut_NS = self.p_XS[problem_N % len(self.prompts)].cumsum(axis=1)
        rows_NR = (rng.random((N, R))[:, :, None] > cut_NS[:, None, :-1]).sum(axis=2)
        made = self.groups_of(problem_N, rows_NR)
        return replace(made, step_N=np.arange(N) // groups, group_N=np.arange(N) % groups), rows_NR

    def groups_of(self, problem_N: np.ndarray, rows_NR: np.ndarray) -> Groups:
        """The groups of these problems and sequences, each in a step of its own."""
        N, prompt_N = len(problem_N), problem_N % len(self.prompts)
        gram_NRR = self.gram_XSS[prompt_N[:, None, None], rows_NR[:, :, None], rows_NR[:, None, :]]
        return Groups(
            np.arange(N), np.zeros(N, np.int64), problem_N, self.rewards_XS[prompt_N[:, None], rows_NR],
            self.lengths_S[rows_NR], gram_NRR, first_equal(rows_NR), np.zeros(N),
        )  # fmt: skip

    def metrics(self, groups: Groups, rows_NR: np.ndarray, stacked: bool) -> pd.DataFrame:
        """One row per step: `grad_norm`, and where `stacked` the effective rank of the step's groups together."""
        lines = []
        for step in np.unique(groups.step_N):
            at = np.flatnonzero(groups.step_N == step)
            problem, rows, weights = groups.prompt_N[at], rows_NR[at], groups.weights_NR[at]
            psi = self.psi_XSD[problem[:, None] % len(self.prompts), rows].reshape(rows.size, -1)
            line = {"step": int(step), "time": 0.0, "grad_norm": float(np.linalg.norm(weights.ravel() @ psi))}
            if stacked:
                same = first_equal((problem[:, None] * self.p_XS.shape[1] + rows).ravel())
                found = stacked_summary(psi @ psi.T, weights.ravel(), [rows.shape[1]] * len(at), same)
                line["stacked/effective_rank"] = found.get("effective_rank", np.nan)
            lines.append(line)
        return pd.DataFrame(lines)

    def multisets(self, R: int, x: int, left_out: float = 1e-6) -> Iterator[tuple[Groups, np.ndarray]]:
        """Every multiset of R sequences of prompt x as a group, with its probability; the least likely ones, which
        together have no more than `left_out`, are not there."""
        count_MS = compositions(R, self.p_XS.shape[1])
        log_M = np.array([np.log(np.arange(1, n + 1)).sum() for n in range(R + 1)])
        p_M = np.exp(log_M[R] - log_M[count_MS].sum(axis=1) + count_MS @ np.log(self.p_XS[x]))
        order = np.argsort(p_M)[::-1]
        kept = order[: int(np.searchsorted(p_M[order].cumsum(), 1.0 - left_out)) + 1]
        for part in np.array_split(kept, range(20_000, len(kept), 20_000)):
            rows_MR = np.repeat(np.tile(np.arange(count_MS.shape[1]), len(part)), count_MS[part].ravel())
            yield self.groups_of(np.full(len(part), x), rows_MR.reshape(-1, R)), p_M[part]


_COMPOSITIONS: dict[tuple[int, int], np.ndarray] = {}


def compositions(R: int, S: int) -> np.ndarray:
    """(M, S): every way in which R rollouts can fall on S sequences."""
    if (R, S) not in _COMPOSITIONS:
        if S == 1:
            found = np.array([[R]])
        else:
            found = np.concatenate([
                np.insert(compositions(R - first, S - 1), 0, first, axis=1) for first in range(R + 1)
            ])  # fmt: skip
        _COMPOSITIONS[R, S] = found
    return _COMPOSITIONS[R, S]


@dataclass(frozen=True)
class Exact:
    """Of mixed groups of R rollouts, by k: the chance of each k, then given k the means of the effective rank, the
    top-1 fraction, the squared gradient norm, of "the rank is above R - 1", over i of K_ii and over i != j of K_ij^2,
    and of the other definitions of rank. All (R + 1,), 0 where k is not mixed."""

    p_K: np.ndarray
    rank_K: np.ndarray
    top1_K: np.ndarray
    square_K: np.ndarray
    full_K: np.ndarray
    own_K: np.ndarray
    product2_K: np.ndarray
    participation_ratio_K: np.ndarray
    stable_rank_K: np.ndarray
    entropy_rank_K: np.ndarray
    numerical_rank_K: np.ndarray

    def mean(self, name: str) -> float:
        """Over all mixed groups."""
        return float((self.p_K * getattr(self, name)).sum() / self.p_K.sum())

    def slope(self, groups: int) -> float:
        """C5's, of the k that so many groups, all-equal ones included, are expected to hold often enough."""
        R, k = len(self.p_K) - 1, np.flatnonzero(self.p_K * groups >= rules.MIN_PER_K)
        if R < 4 or len(k) < 2:
            return np.nan
        x, weights = np.log(k * (R - k)), self.p_K[k] / self.p_K[k].sum()
        squares = self.square_K[k] / (weights @ self.square_K[k])
        return float(optimize.brentq(lambda b: tilt(b, x, weights, squares), -20.0, 20.0))


def tilt(b: float, x: np.ndarray, weights: np.ndarray, squares: np.ndarray) -> float:
    """0 at the b of squares = exp(a + b x) by the Poisson pseudo-likelihood, squares of weighted mean 1."""
    fitted = np.exp(b * (x - x.max()))
    return float(weights * (squares - fitted / (weights @ fitted)) @ x)


def exact_values(population: Population, R: int) -> Exact:
    """Sums over every group that can be drawn, prompts uniform."""
    sums_CK = np.zeros((11, R + 1))
    for x in range(len(population.prompts)):
        for groups, p_M in population.multisets(R, x):
            mixed = groups.mixed_N
            add_to(sums_CK, groups, p_M / len(population.prompts), mixed)
    p_K = sums_CK[0]
    means = np.divide(sums_CK[1:], p_K, out=np.zeros((10, R + 1)), where=p_K > 0)
    return Exact(p_K, *means)


def add_to(sums_CK: np.ndarray, groups: Groups, p_M: np.ndarray, mixed: np.ndarray) -> None:
    """Add the groups' chances, and these times their values, by k."""
    advantages, gram, p_M = groups.advantages_NR[mixed], groups.gram_NRR[mixed], p_M[mixed]
    R = gram.shape[1]
    K, weights = merged(gram, advantages, groups.same_NR[mixed])
    own = spectra.eigenvalues(K, weights)
    values = np.sqrt(own)
    error = spectra.graded_error(own, spectra.weighted_gram(K, weights), np.zeros(len(own)))
    square = np.einsum("ni,nij,nj->n", advantages, gram, advantages)
    numerical = spectra.rank_above(own, error)
    diagonal = np.einsum("nii->n", gram) / R
    product2 = (np.square(gram).sum(axis=(1, 2)) - np.einsum("nii->n", np.square(gram))) / (R * (R - 1))
    ranks = spectra.effective_rank(values), spectra.top1_fraction(values)
    others = spectra.participation_ratio(values), spectra.stable_rank(values), spectra.entropy_rank(values), numerical
    columns = (np.ones(len(own)), *ranks, square, numerical > R - 1, diagonal, product2, *others)
    k = groups.rewards_NR[mixed].sum(axis=1).astype(int)
    for row, column in zip(sums_CK, columns, strict=True):
        row += np.bincount(k, weights=p_M * column, minlength=R + 1)


def share_in_words(hits: int, n: int) -> str:
    """A share with its Clopper-Pearson 95% interval, in percent."""
    low = special.betaincinv(hits, n - hits + 1, 0.025) if hits else 0.0
    high = special.betaincinv(hits + 1, n - hits, 0.975) if hits < n else 1.0
    return f"{100 * hits / n:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
