"""The Submitit launchers at the process boundary: sbatch is a script that runs the array's tasks here, one by one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep import ledger, submit
from grpo_sweeps.sweep.queue import Queue
from grpo_sweeps.types import ConfigError

pytestmark = pytest.mark.integration
Run = Callable[..., int]
Statuses = Callable[..., dict[str, Any]]
SBATCH = """#!{python}
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
open({record!r}, "w").write(text)
open({record!r} + ".env", "w").write(repr({{k: v for k, v in os.environ.items() if k.startswith("SLURM_")}}))
calls = int(open({record!r} + ".calls").read()) if os.path.exists({record!r} + ".calls") else 0
open({record!r} + ".calls", "w").write(str(calls + 1))
if calls >= {accept!r}:
    sys.exit("sbatch: error: invalid partition specified: nope")
job = str(123 + calls)
print("Submitted batch job " + job, flush=True)
found = re.search(r"^#SBATCH --array=0-(\\d+)", text, re.M)
folder = re.search(r"submitit\\.core\\._submit (\\S+)", text).group(1)
tasks = range(int(found.group(1)) + 1) if found else [None]
code = "import os, subprocess, sys\\n"
for task in tasks:
    env = dict(SLURM_JOB_ID=job, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_NTASKS="1",
               SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="here", SUBMITIT_EXECUTOR="slurm")
    if task is not None:
        env.update(SLURM_ARRAY_JOB_ID=job, SLURM_ARRAY_TASK_ID=str(task))
    command = f"[sys.executable, '-m', 'submitit.core._submit', {{folder!r}}]"
    code += f"subprocess.run({{command}}, env={{{{**os.environ, **{{env!r}}}}}})\\n"
code += f"open({record!r} + '.{{job}}.done', 'w').close()\\n"
subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                 stderr=subprocess.DEVNULL, start_new_session=True)
"""

# The queue knows a job's tasks until the last one has ended.
SQUEUE = """#!/bin/sh
comment=$(sed -n "s/^#SBATCH --comment=//p" {record})
for job in 123 124 125; do
    [ -e {record}.$job.done ] && continue
    for task in 0 1 2; do echo "${{job}}_$task|RUNNING|None|here|0|$comment"; done
    echo "$job|RUNNING|None|here|0|$comment"
done
"""


@pytest.fixture
def slurm(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put sbatch and srun on the PATH; gives the file where the submitted script is kept."""

    def install(accept: int = 9, array: int = 1001) -> Path:
        tools, record = workplace / "site" / "tools", workplace / "site" / "script.sh"
        tools.mkdir(exist_ok=True)
        (tools / "sbatch").write_text(SBATCH.format(python=sys.executable, record=str(record), accept=accept))
        (tools / "squeue").write_text(SQUEUE.format(record=record))
        (tools / "scontrol").write_text(f"#!/bin/sh\necho 'MaxArraySize            = {array}'\n")
        for name in ("srun", "sinfo", "sacct"):
            (tools / name).write_text("#!/bin/sh\nexit 1\n")
        for name in ("sbatch", "squeue", "scontrol", "srun", "sinfo", "sacct"):
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        monkeypatch.setattr(submit.start_slurm, "__defaults__", (0.1,))
        monkeypatch.setattr(ledger, "QUEUE", Queue(keep_s=0))
        monkeypatch.setattr(submit, "QUEUE", Queue(keep_s=0))
        return record

    return install


