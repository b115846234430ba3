"""Provenance: no secret gets in."""

from __future__ import annotations

from grpo_sweeps.tracking import provenance


def test_credentials_in_addresses_are_cut_out() -> None:
    text = "run tracking.uri=https://ann:s3cret@host:5000/x?a=b@c postgresql://u:p@db/m plain@mail.org"
    clean = provenance.redact(text)
    assert "s3cret" not in clean and "ann" not in clean and "u:p" not in clean
    assert "https://***@host:5000/x?a=b@c" in clean and "plain@mail.org" in clean
    assert "s3cret" not in provenance.command(["run.py", text])


def test_command_is_quoted_for_a_shell() -> None:
    assert provenance.command(["run.py", "R=2", "task.prompt=a b"]) == "run.py R=2 'task.prompt=a b'"


def test_job_id_of_jobs_arrays_and_none() -> None:
    assert provenance.job_id({}) is None
    assert provenance.job_id({"SLURM_JOB_ID": "7"}) == "7"
    assert provenance.job_id({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}) == "7_2"


def test_versions_name_what_is_installed_only() -> None:
    found = provenance.versions()
    assert {"python", "numpy", "torch"} <= set(found) and all(found.values())
