"""Random shapes on a card: every form that it has, ragged batches, widths that no block divides."""

import json

import pytest
import torch

from grpo_sweeps.bench import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_shapes_stay_within_four_epsilons(dtype, tmp_path):
    path = tmp_path / "shapes.json"
    code = main(["shapes", "device=cuda", f"dtype={dtype}", "count=60", "seed=1", f"json={path}"])
    result = json.loads(path.read_text())
    assert result["failed"] == [] and code == 0
    assert result["allowed"] == 4 and 0 < result["worst"]["gram"] <= 4
    assert {"ghost", "blocks"} < set(result["share_by_path"])