def test_slurm_array_runs_frozen_configurations(
    run: Run, statuses: Statuses, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, workplace: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    record = slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "999")  # launched inside an allocation
    monkeypatch.setenv("SLURM_CONF", "/the/cluster.conf")  # which says where SLURM is
    code = run(
        "-m", "R=4", "seed=0,1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu",
        "hydra.launcher.array_parallelism=2",
        "hydra.launcher.additional_parameters={reservation: mine}", "hydra.launcher.setup=[module load cuda]",
    )  # fmt: skip
    assert code == 1
    script = record.read_text()
    for line in (
        "--array=0-2%2", "--gpus-per-node=1", "--cpus-per-task=4", "--mem=32GB", "--time=240", "--partition=gpu",
        "--reservation=mine", "--signal=USR2@120", "--job-name=grpo_sweeps", "--requeue",
    ):  # fmt: skip
        assert f"#SBATCH {line}" in script, line
    assert "module load cuda" in script
    assert Path(str(record) + ".env").read_text() == "{'SLURM_CONF': '/the/cluster.conf'}", (
        "the launching allocation leaks into the jobs"
    )
    found = statuses()
    assert found["R=4 seed=0"].state == "finished" and found["R=4 seed=0"].job_id == "123_0"
    assert found["R=4 seed=1"].error == "RuntimeError: boom"
    assert found["R=4 seed=2"].state == "interrupted"  # killed: it could not say so itself
    err = capfd.readouterr().err
    assert "2 of 3 runs did not finish:" in err and "ended without a word" in err
    assert {path.name for path in (workplace / "runs").iterdir()} == {"adhoc", ".submitit"}


