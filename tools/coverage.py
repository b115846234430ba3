"""python tools/coverage.py [sweeps=400] [steps=32] [prompts=8] [seed=0] [csv=FILE]

How often the report's 95% intervals hold the truth, over sweeps drawn from a softmax policy whose sequences are all
listed. So many sweeps of so many steps of so many prompts, each at a fixed policy; the truth is the sum over all groups
that can be drawn.

    effective rank, top-1 fraction, less null   Table 1's means over mixed groups; by k as well, as in by_k.csv
    mixed groups, directions, norm slope        C4's share, C9's (tr F)^2 / tr F^2 and C5's slope
    Q3 total, composition, geometry             changes between the thirds of the steps, all 0 at a fixed policy
    R*, V1, V2, V_between, signal to noise      of the best group size; an interval without an upper end holds all above
    gain, accuracy, gain less gain              of a policy trained on half of its prompts by so many other seeds: drawn
                                                are seeds, 100 problems of the other half, 4 samples of each before and
                                                after; the last, C11's difference, between two R that are
                                                trained alike. One seed: the truth is that seed's own.

`seeds`: runs of each R; seeds of one fixed policy do not differ, which an interval over seeds cannot know. `times`: how
often a problem comes in a run, about; problems are drawn from a population without end. `intervals`: sweeps that had
one. Printed is the share that holds the truth with its Clopper-Pearson 95% interval, in percent; csv has every column.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from drawn_sweeps import SIZES, Exact, Population, config, exact_values, filled, share_in_words, show, skeleton
from paired import options_of

from grpo_sweeps.estimators import grpo
from grpo_sweeps.exact import SoftmaxPolicy, binary, row_log_probs
from grpo_sweeps.exact.enumeration import all_sequences
from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.report.claims.advantages import c4
from grpo_sweeps.report.claims.budget import gain_difference
from grpo_sweeps.report.claims.gradient import directions, slope
from grpo_sweeps.report.claims.training import parts_of_change
from grpo_sweeps.report.design.best_size import best_size
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import accuracies, pooled, pooled_difference, records_of, usable_groups
from grpo_sweeps.science.budget import Budget
from grpo_sweeps.science.claim import Prompt

OPTIONS = {"sweeps": "400", "steps": "32", "prompts": "8", "seed": "0", "csv": ""}
LEVEL = 0.05
BEST = ("best_R", "V1", "V2", "V_between", "snr")
TRAINED, PROBLEMS, SAMPLES = 100, 100, 4  # seeds that were trained; drawn problems; samples of each
TRAINING = {"steps": 10, "prompts": 1, "R": 4, "lr": 0.15}


@dataclass
class Held:
    """By (quantity, R), of one setting: for each interval whether it holds the truth."""

    seeds: int
    times: int
    found: dict[tuple[str, int], list[bool]] = field(default_factory=dict)
    truths: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, quantity: str, R: int, low: float, high: float, truth: float) -> None:
        """An interval; one with an end that is not known does not count."""
        self.truths[quantity, R] = truth
        hits = self.found.setdefault((quantity, R), [])
        if not np.isnan([low, high]).any():
            hits.append(bool(low <= truth <= high))

    def table(self, sweeps: int) -> pd.DataFrame:
        """One row per quantity and R."""
        return pd.DataFrame([
            {"quantity": name, "R": R or "", "seeds": self.seeds, "times": self.times,
             "truth": f"{self.truths[name, R]:.4g}", "sweeps": sweeps, "intervals": len(hits),
             "held %": share_in_words(sum(hits), len(hits)) if hits else ""}
            for (name, R), hits in self.found.items()
        ])  # fmt: skip


def truths_of(exact: Exact, R: int, groups: int) -> dict[str, float]:
    """Of the intervals over groups, by the names of the module's docstring."""
    k = np.arange(R + 1)
    null = exact.p_K @ (4.0 * k * (R - k) / R) / exact.p_K.sum()
    found = {
        "effective rank": exact.mean("rank_K"), "top-1 fraction": exact.mean("top1_K"),
        "less null": exact.mean("rank_K") - float(null), "mixed groups": float(exact.p_K.sum()),
        "directions": exact.mean("own_K") ** 2 / exact.mean("product2_K"), "norm slope": exact.slope(groups),
    }  # fmt: skip
    found |= {f"effective rank, k = {i}": float(exact.rank_K[i]) for i in range(1, R)}
    return found | {f"top-1 fraction, k = {i}": float(exact.top1_K[i]) for i in range(1, R)}


