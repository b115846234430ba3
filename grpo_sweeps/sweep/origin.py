"""What would make a run now, compared with what its record says made it: at planning and at the run's start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_sweeps.config import ModelConfig, RunConfig
from grpo_sweeps.config.checks import load_task
from grpo_sweeps.config.rewards import reward_parts
from grpo_sweeps.rewards.verdicts import CORRECT, is_own
from grpo_sweeps.tracking import digests, provenance
from grpo_sweeps.tracking.made_by import REMEDY, STALE, UNKNOWN, MadeBy, changes, other_code
from grpo_sweeps.types import ConfigError, TaskData

__all__ = ["Origin", "Origins", "Stale", "functions_of", "model_of", "told_apart"]


SAME_EACH_TIME = "; a task must give the same problems each time that it is called"


class Stale(ConfigError):
    """Something else would make the run now than made it so far, or than it was submitted with."""


def functions_of(config: RunConfig) -> dict[str, dict[str, str]]:
    """{"reward._target_=my.reward": {module: digest}} of functions of the user's own."""
    named = {"task": config.task.function, "estimator": config.estimator}
    named |= {part.key: part.function for part in reward_parts(config.reward)}
    targets = {f"{key}._target_={function.target}": function.target for key, function in named.items()}
    targets |= {f"analysis.own_metrics={target}": target for target in config.analysis.own_metrics}
    verdicts = {"task": config.task.verdict}
    verdicts |= {part.key: str(part.function.kwargs.get("verdict", "")) for part in reward_parts(config.reward)
                 if part.function.target == CORRECT}  # fmt: skip
    targets |= {f"{key}.verdict={target}": target for key, target in verdicts.items() if is_own(target)}
    if "." in config.rollout.engine:
        targets[f"rollout.engine={config.rollout.engine}"] = config.rollout.engine
    found = {key: digests.of_function(target) for key, target in targets.items()}
    return {key: modules for key, modules in found.items() if modules}


def model_of(model: ModelConfig) -> dict[str, str]:
    return digests.of_model(model.path, model.revision, model.random)


class Origins:
    """What would make the runs of one command: each task is loaded and each model looked at once.

    known: the package's code in the records that are there; the same bytes need no parsing.
    """

    def __init__(self, known: Iterable[digests.Code] = ()) -> None:
        self.code = digests.of_package(known)
        self.tasks: dict[str, TaskData] = {}  # as `checks.check_tasks` keeps them
        self._data: dict[str, dict[str, str]] = {}
        self._weights: dict[ModelConfig, dict[str, str]] = {}

    def of(self, config: RunConfig, data: bool) -> MadeBy:
        """data: load the problems too; where they cannot be loaded they are not known."""
        if config.model not in self._weights:
            self._weights[config.model] = model_of(config.model)
        found = self.data(config) if data else {}
        return MadeBy(self.code.syntax, self.code.raw, functions_of(config), found, self._weights[config.model])

    def data(self, config: RunConfig) -> dict[str, str]:
        key = repr(config.task.function)
        if key not in self._data:
            try:
                if key not in self.tasks:
                    self.tasks[key] = load_task(config.task.function)
                self._data[key] = digests.of_data(self.tasks[key])
            except ConfigError:
                return {}
        return self._data[key]


def told_apart(before: provenance.Source, now: MadeBy, commit: str | None) -> str:
    """ "commit 0123456, code 89abcde; now ..." """
    return f"{_code(before.commit, before.made_by)}; now {_code(commit, now)}"


def _code(commit: str | None, made_by: MadeBy) -> str:
    return f"commit {(commit or 'unknown')[:7]}, code {made_by.package[:7]}"


@dataclass
class Origin:
    """What makes one run, from its start on: compared with what it was submitted with, and written where that is not
    known."""

    config: RunConfig
    run_dir: Path
    command: str = ""
    _now: MadeBy = UNKNOWN

    def start(self) -> str:
        """A sentence where code, functions or weights are others than the record says; "" where they are not. Called
        before anything of the run is loaded or written."""
        before = provenance.read(self.run_dir)
        recorded = before.made_by if before else MadeBy()
        code = digests.of_package([recorded.code])
        self._now = MadeBy(code.syntax, code.raw, functions_of(self.config), weights=model_of(self.config.model))
        found = changes(recorded, self._now)
        if before and other_code(recorded, self._now):
            found.insert(0, f"the package's code has changed ({told_apart(before, self._now, provenance.commit())})")
        return _sentence(found)

    def write(self) -> list[str]:
        """Write the source where there is none yet; sentences about what changed since the submission otherwise."""
        return provenance.since_submission(self.run_dir, self.command, self._now)

    def loaded(self, data: TaskData) -> None:
        """The problems and the model are loaded: compare, and write what was not known before.

        Raises Stale where they are not those of the record."""
        before = provenance.read(self.run_dir)
        if before is None:
            return
        now = replace(self._now, data=digests.of_data(data), weights=model_of(self.config.model))
        if sentence := _sentence(changes(before.made_by, now)):
            raise Stale(sentence + SAME_EACH_TIME if now.data != before.made_by.data else sentence)
        whole = before.made_by.or_else(now)
        if whole != before.made_by and before.made_by.known:
            provenance.write(self.run_dir, replace(before, made_by=whole))


def _sentence(found: list[str]) -> str:
    return f"{STALE}{'; '.join(found)}; {REMEDY}, or put back what made it" if found else ""
