"""What the tools share: the words of a command; and of those that compare two kinds of runs one recorded run and the
interval of paired ratios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, BLOCK, DRAWS = 5, 5, 2000
# Words whose values are no numbers.
TEXTS = ("json", "csv", "runs_dir", "where", "faults", "reports", "model", "checkpointing")
# Training and nothing else: no evaluations, no checkpoints.
RUN = (
    "trainer.eval_every=0", "trainer.checkpoint_every=0", "trainer.checkpoint_minutes=null", "trainer.device=cpu",
    "task.n_held_out=256",
)  # fmt: skip


def options_of(argv: list[str], options: dict[str, str], doc: str | None) -> dict[str, str] | int:
    """`options` as the words of a command set them; an exit code where there is nothing to do."""
    if {"-h", "--help"} & set(argv):
        print(doc)
        return 0
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in options or (key not in TEXTS and not value.isdigit()):
            print(f"{word}: not understood; allowed are {', '.join(f'{k}=...' for k in options)}", file=sys.stderr)
            return 2
        options[key] = value
    return options


def started(folder: Path, more: list[str]) -> subprocess.Popen[bytes]:
    """A run in `folder`, on one thread, its output in `out`."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "grpo_sweeps.run", *RUN, *more]
    with open(folder / "out", "wb") as out:
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out)


def recorded(folder: Path, more: list[str], R: str, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each step of one run: from record to record, and of the training step itself."""
    (path,) = _ended(started(folder, [f"R={R}", f"seed={seed}", f"trainer.steps={steps}", *more]), folder)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    moments, training = np.array([line["time"] for line in lines]), np.array([line["step_time"] for line in lines])
    return np.diff(moments, prepend=moments[0] - training[0]), training


def _ended(process: subprocess.Popen[bytes], folder: Path) -> list[Path]:
    """The run's record. Leaving may take a minute more, for the last pass of the copy: only training counts."""
    code = process.wait()
    if code != 0:
        raise SystemExit(f"the run in {folder} ended with exit code {code}; see {folder / 'out'}")
    return list(folder.glob("runs/*/*/metrics.jsonl"))


def interval(ratios: np.ndarray, seed: int, block: int = BLOCK) -> tuple[float, float, float]:
    """Median of (rounds, steps) ratios, less the steps that fill no block, and its 95% interval, by a bootstrap over
    rounds and over blocks of so many steps within them."""
    rng = np.random.default_rng(seed)
    rounds, steps = ratios.shape
    blocks = steps // block
    shaped = ratios[:, : blocks * block].reshape(rounds, blocks, block)
    drawn = []
    for _ in range(DRAWS):
        chosen = shaped[rng.integers(rounds, size=rounds)]
        picks = rng.integers(blocks, size=(rounds, blocks))
        drawn.append(np.median(np.take_along_axis(chosen, picks[:, :, None], axis=1)))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.median(shaped)), float(low), float(high)
