"""The tracking store is made before jobs are queued, and a server that is down keeps none of them back."""

from __future__ import annotations

import types
from typing import Any

import pytest

from grpo_sweeps.sweep import launch
from grpo_sweeps.tracking import mirror


@pytest.mark.parametrize("problem", [None, "http://127.0.0.1:1 does not answer."])
def test_what_is_said_of_the_store(problem: str | None, monkeypatch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    asked = []
    monkeypatch.setattr(mirror, "initialise", lambda tracking: asked.append(tracking) or problem)
    run = types.SimpleNamespace(config=types.SimpleNamespace(tracking="the store"))
    launch._prepare_store(types.SimpleNamespace(runs=[run, run]))  # type: ignore[arg-type]
    said = capfd.readouterr().err
    assert asked == ["the store"]
    assert ("does not answer" in said and "sync" in said) if problem else not said


@pytest.mark.parametrize(("jobs_copy", "times"), [(True, 1), (False, 0)])
def test_only_runs_that_copy_their_own_records_need_it(jobs_copy: bool, times: int, monkeypatch: Any) -> None:
    """With SQLite, or here, one process copies: it makes its own store."""
    asked: list[Any] = []
    monkeypatch.setattr(launch, "_prepare_store", asked.append)
    monkeypatch.setattr(launch, "Opening", _refuse)
    plan: Any = types.SimpleNamespace(dry_run=False, due=("a run",))
    with pytest.raises(ZeroDivisionError):
        launch.launch(plan, lambda *_: [], jobs_copy)
    assert len(asked) == times


def _refuse(plan: Any) -> None:
    raise ZeroDivisionError
