"""Which code, packages and machine made a run. No imports of the packages themselves, nothing from the environment
but SLURM's job id, and no secrets: see `redaction`.

The source that a run is submitted from (`Source`) is written at submission and compared when the run starts: a job may
wait for days, and it imports what the folder holds when it starts. `made_by` holds the digests that decide whether
something else would make the run now (see `made_by.py`); commit, diff and versions are for people.

    source.json    {"commit", "dirty", "diff_sha256", "versions", "packages", "command", "time", "made_by",
                    "choices"}
    source.diff    the uncommitted changes of tracked files, redacted, at most 1 MiB; none where there are none
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpo_sweeps.files import write_text
from grpo_sweeps.redaction import HIDDEN, redact, redact_words
from grpo_sweeps.tracking.made_by import UNKNOWN, MadeBy, from_json, mixed

PACKAGES = (
    "grpo_sweeps",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "hydra-core",
    "submitit",
    "mlflow",
    "peft",
)

SOURCE_JSON, SOURCE_DIFF = "source.json", "source.diff"
MOST_DIFF = 2**20  # characters of the diff that are kept


@functools.cache
def commit() -> str | None:
    """The git commit of the package's own source, or None when it does not run from a checkout (a wheel, no git)."""
    if _git("ls-files", "--error-unmatch", "types.py") is None:
        return None  # installed inside some other project's checkout: its commit says nothing about this package
    return _git("rev-parse", "HEAD")


@functools.cache
def dirty() -> bool | None:
    """True when the checkout differs from its commit. Changed tracked files and new source files count, reports do not.

    None when there is no checkout.
    """
    top = _git("rev-parse", "--show-toplevel")
    if commit() is None or top is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports", cwd=Path(top))
    new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml", ":!reports", cwd=Path(top))
    return bool(changed or new)


@functools.cache
def diff() -> str | None:
    """The uncommitted changes of tracked files, without reports, as `git diff` writes them; None without a checkout.

    Read once per process, like the commit: the modules in memory are those of its start.
    """
    top = _git("rev-parse", "--show-toplevel")
    if commit() is None or top is None:
        return None
    return _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".", ":!reports", cwd=Path(top))


def _git(*arguments: str, cwd: Path | None = None) -> str | None:
    """git's answer, or None when git is missing, slow, or says no."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=cwd or Path(__file__).resolve().parents[1],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            errors="replace",  # a file of another encoding in the diff
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def versions() -> dict[str, str]:
    """Python's version and those of the packages that can change a result, where they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def host() -> str:
    """This machine's name, as `RunStatus.stale` compares it."""
    return socket.gethostname()


def job_id(environment: dict[str, str] | None = None) -> str | None:
    """SLURM's id of this job ("12_3" for an array's task), or None outside a job."""
    env = os.environ if environment is None else environment
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


def command(argv: Sequence[str] | None = None) -> str:
    """The command line, quoted so that a shell takes it, without credentials."""
    words = list(sys.argv if argv is None else argv)
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)
    if argv is None and module:
        words = ["python", "-m", module.removesuffix(".__main__"), *words[1:]]
    return shlex.join(redact_words(words))


@dataclass(frozen=True)
class Source:
    """What a process runs from. `diff_sha256` is that of the whole diff, also where `diff` is cut."""

    commit: str | None = None
    dirty: bool | None = None
    diff: str = ""
    diff_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)  # of packages that can change a result
    packages: dict[str, str] = field(default_factory=dict)  # all installed ones
    command: str = ""
    time: float = 0.0
    made_by: MadeBy = UNKNOWN
    choices: dict[str, str] = field(default_factory=dict)  # group of conf/ -> the name of its chosen file


def snapshot(command: str = "", made_by: MadeBy = UNKNOWN) -> Source:
    """The source of this process, now. Needs git only to know commit and diff."""
    whole = diff() or ""
    digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest() if whole else ""
    kept = redact(whole[:MOST_DIFF])
    if len(whole) > MOST_DIFF:
        kept += f"\n(cut: the whole diff has {len(whole)} characters)\n"
    return Source(commit(), dirty(), kept, digest, versions(), packages(), redact(command), time.time(), made_by)


@functools.cache
def packages() -> dict[str, str]:
    """Name -> version of every installed package."""
    found = {str(one.metadata["Name"]): one.version for one in importlib.metadata.distributions() if one.metadata}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def write(run_dir: Path, source: Source) -> None:
    """Put source.json and source.diff into the run's folder."""
    content = asdict(source)
    diff = content.pop("diff")
    if diff:
        text = diff.encode("utf-8", "replace").decode("utf-8")
        write_text(run_dir / SOURCE_DIFF, text, private=HIDDEN in text)  # as its author keeps the file that it is of
    else:
        (run_dir / SOURCE_DIFF).unlink(missing_ok=True)
    content["command"] = redact(source.command)
    write_text(run_dir / SOURCE_JSON, json.dumps(content, indent=1) + "\n")


def read(run_dir: Path, with_diff: bool = True) -> Source | None:
    """The source that was written; None where there is none that can be read."""
    try:
        content = json.loads((run_dir / SOURCE_JSON).read_text(encoding="utf-8"))
        path = run_dir / SOURCE_DIFF
        diff = path.read_text(encoding="utf-8", errors="replace") if with_diff and path.exists() else ""
        return Source(**{**content, "diff": diff, "made_by": from_json(content.get("made_by"))})
    except (OSError, ValueError, TypeError, AttributeError):  # missing, damaged, or of another version
        return None


def read_made_by(run_dir: Path) -> MadeBy:
    """The digests of what made a run; nothing known where it does not say."""
    try:
        content = json.loads((run_dir / SOURCE_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return UNKNOWN
    return from_json(content.get("made_by")) if isinstance(content, dict) else UNKNOWN


def mixed_in(sweep_dir: Path) -> list[str]:
    """What several versions of made runs of a sweep, one sentence each; see `made_by.mixed`."""
    import yaml

    runs = []
    for path in sorted(sweep_dir.glob(f"[!.]*/{SOURCE_JSON}")):
        made_by = read_made_by(path.parent)
        if made_by.known:
            runs.append((path.parent, made_by))
    parts = {json.dumps([one.functions, one.data, one.weights], sort_keys=True) for _, one in runs}
    if len(parts) < 2:
        return []
    found = []
    for run_dir, made_by in runs:
        try:
            config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(config, dict):
            found.append((run_dir.name, config, made_by))
    return mixed(found)


def since_submission(run_dir: Path, command: str = "", made_by: MadeBy = UNKNOWN) -> list[str]:
    """What has changed since the run was submitted, one sentence each; writes the source where none was written."""
    before = read(run_dir)
    now = snapshot(command, made_by)
    if before is None:
        write(run_dir, now)
        return []
    return changes(before, now)


def changes(before: Source, now: Source) -> list[str]:
    """How two sources differ, one sentence each, most important first."""
    out = []
    if before.commit != now.commit:
        out.append(f"changed since submission: the commit is {_short(now.commit)}, it was {_short(before.commit)}")
    if before.diff_sha256 != now.diff_sha256:
        out.append("changed since submission: the uncommitted changes of the source are others")
    for name in sorted(before.versions.keys() | now.versions.keys()):
        was, is_ = before.versions.get(name, "not installed"), now.versions.get(name, "not installed")
        if was != is_:
            out.append(f"changed since submission: {name} is {is_}, it was {was}")
    return out


def _short(commit: str | None) -> str:
    return commit[:12] if commit else "unknown"
