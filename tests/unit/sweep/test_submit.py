"""The Submitit launchers at the process boundary: sbatch is a script that runs the array's tasks here, one by one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep import submit
from grpo_sweeps.types import ConfigError

Run = Callable[..., int]
Statuses = Callable[..., dict[str, Any]]
SBATCH = """#!{python}
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
open({record!r}, "w").write(text)
open({record!r} + ".env", "w").write(repr({{k: v for k, v in os.environ.items() if k.startswith("SLURM_")}}))
if {refuse!r}:
    sys.exit("sbatch: error: invalid partition specified: nope")
print("Submitted batch job 123", flush=True)
found = re.search(r"^#SBATCH --array=0-(\\d+)", text, re.M)
folder = re.search(r"submitit\\.core\\._submit (\\S+)", text).group(1)
tasks = range(int(found.group(1)) + 1) if found else [None]
code = "import os, subprocess, sys\\n"
for task in tasks:
    env = dict(SLURM_JOB_ID="123", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_NTASKS="1",
               SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="here", SUBMITIT_EXECUTOR="slurm")
    if task is not None:
        env.update(SLURM_ARRAY_JOB_ID="123", SLURM_ARRAY_TASK_ID=str(task))
    command = f"[sys.executable, '-m', 'submitit.core._submit', {{folder!r}}]"
    code += f"subprocess.run({{command}}, env={{{{**os.environ, **{{env!r}}}}}})\\n"
subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                 stderr=subprocess.DEVNULL, start_new_session=True)
"""


@pytest.fixture
def slurm(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put sbatch and srun on the PATH; gives the file where the submitted script is kept."""

    def install(refuse: bool = False) -> Path:
        tools, record = workplace / "site" / "tools", workplace / "site" / "script.sh"
        tools.mkdir(exist_ok=True)
        (tools / "sbatch").write_text(SBATCH.format(python=sys.executable, record=str(record), refuse=refuse))
        (tools / "srun").write_text("#!/bin/sh\nexit 1\n")
        for name in ("sbatch", "srun"):
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        monkeypatch.setattr(submit.start_slurm, "__defaults__", (0.1,))
        return record

    return install


def test_slurm_array_runs_frozen_configurations(
    run: Run, statuses: Statuses, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, workplace: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    record = slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "999")  # launched inside an allocation
    code = run(
        "-m", "R=4", "seed=0,1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu",
        "hydra.launcher.array_parallelism=2",
        "hydra.launcher.additional_parameters={reservation: mine}", "hydra.launcher.setup=[module load cuda]",
    )  # fmt: skip
    assert code == 1
    script = record.read_text()
    for line in (
        "--array=0-2%2", "--gpus-per-node=1", "--cpus-per-task=4", "--mem=32GB", "--time=240", "--partition=gpu",
        "--reservation=mine", "--signal=USR2@120", "--job-name=grpo_sweeps",
    ):  # fmt: skip
        assert f"#SBATCH {line}" in script, line
    assert "module load cuda" in script
    assert Path(str(record) + ".env").read_text() == "{}", "the launching allocation leaks into the jobs"
    found = statuses()
    assert found["R=4 seed=0"].state == "finished" and found["R=4 seed=0"].job_id == "123_0"
    assert found["R=4 seed=1"].error == "RuntimeError: boom"
    assert found["R=4 seed=2"].state == "interrupted"  # killed: it could not say so itself
    err = capfd.readouterr().err
    assert "2 of 3 runs did not finish:" in err and "ended without a word" in err
    assert {path.name for path in (workplace / "runs").iterdir()} == {"adhoc", ".submitit"}


def test_refused_submission_is_one_sentence(
    run: Run, statuses: Statuses, slurm: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    slurm(refuse=True)
    assert run("-m", "R=2,4", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=nope") == 2
    err = capfd.readouterr().err
    assert "hydra/launcher=submitit_slurm: the submission was refused" in err and "invalid partition" in err
    assert "Traceback" not in err
    assert {status.state for status in statuses().values()} == {"failed"}


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
        submit.gpu_slots({"parallel_jobs": 0})
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
