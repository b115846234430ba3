"""Published records: they make the same report again, hold nothing of a machine, and are never written to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from grpo_sweeps import sync, verify
from grpo_sweeps.config import LaunchConfig, to_mapping
from grpo_sweeps.report import records
from grpo_sweeps.report.__main__ import main
from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.sweep.launch import plan
from grpo_sweeps.tracking.local import read_completions, read_groups
from grpo_sweeps.tracking.provenance import host
from grpo_sweeps.tracking.published import MOST_COMPLETIONS
from grpo_sweeps.tracking.status import read_status, write_status
from grpo_sweeps.types import ConfigError
from tests.composing import run_config
from tests.unit.report.conftest import blank_figures

pytestmark = pytest.mark.integration
SAME = ("table1.csv", "by_k.csv", "claims.csv")
HOST = "node17.cluster.site"
PRIVATE = ("/scratch/ann", "ann/", HOST, "node17", "hunter2", "1234567_8", "db.site", "tok3n", "/home/ann")


@pytest.fixture(scope="module", autouse=True)
def undrawn_module() -> Iterator[None]:
    """Drawing takes seconds, and what is read here are tables and texts."""
    with pytest.MonkeyPatch.context() as patch:
        blank_figures(patch)
        yield


def config_of(runs_dir: Path, R: int, seed: int):
    changes = [f"R={R}", f"seed={seed}", "sweep=small", f"runs_dir={runs_dir}", "tracking=local"]
    changes += [f"trainer.{key}" for key in ("steps=3", "prompts=3", "eval_every=3", "eval_problems=8", "lr=1e-3")]
    return run_config(*changes, "analysis.keep_completions_every=1", "trainer.device=cpu", "reward=random")


@pytest.fixture(scope="module")
def runs(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ with a sweep of the embedded model, as a cluster would have left it. To be read only."""
    runs_dir = tmp_path_factory.mktemp("made") / "runs"
    for R, seed in ((2, 0), (2, 1), (4, 0), (4, 1)):
        config = config_of(runs_dir, R, seed)
        run_dir = runs_dir / "small" / identity(config)
        command = (
            f"/scratch/ann/venv/bin/python -m grpo_sweeps.run -m R=2,4 tracking.uri=http://ann:hunter2@db.site:5 R={R}"
        )
        assert execute(to_mapping(config), run_dir, name=f"R={R} seed={seed}", command=command).ok
        at_a_site = {"host": HOST, "job_id": "1234567_8", "job_token": "tok3n", "traceback": 'File "/scratch/ann/x.py"'}
        notes = [f"{HOST}: /home/ann/data was slow"]
        write_status(run_dir, replace(read_status(run_dir), **at_a_site, notes=notes))
    return runs_dir


@pytest.fixture(scope="module")
def published(runs: Path) -> Path:
    """The folder of a report with records. To be read only."""
    out = runs.parent / "reports" / "small"
    assert main(["sweep=small", f"runs_dir={runs}", f"out={out}", "records=true"]) == 0
    return out


