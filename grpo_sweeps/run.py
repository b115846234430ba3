"""Entry point: `python -m grpo_sweeps.run R=4`, `... -m R=2,4,8`, `... +sweeps=default`. See --help.

`dry_run=true` plans and starts nothing; `python -m grpo_sweeps.check` with the same words tries the real path.

Exit codes: 0 all went well; 1 a run failed (a table names each, its reason and its log); 2 a bad command or
configuration (one sentence, before anything starts); 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from grpo_sweeps import cli
from grpo_sweeps.types import ConfigError


@cli.piped
def main(argv: Sequence[str] | None = None, carry_out: Any = None) -> int:
    """Run the command and return its exit code.

    carry_out: what to call with the planned runs instead of `sweep.launch.launch`, with the same arguments.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from grpo_sweeps.sweep.errors import explain
    from grpo_sweeps.sweep.launch import RunFailed, exit_code

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors to here instead of printing them and leaving
    if os.getcwd() not in sys.path:
        sys.path.insert(
            0, os.getcwd()
        )  # the user's own reward, task or estimator, also when started by the console script
    try:
        return _run(sys.argv[1:] if argv is None else argv, carry_out)
    except ConfigError as error:
        cli.say(f"error: {error}")
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        cli.say(f"error: {explain(error)}")
    except RunFailed as failed:
        return exit_code(failed.results)
    except KeyboardInterrupt:
        return 130
    except SystemExit as leaving:  # --help, --cfg and the like
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BrokenPipeError:  # nobody reads the output: `cli.piped` ends the command
        raise
    except Exception as error:
        if not _of_the_command_line(error):
            raise
        cli.say(f"error: {explain(error)}")
    return 2


def _of_the_command_line(error: BaseException) -> bool:
    """True when Hydra or OmegaConf raised it: for some bad commands they raise plain ValueErrors and TypeErrors."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.split(".")[0] in ("hydra", "omegaconf")


def _run(argv: Sequence[str], carry_out: Any) -> int:
    """Give the command to Hydra. A sweep ends in the launcher plugin, a single run here, both in sweep/launch.py."""
    from hydra._internal.utils import _run_hydra

    from grpo_sweeps.paths import conf_dir
    from grpo_sweeps.sweep.command import parse
    from grpo_sweeps.sweep.launch import exit_code, launch, single
    from hydra_plugins.grpo_launcher.registration import register

    args, parser = parse(argv)
    register()
    codes: list[int] = []
    caught: list[Exception] = []

    def task(composed: object) -> None:
        try:
            codes.append(exit_code(single(composed, carry_out or launch)))
        except Exception as error:  # kept from Hydra, which would print lines of its own, and raised again below
            caught.append(error)

    task.carry_out = carry_out  # type: ignore[attr-defined]  # Hydra hands the task to the launcher of a sweep
    _run_hydra(args=args, args_parser=parser, task_function=task, config_path=str(conf_dir()), config_name="config")
    if caught:
        raise caught[0]
    return codes[0] if codes else 0


if __name__ == "__main__":
    sys.exit(main())