def test_a_refused_submission_leaves_what_was_there(
    run: Run, statuses: Statuses, slurm: Callable[..., Path], workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("R=2") == 0
    (before,) = statuses().values()
    slurm(accept=0)
    for redo in ("redo=all", "redo=null"):
        code = run("-m", "R=2,4", redo, "hydra/launcher=submitit_slurm", "hydra.launcher.partition=nope")
        assert code == 2
        err = capfd.readouterr().err
        assert "hydra/launcher=submitit_slurm: the submission was refused" in err and "invalid partition" in err
        assert "Traceback" not in err
        assert list(statuses().values()) == [before], "nothing ran, so nothing may say that something did"
        assert {path.name for path in (workplace / "runs" / "adhoc").iterdir() if path.is_dir()} <= {
            before.identity, ".replaced",
        }  # fmt: skip
        assert not list((workplace / "runs" / "adhoc").glob(".replaced/*"))


def test_long_arrays_are_split_and_a_refused_part_is_named(
    run: Run, statuses: Statuses, slurm: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    record = slurm(accept=1, array=2)
    code = run("-m", "seed=0,5,6", "hydra/launcher=submitit_slurm", "hydra.launcher.array_parallelism=4")
    assert code == 1
    assert {status.name: status.job_id for status in statuses().values()} == {
        "R=4 seed=0": "123_0", "R=4 seed=5": "123_1",
    }  # fmt: skip
    err = capfd.readouterr().err
    assert "not submitted: 1 run: " in err and "R=4 seed=6  not submitted  not submitted: sbatch: error" in err
    assert "#SBATCH --array" not in record.read_text(), "the last part is a single job"
    slurm()
    assert run("-m", "seed=0,5,6", "hydra/launcher=submitit_slurm") == 0
    assert statuses()["R=4 seed=6"].job_id == "125"  # 124 was refused


def test_the_throttle_is_the_sweeps(slurm: Callable[..., Path], run: Run) -> None:
    record = slurm(array=2)
    assert run("-m", "seed=0,5,6,7", "hydra/launcher=submitit_slurm", "hydra.launcher.array_parallelism=3") == 0
    assert "#SBATCH --array=0-1%1" in record.read_text()


def test_without_waiting_the_command_returns_at_once(
    run: Run, statuses: Statuses, slurm: Callable[..., Path], capfd: pytest.CaptureFixture[str], workplace: Path
) -> None:
    import time

    slurm()
    assert run("-m", "R=2,4", "hydra/launcher=submitit_slurm", "wait=false") == 0
    err = capfd.readouterr().err
    assert "submitted 2 runs as job 123; see python -m grpo_sweeps.status sweep=adhoc" in err
    assert "not waiting: the jobs go on" in err and "2 of 2 runs queued or running" in err
    assert {status.job_id for status in statuses().values()} == {"123_0", "123_1"}
    deadline = time.monotonic() + 60
    while {status.state for status in statuses().values()} != {"finished"} and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {status.state for status in statuses().values()} == {"finished"}


def test_flags_that_make_several_processes_are_refused() -> None:
    for params, named in (
        ({"nodes": 2}, "hydra.launcher.nodes=2"),
        ({"tasks_per_node": 4}, "hydra.launcher.tasks_per_node=4"),
        ({"srun_args": ["--ntasks=2"]}, "hydra.launcher.srun_args: --ntasks=2"),
        ({"srun_args": ["--label", "--ntasks", "2"]}, "hydra.launcher.srun_args: --ntasks 2"),
        ({"srun_args": ["-n", "2"]}, "hydra.launcher.srun_args: -n 2"),
        ({"srun_args": ["-N2"]}, "hydra.launcher.srun_args: -N2"),
        ({"additional_parameters": {"ntasks_per_gpu": 2}}, "additional_parameters: --ntasks-per-gpu=2"),
        ({"additional_parameters": {"n": 2}}, "additional_parameters: -n=2"),
    ):
        with pytest.raises(ConfigError, match="a run is one process on one node, so 1 is allowed") as caught:
            submit.check_local(params)
        assert named in str(caught.value)
    submit.check_local({"srun_args": ["--ntasks=1", "-n", "1", "--label"], "additional_parameters": {"nodes": 1}})


def test_requeue_is_on_unless_the_user_says_otherwise() -> None:
    additional = submit._additional
    assert additional({"requeue": True}) == {"requeue": True}
    assert additional({"requeue": False}) == {"no-requeue": True}
    assert additional({"requeue": True, "additional_parameters": {"no_requeue": True}}) == {"no_requeue": True}
    assert additional({"requeue": True, "additional_parameters": {"x": 1}}) == {"requeue": True, "x": 1}


def test_local_processes(
    run: Run, statuses: Statuses, workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = run("-m", "R=4", "seed=0,1", "hydra/launcher=submitit_local", "hydra.launcher.parallel_jobs=2")
    assert code == 1
    found = statuses()
    assert found["R=4 seed=0"].state == "finished" and found["R=4 seed=0"].pid != os.getpid()
    assert found["R=4 seed=1"].error == "RuntimeError: boom"
    assert (workplace / "runs" / "adhoc" / found["R=4 seed=0"].identity / "cuda").read_text() == ""
    assert "1 of 2 runs did not finish:" in capfd.readouterr().err


def test_gpu_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9")
    assert submit.gpu_slots({}) == [[3], [5], [7], [9]]
    assert submit.gpu_slots({"parallel_jobs": 2}) == [[3], [5]]
    assert submit.gpu_slots({"gpus_per_node": 2}) == [[3, 5], [7, 9]]
    assert submit.gpu_slots({"gpus_per_node": 3}) == [[3, 5, 7]]
    assert submit.gpu_slots({"gpus_per_node": 0, "parallel_jobs": 3}) == [[], [], []]
    with pytest.raises(ConfigError, match="gpus_per_node=5: this machine shows 4 GPUs"):
        submit.gpu_slots({"gpus_per_node": 5})
    with pytest.raises(ConfigError, match="parallel_jobs=0"):
        submit.check_local({"parallel_jobs": 0})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert submit.gpu_slots({}) == [[]]


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: B (UUID: y)'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert submit.visible_gpus() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-x")
    assert submit.visible_gpus() == [0]


def test_every_parameter_of_submitit_can_be_set() -> None:
    from dataclasses import fields

    from submitit.slurm.slurm import SlurmExecutor

    from hydra_plugins.grpo_launcher.config import SlurmConf

    ours = {field.name for field in fields(SlurmConf)}
    shared = {"job_name": "name", "mem": "mem_gb", "time": "timeout_min", "ntasks_per_node": "tasks_per_node",
              "num_gpus": "gpus_per_node"}  # fmt: skip
    missing = {shared.get(name, name) for name in SlurmExecutor._valid_parameters()} - ours
    assert not missing
