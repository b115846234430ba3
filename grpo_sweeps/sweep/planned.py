"""A command's runs, composed and compared with what is there: the one description that printing, preflight and every
launcher share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.sweep.ledger import Decision, ask_queue, decide
from grpo_sweeps.tracking import provenance


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run of a plan: its frozen configuration, its place, and what is to be done with it."""

    config: RunConfig
    identity: str
    name: str
    run_dir: Path
    decision: Decision

    @property
    def frozen(self) -> dict[str, Any]:
        """The resolved configuration in its written form: what a job gets as its argument."""
        return to_mapping(self.config)


@dataclass(frozen=True)
class Plan:
    """All runs of one command, in the order of the command."""

    runs: tuple[PlannedRun, ...]
    identities: tuple[str, ...]  # one for each job of the command, so a run that was given twice is here twice
    dry_run: bool = False
    command: str = ""
    notes: tuple[str, ...] = ()
    redo: str | None = None
    wait: bool = True

    @property
    def due(self) -> tuple[PlannedRun, ...]:
        return tuple(run for run in self.runs if run.decision.action != "skip")

    @property
    def folder(self) -> Path:
        """The sweep's folder: a command has one sweep."""
        return self.runs[0].run_dir.parent

    def decided(self) -> Plan:
        """The same runs compared with what is there at this moment."""
        commit = provenance.commit()
        ask_queue(run.run_dir for run in self.runs)
        runs = [
            replace(run, decision=decide(run.run_dir, run.config.trainer.steps, self.redo, commit)) for run in self.runs
        ]
        return replace(self, runs=tuple(runs))
