"""How many rows a card holds: what is found is what fits."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from grpo_sweeps.config import RunConfig
from grpo_sweeps.engine.allocator import SETTINGS
from grpo_sweeps.loop.results import StepTimes
from grpo_sweeps.loop.rollouts import rollouts_with_advantages
from grpo_sweeps.loop.room import measure_room
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.loop.step import training_step
from hydra_plugins.grpo_launcher.registration import composed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WORDS = (
    "model=smollm2_135m model.path=embedded model.random=true model.chat_template=false R=8 trainer.prompts=2 "
    "rollout.max_new_tokens=512 tracking=local reward=random"
)


@pytest.fixture
def setup() -> Setup:
    """SmolLM2's shape in random weights, rows of at most some 550 tokens, 16 of them in a step."""
    gc.collect()
    torch.cuda.empty_cache()
    return prepare(RunConfig.from_composed(composed(*WORDS.split())))


def bytes_for_few_rows(setup: Setup) -> int:
    """Less than 32 rows take, and more than the model and its optimiser: as a step's first room leaves the card."""
    rated = rollouts_with_advantages(setup, 0)
    measure_room(setup, rated.rollouts, StepTimes())
    setup.room.rows = None
    torch.cuda.empty_cache()
    state = setup.optimizer.bytes_to_come + sum(p.nbytes for p in setup.policy.model.parameters())
    return torch.cuda.memory_reserved() + state + 5 * 10**9


def test_where_there_is_room_nothing_changes(setup: Setup) -> None:
    rated = rollouts_with_advantages(setup, 0)
    measure_room(setup, rated.rollouts, StepTimes())
    assert setup.room.rows == 32
    assert all(p.grad is None for p in setup.policy.model.parameters())


def test_a_step_keeps_within_the_memory_there_is(setup: Setup) -> None:
    """With less memory than 32 rows take, and more than the model: fewer rows, and the step fits."""
    total, limit = torch.cuda.get_device_properties(0).total_memory, bytes_for_few_rows(setup)
    held = torch.empty(torch.cuda.mem_get_info()[0] - limit, dtype=torch.uint8, device="cuda")
    try:
        training_step(setup, 0)
        assert setup.room.rows is not None and setup.room.rows < 32
        assert torch.cuda.max_memory_allocated() <= total
    finally:
        del held
        torch.cuda.empty_cache()


def test_a_limit_of_the_process_is_kept_too(setup: Setup) -> None:
    """As on a smaller card: what others could still take of this one counts for nothing."""
    total, limit = torch.cuda.get_device_properties(0).total_memory, bytes_for_few_rows(setup)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        training_step(setup, 0)
        assert setup.room.rows is not None and setup.room.rows < 32
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_memory_of_a_run_grows_in_place(setup: Setup) -> None:
    """Rows of uneven lengths left gaps between segments of fixed size, and a run of measured room ended in them."""
    assert not any(os.environ.get(name) for name in SETTINGS), "this process was started with an allocator's settings"
    held = torch.empty(2**28, dtype=torch.uint8, device=setup.policy.device)
    own = [s for s in torch.cuda.memory_snapshot() if 0 <= held.data_ptr() - s["address"] < s["total_size"]]
    assert [s["is_expandable"] for s in own] == [True]
