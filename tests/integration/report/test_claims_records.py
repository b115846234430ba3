"""A broken identity in a whole report: a line at the terminal and on the page."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_sweeps.report.__main__ import main

pytestmark = pytest.mark.integration


def test_a_broken_identity_is_an_error_line_at_the_terminal(write, tmp_path, capsys, undrawn):
    def shifted(record):
        return dataclasses.replace(record, advantages=tuple(a + 0.01 for a in record.advantages))

    write(tmp_path / "runs", "s", 4, 0, steps=4, change=shifted)
    assert main([f"runs_dir={tmp_path / 'runs'}", f"out={tmp_path / 'out'}"]) == 0
    assert "C2: ERROR: all, R = 4: advantages that must sum to zero do not" in capsys.readouterr().err
    assert "must sum to zero" in (tmp_path / "out/index.html").read_text()
