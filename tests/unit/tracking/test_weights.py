"""Which GGUF file weights came from: read from the file, left beside what was made of it, told in one sentence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from grpo_sweeps.tracking import weights
from grpo_sweeps.types import ConfigError

gguf = pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file most of whose weights are in 4 bits; more of its tensors are not."""
    path = tmp_path / "Small.Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    matrix = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("blk.0.w", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_says_its_name_digest_and_quantisation(file: Path) -> None:
    found = weights.came_from(str(file), "bfloat16")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found == {"file": "Small.Q4_1.gguf", "sha256": sha256, "quantisation": "Q4_1", "dtype": "bfloat16"}
    assert weights.in_words(found) == (
        f"Small.Q4_1.gguf (sha256 {sha256[:8]}...), a 4-bit file (Q4_1) dequantised to bfloat16"
    )


def test_it_is_left_beside_what_is_made_of_it_and_of_that(file: Path, tmp_path: Path) -> None:
    one, two, none = (tmp_path / name for name in ("one", "two", "none"))
    for folder in (one, two, none):
        folder.mkdir()
    weights.leave(one, str(file), "float32")
    weights.leave(two, str(one), "bfloat16")
    weights.leave(none, "owner/name", "bfloat16")
    assert weights.came_from(str(two), "bfloat16") == weights.came_from(str(file), "float32")
    assert list(none.iterdir()) == [] and weights.came_from(str(none), "float32") == {}
    assert weights.came_from("embedded", "float32") == {}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_note_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / weights.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"^model\.path=.*converted_from\.json .*convert the file again$"):
        weights.came_from(str(tmp_path), "float32")
    (tmp_path / weights.FILE).write_text(json.dumps({"file": "x"}))
    assert weights.came_from(str(tmp_path), "float32") == {"file": "x"}
