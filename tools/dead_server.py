"""python tools/dead_server.py [rounds=10] [pairs=10] [seconds=4] [R=8] [prompts=4] [seed=0] [json=FILE]

How much a dead tracking server slows training. Each round starts two runs of the same configuration: one copied to a
healthy `mlflow server`, one to an address where a server takes connections and never answers (the worst kind of dead).
Once both train they take turns of some seconds, while the other is stopped with all its processes, in `pairs` of turns
each in random order: a machine that slows down slows both. Steps that began and ended within a turn count. Prints the
median over pairs of the ratio dead / healthy of a turn's median step, and its 95% interval, by a bootstrap over rounds
and over the pairs within them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fault_slurm import Server
from paired import WARM_UP, interval, options_of, started

FOREVER = 100_000  # steps, of which a run makes as many as its turns allow


@dataclass
class Player:
    """A run that trains in its turns alone. turns: (begin, end) of each, in the clock of its records."""

    folder: Path
    process: subprocess.Popen[bytes]
    turns: list[tuple[float, float]] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        """To the run and all its descendants."""
        for pid in list(tree(self.process.pid)):  # all of them before the first is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def play(self, seconds: float) -> None:
        self.signal(signal.SIGCONT)
        begin = time.time()
        time.sleep(seconds)
        end = time.time()
        self.signal(signal.SIGSTOP)
        self.turns.append((begin, end))

    def moments(self) -> np.ndarray:
        """When each step was recorded."""
        paths = list(self.folder.glob("runs/*/*/metrics.jsonl"))
        text = paths[0].read_text(encoding="utf-8") if paths else ""
        return np.array([json.loads(line)["time"] for line in text[: text.rfind("\n") + 1].splitlines()])

    def trains(self) -> None:
        """Wait until the first steps are done, then stop."""
        while len(self.moments()) <= WARM_UP:
            if self.process.poll() is not None:
                raise SystemExit(f"the run in {self.folder} ended before its turn; see {self.folder / 'out'}")
            time.sleep(0.2)
        self.signal(signal.SIGSTOP)

    def steps(self) -> list[np.ndarray]:
        """Seconds of the steps within each turn."""
        moments = self.moments()
        begins, ends = moments[:-1], moments[1:]
        return [(ends - begins)[(begins >= low) & (ends <= high)] for low, high in self.turns]


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants. One that has ended has none."""
    yield pid
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                yield from tree(int(child))


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    known = {"rounds": "10", "pairs": "10", "seconds": "4", "R": "8", "prompts": "4", "seed": "0", "json": ""}
    options = options_of(argv, known, __doc__)
    if isinstance(options, int):
        return options
    rounds, pairs, seconds, seed = (int(options[key]) for key in ("rounds", "pairs", "seconds", "seed"))
    folder, rng = Path(tempfile.mkdtemp(prefix="dead-server-")), random.Random(seed)
    server = Server(folder / "server")
    server.start()
    ratios = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(200)
        uris = {"healthy": server.uri, "dead": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        shared = [f"R={options['R']}", f"trainer.prompts={options['prompts']}", f"trainer.steps={FOREVER}"]
        try:
            for number in range(rounds):
                words = {kind: [*shared, f"seed={number}", "tracking=mlflow", f"tracking.uri={uris[kind]}"]
                         for kind in rng.sample(sorted(uris), 2)}  # fmt: skip
                ratios.append(one_round(folder / str(number), words, pairs, seconds, rng))
                print(f"round {number}: median ratio {np.median(ratios[-1]):.4f} of {pairs} pairs", flush=True)
        finally:
            server.kill()
    middle, low, high = interval(np.array(ratios), seed, block=1)
    print(f"median step, dead / healthy: {middle:.4f} [{low:.4f}, {high:.4f}] ({rounds} rounds of {pairs} pairs of "
          f"turns of {seconds} s at R={options['R']}, {options['prompts']} prompts a step)")  # fmt: skip
    if options["json"]:
        content = {"median": middle, "low": low, "high": high, "ratios": [list(map(float, r)) for r in ratios]}
        Path(options["json"]).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def one_round(folder: Path, words: dict[str, list[str]], pairs: int, seconds: int, rng: random.Random) -> np.ndarray:
    """Ratios dead / healthy of the median step of each pair of turns, (pairs,)."""
    players: dict[str, Player] = {}
    try:
        for kind, more in words.items():
            players[kind] = Player(folder / kind, started(folder / kind, more))
            players[kind].trains()
        for _ in range(pairs):
            for kind in rng.sample(sorted(players), 2):
                players[kind].play(seconds)
        medians = {kind: [median_of(steps, seconds) for steps in player.steps()] for kind, player in players.items()}
    finally:
        for player in players.values():
            player.signal(signal.SIGKILL)
            player.process.wait()
    return np.array(medians["dead"]) / np.array(medians["healthy"])


def median_of(steps: np.ndarray, seconds: int) -> float:
    if not len(steps):
        raise SystemExit(f"seconds={seconds}: no step fits into a turn, longer turns are needed")
    return float(np.median(steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
