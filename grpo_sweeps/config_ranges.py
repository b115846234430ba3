"""The sentences of a value that is out of range: key, value, what is allowed."""

from __future__ import annotations

from typing import Any

from grpo_sweeps.config import shown
from grpo_sweeps.types import ConfigError


def fail(key: str, value: object, allowed: str) -> None:
    raise ConfigError(f"{key}={shown(value)}: {allowed}")


def one_of(key: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        fail(key, value, f"choose one of {', '.join(map(shown, allowed))}")


def at_least(key: str, value: float, least: float) -> None:
    if value < least:
        fail(key, value, f"at least {least} is needed")


def at_most(key: str, value: float, most: float) -> None:
    if value > most:
        fail(key, value, f"at most {most} is allowed")
