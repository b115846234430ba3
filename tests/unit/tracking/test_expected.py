"""What a run should hold, and the small parts that say whether it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.tracking import seal as seals
from grpo_sweeps.tracking.expected import expected
from grpo_sweeps.tracking.glance import lost_files, steps_in_words
from grpo_sweeps.tracking.lines import parse_lines, parsed, with_checksum
from grpo_sweeps.tracking.seal import Keeps, Seal
from grpo_sweeps.tracking.status import RecordError

CONFIG: dict[str, Any] = {
    "R": 4, "trainer": {"steps": 10, "prompts": 3, "eval_every": 4}, "analysis": {"every": 1, "groups": "mixed"},
}  # fmt: skip


def test_counts_follow_from_the_configuration_and_what_the_run_was_told_to_keep() -> None:
    seal = Seal(keeps=(Keeps(0, 5, 2, 4, 11, 8), Keeps(6, 3, 0, 4, 11, 8)))
    found = expected(CONFIG, seal, 10, finished=True)
    assert found.groups == 3 and found.completions == {0: 4, 5: 4, 6: 4, 9: 4}
    assert found.updates == {0: 11, 2: 11, 4: 11} and found.evals == {0: 8, 4: 8, 8: 8, 10: 8}
    assert expected(CONFIG, seal, 5, finished=False).evals == {0: 8, 4: 8}


def test_of_older_records_less_is_known() -> None:
    found = expected(CONFIG, None, 10, finished=True)
    assert found.completions is None and found.updates is None and found.evals == dict.fromkeys((0, 4, 8, 10))
    bare = expected({"R": 4}, None, 10, finished=True)
    assert bare.groups is None and bare.evals is None and bare.gram_every is None
    rollouts = CONFIG | {"R": 2, "budget": "rollouts", "budget_R": 4}
    assert expected(rollouts, None, 1, finished=False).groups == 6


def test_steps_in_words() -> None:
    assert steps_in_words([3]) == "step 3" and steps_in_words([9, 3, 8, 7]) == "steps 3, 7 to 9"
    assert steps_in_words(range(0, 40, 2)).endswith("14, ...")


def test_a_line_with_a_checksum_is_read_and_a_changed_one_is_not() -> None:
    line = b'{"step":3,"time":1.5,"reward":"NaN"}'
    whole = with_checksum(line)
    assert parsed(whole) == parsed(line) == {"step": 3, "time": 1.5, "reward": "NaN"}
    assert parse_lines([whole]) == ([parsed(line)], []) and with_checksum(b"{}") == b"{}"
    for at in range(len(whole)):
        for bit in range(8):
            other = bytearray(whole)
            other[at] ^= 1 << bit
            try:
                content = parsed(bytes(other))
            except ValueError:
                continue
            assert content.keys() != parsed(line).keys()  # its key was hit: an older line, with a key too many
            assert {name: content[name] for name in parsed(line)} == parsed(line)


def test_a_seal_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    assert seals.read(tmp_path) is None
    (tmp_path / "config.yaml").write_text("R: 4\n")
    seal = Seal("abc", 6, (Keeps(0, 5, 2, 4, 11, 8),), {"config.yaml": seals.digest(tmp_path / "config.yaml")})
    seals.write(tmp_path, seal)
    assert seals.read(tmp_path) == seal and lost_files(tmp_path, seal) == []
    seals.rewrite(tmp_path, "config.yaml", "R: 8\n")
    found = seals.read(tmp_path)
    assert found is not None and found.files["config.yaml"] == seals.digest(tmp_path / "config.yaml")
    path = tmp_path / seals.FILE_NAME
    path.write_text(path.read_text().replace("abc", "abd"))
    with pytest.raises(RecordError, match=r"seal\.json is damaged: it is not what its checksum belongs to"):
        seals.read(tmp_path)


def test_a_merged_segment_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "grams").mkdir()
    names = ["grams/segment-00000_steps-0000000-0000004.parquet", "grams/segment-00003_steps-0000005-0000009.parquet"]
    seal = Seal(files=dict.fromkeys(names, (1, "")))
    assert lost_files(tmp_path, seal) == names
    (tmp_path / "grams" / "segment-00002_steps-0000000-0000009.parquet").touch()
    assert lost_files(tmp_path, seal) == names[1:]  # the later one was written after it
