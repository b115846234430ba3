"""What a forge and an index read of the project: the citation, the workflow, the marker of types."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from grpo_sweeps import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(cited["version"]) == __version__ == PROJECT["version"]
    assert cited["license"] == PROJECT["license"] and cited["title"] == PROJECT["name"]
    assert cited["authors"] == PROJECT["authors"] and cited["abstract"].rstrip(".") == PROJECT["description"]


def test_the_workflow_runs_targets_that_exist_on_every_python() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"].values()
    asked = [step["run"] for step in job["steps"] if "run" in step]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert asked == ["make lint", "make types", "make test"] and {one.split()[1] for one in asked} <= set(targets)
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)}
    assert set(job["strategy"]["matrix"]["python"]) == named


def test_types_are_marked() -> None:
    assert "Typing :: Typed" in PROJECT["classifiers"] and (ROOT / "grpo_sweeps/py.typed").is_file()
