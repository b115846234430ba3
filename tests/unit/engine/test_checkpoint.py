"""Checkpoints: whole or not there, damaged ones passed over, no code in them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_sweeps.engine import checkpoint


def state(value: float) -> dict[str, object]:
    return {"weights": torch.full((3, 2), value), "optimizer": {0: {"step": 4, "betas": (0.9, 0.95), "foreach": None}}}


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_round_trip_of_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, 7, {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 7
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state["model"][name], tensor) and tensor.dtype == torch.bfloat16
    again = torch.optim.AdamW(model.parameters(), lr=0.5)
    again.load_state_dict(found.state["optimizer"])
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def draws() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    draws()  # leaves a second gaussian waiting in Python's and NumPy's generators
    checkpoint.save(tmp_path, 1, {})
    expected = [draws() for _ in range(3)]
    draws()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    checkpoint.restore_random_states(found.random)
    assert [draws() for _ in range(3)] == expected


def test_the_newest_n_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    assert names(tmp_path) == ["step_0000010", "step_0000015"]
    checkpoint.save(tmp_path, 20, state(20))
    assert names(tmp_path) == ["step_0000020"]


def damage_cut(path: Path) -> None:
    file = path / "state.pt"
    file.write_bytes(file.read_bytes()[:-100])


def damage_flip(path: Path) -> None:
    file = path / "state.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 1')


def damage_missing(path: Path) -> None:
    (path / "manifest.json").unlink()


def rewritten(path: Path, **changes: object) -> None:
    """A manifest that fits state.pt, with some keys changed (None: left out)."""
    size, digest = checkpoint._measure(path / "state.pt")
    content = {**json.loads((path / "manifest.json").read_text()), "size": size, "sha256": digest, **changes}
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def damage_list(path: Path) -> None:
    (path / "manifest.json").write_text("[1, 2]")


def damage_key(path: Path) -> None:
    rewritten(path, step=None)


def damage_step(path: Path) -> None:
    rewritten(path, step="2")


def damage_nested(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def damage_other_content(path: Path) -> None:
    torch.save({"state": {}}, path / "state.pt")
    rewritten(path)


def damage_no_mapping(path: Path) -> None:
    torch.save([1, 2], path / "state.pt")
    rewritten(path)


def damage_no_archive(path: Path) -> None:
    (path / "state.pt").write_bytes(b"PK\x03\x04 and no more")
    rewritten(path)


def damage_empty(path: Path) -> None:
    (path / "state.pt").write_bytes(b"")
    rewritten(path)


DAMAGES = [
    damage_cut, damage_flip, damage_manifest, damage_missing, damage_list, damage_key, damage_step, damage_nested,
    damage_other_content, damage_no_mapping, damage_no_archive, damage_empty,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, capsys, damage) -> None:
    checkpoint.save(tmp_path, 1, state(1.0), keep=3)
    damage(checkpoint.save(tmp_path, 2, state(2.0), keep=3))
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1 and found.state["weights"][0, 0] == 1.0
    assert "step_0000002 is damaged" in capsys.readouterr().out
    said: list[str] = []
    assert checkpoint.latest(tmp_path, say=said.append) is not None
    assert len(said) == 1 and "\n" not in said[0] and said[0].endswith("Trying the one before it.")
    damage(tmp_path / "step_0000001")
    assert checkpoint.latest(tmp_path) is None


def test_going_back_removes_what_the_run_has_left(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1.0), keep=3)
    damage_cut(checkpoint.save(tmp_path, 5, state(5.0), keep=3))
    checkpoint.save(tmp_path, 2, state(2.0), keep=3)
    assert names(tmp_path) == ["step_0000001", "step_0000002"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, state(1.0))
    checkpoint.save(tmp_path, 3, state(2.0))
    checkpoint.save(tmp_path, 3, state(3.0))
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 3 and found.state["weights"][0, 0] == 3.0
    assert len(names(tmp_path)) == 1


class Killed(BaseException):
    pass


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
@pytest.mark.parametrize("moment", range(1, 8))
def test_killed_anywhere_there_is_always_a_whole_checkpoint(tmp_path, monkeypatch, moment, again, keep) -> None:
    """Dies before the n-th of the calls that reach the disk; no clean-up runs, as after SIGKILL."""
    checkpoint.save(tmp_path, 1, state(1.0), keep=keep)
    count = 0

    def dying(function):
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            if count == moment:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for owner, name in ((os, "replace"), (os, "fsync"), (torch, "save")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        patch.setattr(checkpoint.shutil, "rmtree", dying(lambda path, **_: (_ for _ in ()).throw(Killed)))
        with contextlib.suppress(Killed):
            checkpoint.save(tmp_path, 1 if again else 2, state(2.0), keep=keep)
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.state["weights"][0, 0] in (1.0, 2.0)
    checkpoint.save(tmp_path, 3, state(3.0), keep=keep)
    assert checkpoint.latest(tmp_path).step == 3
    assert not [n for n in names(tmp_path) if n.startswith(".tmp-")]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, state(1.0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, state(2.0))
    assert names(tmp_path) == ["step_0000001"]


def test_what_could_not_be_loaded_is_refused_when_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\].*Generator"):
        checkpoint.save(tmp_path, 1, {"a": [1, torch.Generator()]})
    with pytest.raises(TypeError, match="float64"):
        checkpoint.save(tmp_path, 1, {"loss": np.float64(1.0)})
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, 1, {}, keep=0)
    assert checkpoint.latest(tmp_path) is None


class Evil:
    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_a_checkpoint_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even with a manifest that fits, a pickle that calls something is not loaded."""
    path = checkpoint.save(tmp_path / "c", 1, {})
    evil = Evil()
    evil.target = str(tmp_path / "made")
    torch.save({"state": evil, "random": {}}, path / "state.pt")
    size, digest = checkpoint._measure(path / "state.pt")
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(json.dumps({**json.loads(text), "size": size, "sha256": digest}))
    assert checkpoint.latest(tmp_path / "c") is None
    assert "more than tensors" in capsys.readouterr().out
    assert not (tmp_path / "made").exists()
    with pytest.raises(FileExistsError):  # the trap works: plain unpickling would have made the folder
        (tmp_path / "made").mkdir()
        pickle.loads(pickle.dumps(evil))


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
