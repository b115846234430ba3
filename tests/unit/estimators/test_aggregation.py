"""Row weights against the textbook double sum over rollouts and tokens."""

from __future__ import annotations

import pytest
import torch

from grpo_sweeps.estimators import AGGREGATIONS, row_weights

ADVANTAGES = torch.tensor([[0.5, -0.5], [0.25, -0.25]])
LENGTHS = torch.tensor([[3, 5], [2, 10]])
MAX_LENGTH = 10


def objective_by_token(aggregation: str, token_values: list[list[list[float]]]) -> float:
    """The objective as the papers write it, one token after the other."""
    total, tokens, rollouts = 0.0, 0, 0
    for g in range(2):
        for i in range(2):
            length = int(LENGTHS[g, i])
            row = sum(float(ADVANTAGES[g, i]) * token_values[g][i][t] for t in range(length))
            total += {"length": row / length, "constant": row / MAX_LENGTH}.get(aggregation, row)
            tokens += length
            rollouts += 1
    return total / (tokens if aggregation == "token_mean" else rollouts)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_give_the_objective(aggregation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [[torch.rand(int(n), generator=generator).tolist() for n in row] for row in LENGTHS]
    weights = row_weights(ADVANTAGES, LENGTHS, aggregation, MAX_LENGTH)
    by_row = sum(float(weights[g, i]) * sum(values[g][i]) for g in range(2) for i in range(2))
    assert by_row == pytest.approx(objective_by_token(aggregation, values), rel=1e-12)


def test_another_aggregation_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="sum, length, token_mean, constant"):
        row_weights(ADVANTAGES, LENGTHS, "mean", MAX_LENGTH)


def test_shapes_must_agree_and_completions_have_tokens() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        row_weights(ADVANTAGES, LENGTHS[:1], "sum", MAX_LENGTH)
    with pytest.raises(ValueError, match="0 tokens"):
        row_weights(ADVANTAGES, LENGTHS * 0, "sum", MAX_LENGTH)
