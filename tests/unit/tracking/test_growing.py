"""A record is read once: what is new costs, what is old does not; a rewritten file is noticed."""

from __future__ import annotations

import builtins
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.tracking.lines import TAIL, GrowingFile, growing


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_any_sequence_of_changes_is_seen_as_a_fresh_reading_sees_it(tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "m"
    file, data, counter = GrowingFile(path), b"", 0
    for _ in range(400):
        move = rng.random()
        lines = data.splitlines(keepends=True)
        if move < 0.2 and lines:  # back to a checkpoint: other lines from there on, of the same length as before
            data = b"".join(lines[: rng.randrange(len(lines))])
        for _ in range(rng.randrange(20)):
            counter += 1
            data += b'{"step": %08d, "fill": "%s"}\n' % (counter, b"x" * rng.choice([0, 10, 2000]))
        torn = b'{"st' if rng.random() < 0.3 else b""
        path.write_bytes(data + torn)
        file.read()
        assert (file.size, file.digest()) == (len(data), sha(data))
        size = rng.randrange(len(data) + 1)
        assert file.starts_with(size, sha(data[:size])) and not file.starts_with(size, sha(b"other"))
        assert file.bytes(size) == data[size:]
    assert not file.starts_with(len(data) + 1, sha(data)) and len(data) > 3 * TAIL


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert growing(tmp_path / "none").size == 0
    (tmp_path / "none").write_text("a\n")
    assert growing(tmp_path / "none").size == 2
    (tmp_path / "none").unlink()
    assert growing(tmp_path / "none").size == 0


def test_a_pass_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, real = tmp_path / "m", [0], builtins.open
    path.write_bytes(b"x" * 99 + b"\n" * 1 + b"y" * 10_000_000 + b"\n")

    def counting(*args: Any, **kwargs: Any) -> Any:
        file = real(*args, **kwargs)
        take = file.read

        class Counted:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *exc: object) -> None:
                file.close()

            def seek(self, *where: int) -> Any:
                return file.seek(*where)

            def read(self, *size: int) -> Any:
                data = take(*size)
                read[0] += len(data)
                return data

        return Counted()

    growing(path).mark()
    monkeypatch.setattr(builtins, "open", counting)
    with real(path, "ab") as out:
        out.write(b"new\n")
    file = growing(path)
    assert file.starts_with(file.size - 4, sha(b"x" * 99 + b"\n" + b"y" * 10_000_000 + b"\n"))
    assert file.bytes(file.size - 4) == b"new\n" and read[0] < 2 * TAIL