def intervals_of(sweep: Sweep, arm: str, R: int) -> dict[str, Interval]:
    """The report's own, by the same names."""
    groups, records = usable_groups(sweep, arm, R), records_of(sweep, arm, R)
    (mixed,) = c4(arm, "group mean", {R: records}).findings
    found = {
        "effective rank": pooled(groups, "effective_rank"), "top-1 fraction": pooled(groups, "top1_fraction"),
        "less null": pooled_difference(groups), "mixed groups": mixed.interval, "directions": directions(groups),
        "norm slope": slope(groups, LEVEL),
    }  # fmt: skip
    for k in range(1, R):
        part = groups[groups["k"] == k]
        found[f"effective rank, k = {k}"] = pooled(part, "effective_rank")
        found[f"top-1 fraction, k = {k}"] = pooled(part, "top1_fraction")
    parts = parts_of_change(groups)
    return found | {f"Q3 {name}": one for name, one in (parts[1] if parts else {}).items()}


def drawn(population: Population, numbers: Mapping[str, int], held: Held, folder: Path) -> None:
    """Add the intervals over groups and those of the best group size."""
    steps, prompts, seeds = numbers["steps"], numbers["prompts"], held.seeds
    empty = skeleton(
        folder, f"exact{seeds}-{held.times}", [config(R, s, steps, prompts) for R in SIZES for s in range(seeds)]
    )
    ((arm, _), *_) = empty.cells
    truths = {R: truths_of(exact_values(population, R), R, steps * prompts * seeds) for R in SIZES}
    budget = Budget(tuple(Prompt(e) for e in population.prompts))
    for number in range(numbers["sweeps"]):
        rng = np.random.default_rng([numbers["seed"], seeds, held.times, number])
        rows, metrics = {}, {}
        picked = [population.problems(steps, prompts, held.times, rng) for _ in range(seeds)]
        for run in empty.runs.itertuples():
            groups, sequences = population.draw(picked[run.seed], run.R, prompts, rng)
            rows[run.run] = groups.rows(run.seed)
            metrics[run.run] = population.metrics(groups, sequences, stacked=False)
        sweep = filled(empty, rows, metrics)
        for R in SIZES:
            for name, one in intervals_of(sweep, arm, R).items():
                truth = truths[R].get(name, 0.0)
                if not np.isnan(truth):
                    held.add(name, R, one.low, one.high, truth)
            if R >= 4:
                add_best_size(sweep, arm, R, budget, prompts, held)


def add_best_size(sweep: Sweep, arm: str, R: int, budget: Budget, prompts: int, held: Held) -> None:
    """R* and what it is made of."""
    found, target = best_size(sweep, arm, R), budget.target_D
    truth = {
        "best_R": budget.best_R, "V1": budget.V1, "V2": budget.V2, "V_between": budget.between,
        "snr": float(target @ target) / budget.leave_one_out(R, R * prompts),
    }  # fmt: skip
    for name in BEST:
        held.add({"best_R": "R*", "snr": "signal to noise"}.get(name, name), R, *found.interval(name), truth[name])


@dataclass(frozen=True)
class Learners:
    """Chances of a right answer: before_X of one policy, after_SX of S seeds that trained it; X held-out problems."""

    before_X: np.ndarray
    after_SX: np.ndarray


