"""python tools/overhead.py [steps=60] [rounds=5] [R=8] [seed=0] [json=FILE]

What a run costs besides training, checkpoints and evaluations off. Each round trains the same configuration twice, in
random order: records alone (`tracking=local`), and records copied to MLflow's default store by the other process
(`tracking=mlflow`). Prints the share of the time between two records that no training step accounts for, and the
median of the paired ratios mlflow / local with its 95% interval (steps up to the fifth left out).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from paired import BLOCK, WARM_UP, interval, options_of, recorded

KINDS = {"local": ["tracking=local"], "mlflow": ["tracking=mlflow", "tracking.uri=sqlite:///mlflow.db"]}


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = options_of(argv, {"steps": "60", "rounds": "5", "R": "8", "seed": "0", "json": ""}, __doc__)
    if isinstance(options, int):
        return options
    if int(options["steps"]) < WARM_UP + BLOCK:
        print(f"steps={options['steps']}: at least {WARM_UP + BLOCK} are needed", file=sys.stderr)
        return 2
    steps, rounds, seed = int(options["steps"]), int(options["rounds"]), int(options["seed"])
    folder, rng = Path(tempfile.mkdtemp(prefix="overhead-")), random.Random(seed)
    besides: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ratios = []
    for number in range(rounds):
        times = {}
        for kind in rng.sample(sorted(KINDS), 2):
            between, training = recorded(folder / f"{number}-{kind}", KINDS[kind], options["R"], steps, number)
            times[kind] = between
            besides[kind] += list((between - training)[WARM_UP:] / between[WARM_UP:])
        ratios.append(times["mlflow"][WARM_UP:] / times["local"][WARM_UP:])
        print(f"round {number}: " + ", ".join(f"{kind} {np.median(t[WARM_UP:]):.4f} s" for kind, t in times.items()),
              flush=True)  # fmt: skip
    for kind, shares in besides.items():
        low, middle, high = np.quantile(shares, [0.05, 0.5, 0.95])
        print(f"{kind}: {middle:.2%} of a step besides training (5% to 95% of steps: {low:.2%} to {high:.2%})")
    middle, low, high = interval(np.array(ratios), seed)
    print(f"median step, mlflow / local: {middle:.4f} [{low:.4f}, {high:.4f}] ({rounds} rounds of {steps} steps)")
    if options["json"]:
        content = {"besides": besides, "median": middle, "low": low, "high": high}
        Path(options["json"]).write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
