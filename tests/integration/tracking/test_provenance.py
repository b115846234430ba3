"""Provenance in a real git checkout: the commit is the package's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from grpo_sweeps.tracking import provenance

pytestmark = pytest.mark.integration


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout whose package folder stands for ours."""
    package = tmp_path / "grpo_sweeps"
    (package / "tracking").mkdir(parents=True)
    (package / "types.py").write_text("")
    for words in (["init", "-q"], ["add", "grpo_sweeps/types.py"], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, env={**os.environ, "HOME": str(tmp_path)})
    monkeypatch.setattr(provenance, "__file__", str(package / "tracking" / "provenance.py"))
    provenance.commit.cache_clear(), provenance.dirty.cache_clear()
    yield tmp_path
    provenance.commit.cache_clear(), provenance.dirty.cache_clear()


def test_commit_and_dirty(checkout: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    assert provenance.commit() == head and provenance.dirty() is False
    (checkout / "reports").mkdir()
    (checkout / "reports" / "page.yaml").write_text("made by a run")
    provenance.dirty.cache_clear()
    assert provenance.dirty() is False
    (checkout / "my_reward.py").write_text("new source")
    provenance.dirty.cache_clear()
    assert provenance.dirty() is True
    (checkout / "my_reward.py").unlink()
    (checkout / "grpo_sweeps" / "types.py").write_text("changed")
    provenance.dirty.cache_clear()
    assert provenance.dirty() is True


def test_installed_inside_another_projects_checkout_there_is_no_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = checkout / "site-packages" / "grpo_sweeps"
    (site / "tracking").mkdir(parents=True)
    (site / "types.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(site / "tracking" / "provenance.py"))
    assert provenance.commit() is None and provenance.dirty() is None
