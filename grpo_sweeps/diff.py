"""What differs between two runs, in plain lines: configuration, code, functions of yours, data, weights, versions. It
reads their folders and changes nothing. Exit codes: 0, or 2 for a bad command.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_sweeps import cli
from grpo_sweeps.config import flatten, shown
from grpo_sweeps.config.choices import ABSENT, PLACES
from grpo_sweeps.redaction import redact_mapping
from grpo_sweeps.text import show
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.status import RecordError, RunStatus
from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    run: str = cli.key("", "two runs, by identity, its first digits, or folder", "IDENTITY,IDENTITY", required=True)
    sweep: str = cli.key("", "the sweep of both", "NAME", unset="any")
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")


COMMAND = cli.named("diff", Options, __doc__ or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the lines and return the exit code."""
    return cli.run(COMMAND, argv, _diff)


def _diff(options: Options) -> int:
    runs = options.run.split(",")
    if len(runs) != 2 or not all(runs):
        raise ConfigError(f"diff: run={options.run}: two runs are needed, run=IDENTITY,IDENTITY")
    from grpo_sweeps.sweep.named import find_run

    found = [find_run("diff", Path(options.runs_dir), options.sweep, run) for run in runs]
    for mark, (folder, status) in zip("ab", found, strict=True):
        show(f"{mark}: {folder.name} ({status.name}), sweep {folder.parent.name}, {status.state} at step {status.step}")
    for line in differences(*found):
        show(line)
    return 0


Run = tuple[Path, RunStatus]


def differences(a: Run, b: Run) -> list[str]:
    """The lines below the two runs: each kind with what differs, or that it is the same."""
    sources = [provenance.read(folder, with_diff=False) or provenance.Source() for folder, _ in (a, b)]
    made = [source.made_by for source in sources]
    lines = _listed("configuration", *(flatten(redact_mapping(_config(folder))) for folder, _ in (a, b)))
    if made[0].known and made[1].known:
        verb = "is the same" if made[0].package == made[1].package else "differs"
        codes = [f"{one.package[:7]} (commit {_commit(run)})" for one, run in zip(made, (a, b), strict=True)]
        lines.append(f"code of the package {verb}: {' | '.join(dict.fromkeys(codes))}")
    else:
        lines.append(f"code of the package: not known; commits {_commit(a)} | {_commit(b)}")
    versions = [source.versions or status.versions for source, (_, status) in zip(sources, (a, b), strict=True)]
    own = [_functions(one.functions) for one in made]
    lines += _listed("functions of your own", *own) if any(own) else ["functions of your own: none"]
    for kind, parts in (
        ("data", [one.data for one in made]),
        ("weights", [one.weights for one in made]),
        ("versions", versions),
    ):
        unknown = [mark for mark, part in zip("ab", parts, strict=True) if not part]
        lines += [f"{kind}: not known of {' and '.join(unknown)}"] if unknown else _listed(kind, *parts)
    return lines


def _config(folder: Path) -> Mapping[str, Any]:
    from grpo_sweeps.tracking.local import read_config

    try:
        found = read_config(folder)
    except RecordError as error:
        raise ConfigError(f"diff: {str(error).rstrip('.')}") from error
    return {key: value for key, value in found.items() if key not in PLACES}


def _commit(run: Run) -> str:
    _, status = run
    return f"{(status.commit or 'unknown')[:7]}{', with uncommitted changes' if status.dirty else ''}"


def _functions(functions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {f"{key}: {module}": digest for key, modules in functions.items() for module, digest in modules.items()}


def _listed(kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line for the kind, and one per key that differs."""
    keys = [key for key in {**a, **b} if a.get(key, ABSENT) != b.get(key, ABSENT)]
    if not keys:
        return [f"{kind}: the same"]
    pairs = [(shown(a.get(key, ABSENT)), shown(b.get(key, ABSENT))) for key in keys]
    return [
        f"{kind}: {cli.count(len(keys), 'difference')}",
        *(f"  {key}: {one} | {other}" for key, (one, other) in zip(keys, pairs, strict=True)),
    ]


if __name__ == "__main__":
    sys.exit(main())