def trained(seed: int, problems: int = 128) -> Learners:
    """Half of the prompts train a policy by group means, so many steps of sampled rollouts for each seed; the other
    half is held out."""
    policy = SoftmaxPolicy(prompts=problems, tokens=4, max_length=2, width=4, seed=seed)
    tokens_ST, mask_ST = all_sequences(policy.tokens, policy.max_length, policy.ends)
    rewards_XS = torch.stack([binary(3, 0)(tokens_ST, mask_ST).sum(dim=1)] * problems)
    held_out = torch.arange(problems // 2, problems)

    def right(one: SoftmaxPolicy, prompts: torch.Tensor) -> torch.Tensor:
        return (log_probs(one, prompts).exp() * rewards_XS[prompts]).sum(dim=1)

    def log_probs(one: SoftmaxPolicy, prompts: torch.Tensor) -> torch.Tensor:
        rows = len(tokens_ST)
        found = row_log_probs(
            one, prompts.repeat_interleave(rows), tokens_ST.repeat(len(prompts), 1), mask_ST.repeat(len(prompts), 1)
        )
        return found.reshape(-1, rows)

    after = []
    for number in range(TRAINED):
        one, rng = copy.deepcopy(policy), torch.Generator().manual_seed(1000 * seed + number)
        optimizer = torch.optim.SGD(one.parameters(), lr=TRAINING["lr"])
        for _ in range(int(TRAINING["steps"])):
            prompts = torch.randint(problems // 2, (int(TRAINING["prompts"]),), generator=rng)
            logs = log_probs(one, prompts)
            rows = torch.multinomial(logs.detach().exp(), int(TRAINING["R"]), replacement=True, generator=rng)
            weights = torch.from_numpy(grpo(rewards_XS[prompts].gather(1, rows).numpy())) / rows.numel()
            optimizer.zero_grad()
            (-(weights * logs.gather(1, rows)).sum()).backward()
            optimizer.step()
        with torch.no_grad():
            after.append(right(one, held_out).numpy())
    with torch.no_grad():
        return Learners(right(policy, held_out).numpy(), np.array(after))


def evals_of(learners: Learners, runs: pd.DataFrame, chosen_N: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
    """Two evaluations of each run, all on the same problems; chosen: which trained seed each of `runs` is."""
    problems = rng.integers(len(learners.before_X), size=PROBLEMS)
    frames = []
    for run, seed in zip(runs.itertuples(), chosen_N, strict=True):
        for step, chance_X in ((0, learners.before_X), (1, learners.after_SX[seed])):
            right = rng.binomial(SAMPLES, chance_X[problems])
            frames.append(pd.DataFrame({
                "run": run.run, "arm": run.arm, "R": run.R, "seed": run.seed, "step": step, "samples": SAMPLES,
                "problem_id": [f"h{j}" for j in range(PROBLEMS)], "strict": right, "flexible": right,
                "greedy_strict": right > 1, "greedy_flexible": right > 1,
            }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def gains(learners: Learners, numbers: Mapping[str, int], held: Held, folder: Path) -> None:
    """Add the intervals of the gain, of the accuracy in the end, and of C11's difference between the gains at two R,
    which are trained alike here, so that it is 0."""
    least, R = 2, 4
    empty = skeleton(folder, f"gain{held.seeds}", [config(r, s, 1, 1) for r in (least, R) for s in range(held.seeds)])
    ((arm, _), *_) = empty.cells
    gain_S = learners.after_SX.mean(axis=1) - learners.before_X.mean()
    at_R = (empty.runs["R"] == R).to_numpy()
    for number in range(numbers["sweeps"]):
        rng = np.random.default_rng([numbers["seed"], held.seeds, number, 1])
        chosen = rng.integers(TRAINED, size=len(empty.runs))
        empty.evals = evals_of(learners, empty.runs, chosen, rng)
        row = accuracies(empty, arm, R)
        own = [float(gain_S[chosen[which]].mean()) for which in (at_R, ~at_R)]
        gain, less = (own[0], own[0] - own[1]) if held.seeds == 1 else (float(gain_S.mean()), 0.0)
        for name, truth in (("gain", gain), ("accuracy", gain + float(learners.before_X.mean()))):
            column = "accuracy_gain" if name == "gain" else name
            held.add(name, 0, float(str(row[f"{column}_low"])), float(str(row[f"{column}_high"])), truth)
        found = gain_difference(empty, arm, R, least, LEVEL)
        held.add("gain less gain", 0, found.low, found.high, less)


def measured(numbers: Mapping[str, int]) -> Iterator[pd.DataFrame]:
    """The table, part by part."""
    population, learners = Population.made(seed=numbers["seed"]), trained(numbers["seed"])
    with tempfile.TemporaryDirectory() as folder:
        for held in (Held(1, 1), Held(1, 4), Held(3, 1)):
            drawn(population, numbers, held, Path(folder))
            yield held.table(numbers["sweeps"])
        for held in (Held(seeds, 1) for seeds in (1, 2, 3, 5)):
            gains(learners, numbers, held, Path(folder))
            yield held.table(numbers["sweeps"])


def printed(found: pd.DataFrame) -> list[str]:
    """The shares as lines of Markdown: one table of what is measured of groups, one of the gain."""
    lines: list[str] = []
    for of_groups in (True, False):
        part = found[(found["R"].astype(str) != "") == of_groups]
        settings = list(dict.fromkeys(zip(part["seeds"].astype(int), part["times"].astype(int), strict=True)))
        times = {1: "each problem once", 4: "each about 4 times"} if of_groups else {1: ""}
        heads = [", ".join(filter(None, (f"{s} seed{'s' * (s > 1)}", times[t]))) for s, t in settings]
        lines += ["", f"| quantity | {'R | truth | ' * of_groups}{' | '.join(heads)} |"]
        lines.append("|---" * (1 + 2 * of_groups + len(heads)) + "|")
        for (name, R), rows in part.groupby(["quantity", "R"], sort=False):
            held = {(int(row["seeds"]), int(row["times"])): row["held %"] for row in rows.to_dict("records")}
            first = f"{name} | {R} | {rows['truth'].iloc[0]}" if of_groups else name
            lines.append(f"| {first} | {' | '.join(held.get(setting, '') for setting in settings)} |")
    return lines[1:]


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = options_of(argv, dict(OPTIONS), __doc__)
    if isinstance(options, int):
        return options
    parts = list(measured({key: int(value) for key, value in options.items() if value.isdigit()}))
    found = pd.concat(parts, ignore_index=True)
    return show(found, printed(found), options["csv"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
