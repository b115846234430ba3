"""python tools/dead_server.py [steps=60] [rounds=5] [R=8] [prompts=16] [seed=0] [json=FILE]

How much a dead tracking server slows training. Each round starts two runs of the same configuration one after the
other, in random order: one copied to a healthy `mlflow server`, one to an address where a server takes connections and
never answers (the worst kind of dead). Step k of one is paired with step k of the other; steps up to the fifth are left
out. Prints the median of the paired ratios dead / healthy and its 95% interval, by a bootstrap over rounds and over
blocks of steps within them.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from fault_slurm import Server

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, BLOCK, DRAWS = 5, 5, 2000
RUN = (
    "trainer.eval_every=0", "trainer.checkpoint_every=0", "trainer.checkpoint_minutes=null", "trainer.device=cpu",
    "task.n_held_out=256",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    options = options_of(
        argv, {"steps": "60", "rounds": "5", "R": "8", "prompts": "16", "seed": "0", "json": ""}, __doc__
    )
    if isinstance(options, int):
        return options
    steps, rounds, seed = int(options["steps"]), int(options["rounds"]), int(options["seed"])
    folder, rng = Path(tempfile.mkdtemp(prefix="dead-server-")), random.Random(seed)
    server = Server(folder / "server")
    server.start()
    ratios = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(200)
        uris = {"healthy": server.uri, "dead": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        try:
            for number in range(rounds):
                times = {}
                for kind in rng.sample(sorted(uris), 2):
                    words = ["tracking=mlflow", f"tracking.uri={uris[kind]}", f"trainer.prompts={options['prompts']}"]
                    times[kind] = recorded(folder / f"{number}-{kind}", words, options["R"], steps, number)[0]
                ratios.append(times["dead"][WARM_UP:] / times["healthy"][WARM_UP:])
                print(f"round {number}: dead {np.median(times['dead'][WARM_UP:]):.4f} s, healthy "
                      f"{np.median(times['healthy'][WARM_UP:]):.4f} s, median ratio {np.median(ratios[-1]):.4f}",
                      flush=True)  # fmt: skip
        finally:
            server.kill()
    middle, low, high = interval(np.array(ratios), seed)
    print(f"median step after step {WARM_UP}, dead / healthy: {middle:.4f} [{low:.4f}, {high:.4f}] "
          f"({rounds} rounds of {steps} steps at R={options['R']}, {options['prompts']} prompts a step)")  # fmt: skip
    if options["json"]:
        content = {"median": middle, "low": low, "high": high, "ratios": [list(map(float, r)) for r in ratios]}
        Path(options["json"]).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def options_of(argv: list[str], options: dict[str, str], doc: str | None) -> dict[str, str] | int:
    """`options` as the words of a command set them; an exit code where there is nothing to do."""
    if {"-h", "--help"} & set(argv):
        print(doc)
        return 0
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in options or (key != "json" and not value.isdigit()):
            print(f"{word}: not understood; allowed are {', '.join(f'{k}=...' for k in options)}", file=sys.stderr)
            return 2
        options[key] = value
    if int(options["steps"]) < WARM_UP + BLOCK:
        print(f"steps={options['steps']}: at least {WARM_UP + BLOCK} are needed", file=sys.stderr)
        return 2
    return options


def recorded(folder: Path, more: list[str], R: str, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each step of one run: from record to record, and of the training step itself."""
    words = [sys.executable, "-m", "grpo_sweeps.run", f"R={R}", f"seed={seed}", f"trainer.steps={steps}", *RUN, *more]
    folder.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder / "out", "wb") as out:
        done = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out)
        (path,) = _ended(done, folder)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    moments, training = np.array([line["time"] for line in lines]), np.array([line["step_time"] for line in lines])
    return np.diff(moments, prepend=moments[0] - training[0]), training


def _ended(process: subprocess.Popen[bytes], folder: Path) -> list[Path]:
    """The run's record. Leaving may take a minute more, for the last pass of the copy: only training counts."""
    code = process.wait()
    if code != 0:
        raise SystemExit(f"the run in {folder} ended with exit code {code}; see {folder / 'out'}")
    return list(folder.glob("runs/*/*/metrics.jsonl"))


def interval(ratios: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Median of (rounds, steps) ratios, less the steps that fill no block, and its bootstrap's 95% interval."""
    rng = np.random.default_rng(seed)
    rounds, steps = ratios.shape
    blocks = steps // BLOCK
    shaped = ratios[:, : blocks * BLOCK].reshape(rounds, blocks, BLOCK)
    drawn = []
    for _ in range(DRAWS):
        chosen = shaped[rng.integers(rounds, size=rounds)]
        picks = rng.integers(blocks, size=(rounds, blocks))
        drawn.append(np.median(np.take_along_axis(chosen, picks[:, :, None], axis=1)))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.median(shaped)), float(low), float(high)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
