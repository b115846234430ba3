"""python tools/ragged_backward.py [model=nemotron_mini_4b] [micro_batch=8] [groups=8] [rounds=9] [checkpointing=true]

Forward and backward of a step's groups at R=8, measured and plain, in turn: the loop's own `backward`, random weights
in bfloat16 in the model's shape, completions as long as those of mixed groups in a recorded run (5 to 384 tokens),
prompts of 87 to 172. Prints the medians with their ranges, the ratio of the medians, and that of pairs.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from paired import options_of

from grpo_sweeps.benchmarks.setup import synchronize
from grpo_sweeps.config import RunConfig
from grpo_sweeps.engine import policy
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.loop.rollouts import Rated
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.loop.step import backward
from hydra_plugins.grpo_launcher.registration import composed

RECORDS = Path(__file__).resolve().parents[1] / "reports" / "smollm2_gsm8k" / "records" / "smollm2_gsm8k"
R, UNCHECKED_STEP = 8, 1  # at the first step more is checked
DEFAULTS = {"model": "nemotron_mini_4b", "micro_batch": "8", "groups": "8", "rounds": "9", "checkpointing": "true"}


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = options_of(argv, DEFAULTS, __doc__)
    if isinstance(options, int):
        return options
    groups = int(options["groups"])
    setup = made(options, groups)
    rated = of_recorded_lengths(setup, groups)
    ways = {"plain": replace(setup, gram=None), "measured": setup}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(int(options["rounds"]) + 2):
        for way in ways if number % 2 else reversed(ways):
            taken = timed(ways[way], rated)
            if number > 1:  # the first two warm up
                seconds[way].append(taken)
    tokens = sum(len(one.prompt_ids) + one.length for one in rated.rollouts)
    print(
        f"{options['model']}, {groups} groups of {R}, {tokens} tokens, micro-batches of {options['micro_batch']} rows"
    )
    for way, values in seconds.items():
        print(f"{way}: {statistics.median(values):.3f} s [{min(values):.3f}, {max(values):.3f}]")
    middle = {way: statistics.median(values) for way, values in seconds.items()}
    pairs = [m / p for m, p in zip(seconds["measured"], seconds["plain"], strict=True)]
    ratio = middle["measured"] / middle["plain"]
    of_pairs = f"{statistics.median(pairs):.3f} by pairs [{min(pairs):.3f}, {max(pairs):.3f}]"
    print(f"measured / plain: {ratio:.3f} by medians, {of_pairs}")
    return 0


def made(options: dict[str, str], groups: int) -> Setup:
    """A run's set-up of random weights; they are drawn on the device, which takes seconds and not minutes."""
    words = (
        f"model={options['model']} model.path=embedded model.random=true model.chat_template=false R={R} reward=random"
    )
    words += f" trainer.prompts={groups} trainer.micro_batch={options['micro_batch']}"
    words += f" model.gradient_checkpointing={options['checkpointing']} tracking=local"
    config = RunConfig.from_composed(composed(*words.split()))
    device, load = policy.resolve_device(config.trainer.device), policy.load_model

    def there(model: Any) -> Any:
        with device if device.type == "cuda" else nullcontext():
            return load(model)

    policy.load_model = there
    return prepare(config)


def of_recorded_lengths(setup: Setup, groups: int) -> Rated:
    """Groups of random tokens whose lengths are those of recorded mixed groups; weights of one size and either sign."""
    frames = [pd.read_parquet(path) for path in sorted(RECORDS.glob("*/grams/*.parquet"))]
    table = pd.concat(frames)
    lengths = [list(map(int, row)) for row in table[(table["R"] == R) & table["gram"].notna()]["lengths"][:groups]]
    rng = np.random.default_rng(0)
    words = min(setup.policy.model.get_input_embeddings().num_embeddings, 30_000)

    def drawn(tokens: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(10, words, tokens))

    rollouts = []
    for of_group in lengths:
        prompt = drawn(int(rng.integers(87, 173)))
        rollouts += [Rollout(prompt, drawn(n), "", np.zeros(n, dtype=np.float32), False) for n in of_group]
    weights_GR = torch.from_numpy(rng.choice([-0.5, 0.5], (groups, R)))
    ones_GR = torch.ones(groups, R, dtype=torch.float64)
    return Rated([setup.data.train[0]] * groups, rollouts, [], ones_GR, weights_GR, weights_GR, ones_GR)


def timed(setup: Setup, rated: Rated) -> float:
    """Seconds of one forward and backward of all groups."""
    for parameter in setup.policy.model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.zero_()
    synchronize(setup.policy.device)
    begun = time.perf_counter()
    backward(setup, rated, UNCHECKED_STEP)
    synchronize(setup.policy.device)
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
