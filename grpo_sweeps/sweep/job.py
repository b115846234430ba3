"""What a Submitit job runs: one frozen configuration. Pickled by reference, so the node needs nothing of Hydra."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_sweeps.sweep.execute import RunResult, Signals, execute
from grpo_sweeps.sweep.launch import MIRROR_LOG, RunFailed

GRACE_S = 60.0
MIRROR_WAIT_S = 5.0  # wait this long, at a job's end, for a server that does not answer: the next job needs the GPU


class RunJob:
    """Callable with checkpoint(): Submitit calls that on a time limit or a preemption and puts the job back in the
    queue."""

    token: str | None = None  # of a job that an earlier version pickled without one

    def __init__(self, copies: bool = False, grace_s: float = GRACE_S, token: str | None = None) -> None:
        """copies: this job has its own record copied while it runs.

        grace_s: seconds from Submitit's signal to the moment when the job is queued again, whether the step is done or
        not; half of the launcher's signal_delay_s.

        token: what the job's comment holds; None for a process of this machine.
        """
        self.copies, self.grace_s, self.token = copies, grace_s, token
        self._requeued = False

    def __call__(
        self, frozen: Mapping[str, Any], run_dir: str, name: str, command: str, import_paths: list[str]
    ) -> RunResult:
        """Execute the run; raises RunFailed after a failure, so that the scheduler records FAILED too."""
        self._requeued = False  # checkpoint() has pickled this object with True in it
        for path in import_paths:  # where the user's own task, reward or estimator was found when the run was checked
            if path not in sys.path:
                sys.path.append(path)
        with self._mirror(frozen, Path(run_dir)):
            signals = Signals(requeued=lambda: self._requeued, grace_s=self.grace_s)
            result = execute(
                frozen, run_dir, name=name, command=command, signals=signals, job_token=self.token
            )  # fmt: skip
        if not result.ok:
            raise RunFailed([result])
        return result

    def _mirror(self, frozen: Mapping[str, Any], run_dir: Path) -> Any:
        if not self.copies:
            return contextlib.nullcontext()
        from grpo_sweeps.config import RunConfig
        from grpo_sweeps.tracking.mirror import Follower

        tracking = RunConfig.from_mapping(frozen).tracking
        return Follower(
            run_dir.parent.name, run_dir.parents[1], tracking, run_dir / MIRROR_LOG, run_dir.name, MIRROR_WAIT_S
        )

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """The submission of the same run again: it goes on from the last checkpoint in its folder."""
        import submitit

        self._requeued = True
        return submitit.helpers.DelayedSubmission(self, *args, **kwargs)
