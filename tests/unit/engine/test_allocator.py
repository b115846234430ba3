"""The allocator's segments grow, unless the user has set it up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from grpo_sweeps.engine import allocator


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    return settings


@pytest.mark.parametrize("environment", [{}, {"PYTORCH_ALLOC_CONF": ""}, {"PATH": "/bin"}])
def test_segments_grow_by_themselves(given: list[str], environment: dict[str, str]) -> None:
    assert allocator.grow_segments(environment)
    assert given == ["expandable_segments:True"]


@pytest.mark.parametrize("name", allocator.SETTINGS)
def test_what_the_user_has_set_stays(given: list[str], name: str) -> None:
    assert not allocator.grow_segments({name: "max_split_size_mb:128"})
    assert given == []


def test_a_torch_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    assert not allocator.grow_segments({})


def test_this_torch_takes_the_words() -> None:
    """In a process of its own: the setting is the process's."""
    code = "from grpo_sweeps.engine.allocator import grow_segments; assert grow_segments({})"
    environment = {k: v for k, v in os.environ.items() if k not in allocator.SETTINGS}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