def content(folder: Path) -> dict[str, str]:
    """{relative path: SHA-256} of every file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_report_is_made_from_a_copy_that_cannot_be_written(published: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(published / "records", tmp_path / "records"))
    before = content(copy)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert main(["sweep=small", f"runs_dir={copy}", f"out={tmp_path / 'again'}"]) == 0
    finally:
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert content(copy) == before
    for name in SAME:
        assert (tmp_path / "again" / name).read_bytes() == (published / name).read_bytes(), name
    assert len((published / "by_k.csv").read_text().splitlines()) > 2


def test_nothing_is_kept_beside_a_copy_that_could_be_written(published: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(published / "records", tmp_path / "records"))
    before = content(copy)
    assert main(["sweep=small", f"runs_dir={copy}", f"out={tmp_path / 'again'}"]) == 0
    assert content(copy) == before == content(published / "records")


def test_the_report_is_that_of_the_runs_themselves(runs: Path, published: Path, tmp_path: Path) -> None:
    assert main(["sweep=small", f"runs_dir={runs}", f"out={tmp_path}"]) == 0
    for name in (*SAME, "curves.csv", "ranks.csv"):
        assert (tmp_path / name).read_bytes() == (published / name).read_bytes(), name
    shown = [text[text.index('<h2 id="completions"') : text.index('<h2 id="missing"')]
             for text in ((folder / "index.html").read_text() for folder in (tmp_path, published))]  # fmt: skip
    assert shown[0] == shown[1], "the same sample completions"


def test_no_number_has_digits_that_processors_round_differently(published: Path) -> None:
    for name in SAME:
        text = (published / name).read_text()
        numbers = re.findall(r"(?<=,)-?(\d+\.\d+)(?:e[-+]\d+)?(?=,|$)", text, re.MULTILINE)
        longest = max((number.replace(".", "").strip("0") for number in numbers), key=len)
        assert len(numbers) > 10 and len(longest) <= 9, (name, longest)
    said = (published / "claims.csv").read_text()
    assert "leave one out below 1e-12" in said and not re.search(r"(sign flip|leave one out|std) \de-1\d", said)


def test_what_a_copy_holds(runs: Path, published: Path) -> None:
    folder = published / "records" / "small"
    taken = json.loads((folder / "published.json").read_text())
    assert taken["sweep"] == "small" and "checkpoints" in taken["taken_out"]
    run_dirs = [path for path in folder.iterdir() if path.is_dir()]
    assert {path.name for path in run_dirs} == {path.parent.name for path in (runs / "small").glob("*/status.json")}
    for run in run_dirs:
        assert {path.name for path in run.iterdir()} == {
            "config.yaml", "status.json", "source.json", "model.json", "metrics.jsonl", "grams", "evals", "updates",
            "completions", "seal.json",
        }  # fmt: skip
        R = yaml.safe_load((run / "config.yaml").read_text())["R"]
        assert len(read_completions(run)) == min(R, MOST_COMPLETIONS) < len(read_completions(runs / "small" / run.name))
        assert len(read_groups(run)) == 9
        status = read_status(run)
        assert (status.host, status.pid, status.job_id, status.job_token, status.pid_started) == (
            "",
            0,
            None,
            None,
            None,
        )
        assert (status.state, status.step, status.traceback) == ("finished", 3, None)
    files = (path for path in published.rglob("*") if path.is_file())
    text = "".join(path.read_bytes().decode("utf-8", "replace") for path in files)
    for word in (*PRIVATE, str(runs), host()):
        assert word not in text, word
    assert "-m grpo_sweeps.run -m R=2,4" in text and '"packages": {}' in text


def test_at_most_five_completions_with_the_best_and_the_worst() -> None:
    from grpo_sweeps.types import Completion

    def one(step: int, rollout: int, reward: float) -> Completion:
        return Completion(step, "p", rollout, "q", str(rollout), reward, reward - 0.5, False, False, 3, False)

    found = [one(0, i, i % 2) for i in range(8)] + [one(1, i, float(i == 3) - float(i == 6)) for i in range(8)]
    kept = records._chosen(found, 0)
    assert [c.step for c in kept] == [1] * MOST_COMPLETIONS and {3, 6} < {c.rollout for c in kept}
    assert [c.rollout for c in kept] == sorted(c.rollout for c in kept)
    assert records._chosen([], 0) == []


def test_a_copy_is_whole_and_damage_to_it_shows(published: Path, tmp_path: Path, capsys) -> None:
    copy = Path(shutil.copytree(published / "records", tmp_path / "records"))
    assert verify.main([f"runs_dir={copy}"]) == 0
    said = capsys.readouterr().out
    assert "4 runs of 1 sweep: whole (4 runs as published: checkpoints, logs" in said and "completions" in said
    segment = next(copy.glob("small/*/grams/*.parquet"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(bytes(data))
    assert verify.main([f"runs_dir={copy}"]) == 1
    found = capsys.readouterr()
    assert "is not what was written" in found.out and "published" in found.err and "redo=" not in found.err


def refusal(capsys, words: list[str], main=main) -> str:
    capsys.readouterr()
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_too_large_a_copy_is_refused_with_its_largest_parts(runs: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 10_000)
    said = refusal(capsys, ["sweep=small", f"runs_dir={runs}", f"out={tmp_path / 'out'}", "records=true"])
    assert "the records of small take" in said and "grams/" in said and "R=4 seed=" in said and "at most 0 MB" in said
    assert not (tmp_path / "out").exists()


def test_what_is_no_whole_record_of_the_past_is_refused(runs: Path, published: Path, tmp_path: Path, capsys) -> None:
    mine = Path(shutil.copytree(runs, tmp_path / "runs"))
    words = ["sweep=small", f"runs_dir={mine}", f"out={tmp_path / 'out'}", "records=true"]
    run = next((mine / "small").glob("*/status.json")).parent
    status = read_status(run)
    write_status(run, replace(status, state="running", host=host(), pid=os.getpid(), pid_started=None))
    assert "is running; publish a sweep whose runs have ended" in refusal(capsys, words)
    write_status(run, status)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-2]))
    assert "is not whole: metrics.jsonl" in refusal(capsys, words)
    again = ["sweep=small", f"runs_dir={published / 'records'}", f"out={tmp_path / 'out'}", "records=true"]
    assert "holds published records" in refusal(capsys, again)
    (tmp_path / "out" / "records" / "small").mkdir(parents=True)
    assert "holds no published records" in refusal(capsys, [words[0], f"runs_dir={runs}", *words[2:]])
    assert list((tmp_path / "out" / "records" / "small").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"), [(["sweep=tiny,other"], "records=true takes one sweep"), (["where=R=4"], "the whole sweep")]
)
def test_records_are_those_of_one_whole_sweep(words: list[str], said: str, runs: Path, tmp_path: Path, capsys) -> None:
    assert main([*words, f"runs_dir={runs}", f"out={tmp_path / 'out'}", "records=true"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_copy_is_replaced_by_a_later_one(runs: Path, tmp_path: Path) -> None:
    words = ["sweep=small", f"runs_dir={runs}", f"out={tmp_path}", "records=true"]
    assert main(words) == 0
    before = content(tmp_path / "records")
    next((tmp_path / "records").glob("small/*/metrics.jsonl")).unlink()
    assert main(words) == 0 and content(tmp_path / "records") == before
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["small"]


def test_arms_that_only_a_place_tells_apart_are_refused() -> None:
    configs = [{"R": 2, "seed": 0, "model": {"name": "m", "path": f"/{place}/final"}} for place in "ab"]
    with pytest.raises(records.ReportError, match=r"differ in absolute paths alone \(model\.path\)"):
        records._refuse_fewer_arms(configs, [records.mapping_without_places(config) for config in configs])
    relative = [{**one, "model": {"name": "m", "path": one["model"]["path"][1:]}} for one in configs]
    records._refuse_fewer_arms(relative, [records.mapping_without_places(config) for config in relative])


def test_no_command_writes_into_a_copy(published: Path, capsys) -> None:
    before = content(published / "records")
    assert "published copy" in refusal(capsys, [f"runs_dir={published / 'records'}"], sync.main)
    config = config_of(published / "records", 8, 0)
    with pytest.raises(ConfigError, match="published copy, and no run goes on from them"):
        plan([config], LaunchConfig(), [[]], "", here=True)
    assert content(published / "records") == before
