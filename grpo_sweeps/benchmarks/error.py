"""How exact the Gram is in a training dtype: K by GradientGram beside K from float64 rows of the same weights, and
what the difference does to the ranks that are computed from it.

A third column is ordinary autograd in the training dtype, one row at a time: the error that the dtype itself makes.
Weights are as the architecture initialises them. Rows are formed for some parameters at a time (see
`subjects.autograd_gram`): in float64 those of a whole model would not fit a card.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from grpo_sweeps.benchmarks.options import ErrorOptions
from grpo_sweeps.benchmarks.setup import (
    Batch,
    check_lengths,
    check_model,
    drop_grads,
    environment,
    free_memory,
    model_config,
    prepare,
    random_batch,
    random_model,
    write_json,
)
from grpo_sweeps.benchmarks.subjects import autograd_gram, blockwise_sums
from grpo_sweeps.engine.device_memory import free_bytes
from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.estimators.group import grpo
from grpo_sweeps.spectra import (
    effective_rank,
    participation_ratio,
    singular_values,
    stable_rank,
    top1_fraction,
    weighted_gram,
)
from grpo_sweeps.types import ConfigError

RANKS = {
    "effective rank": effective_rank,
    "participation ratio": participation_ratio,
    "stable rank": stable_rank,
    "top-1 fraction": top1_fraction,
}
SHARE_OF_FREE = 0.5  # of the card's free memory for rows; the rest is for a backward pass and its logits
CPU_ROW_BYTES = 4 * 2**30
COLUMNS = ("float64", "ours", "autograd")


def run(options: ErrorOptions, command: str) -> None:
    """Print the comparison; with json=path also write it, the Grams included."""
    check(options)
    device = prepare(options)
    changes = {"num_hidden_layers": options.layers, "vocab_size": options.vocabulary}
    config = model_config(options.model, **{key: value for key, value in changes.items() if value})
    model = random_model(config, options.dtype, device)
    batch = random_batch(model, options.R, 1, options.T, options.prompt)
    result = environment("error", command, options, device)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    result["shape"] = {"layers": config.num_hidden_layers, "vocabulary": config.vocab_size}
    grams, result["floor"] = all_grams(options, model, batch)
    weights_R = grpo_weights(options.R, options.T - options.prompt)
    result["weights"] = weights_R.tolist()
    result["K"] = {name: gram.tolist() for name, gram in grams.items()}
    result["errors"] = {name: errors(gram, grams["float64"]) for name, gram in grams.items() if name != "float64"}
    result["ranks"] = {
        "K": {name: ranks(gram) for name, gram in grams.items()},
        "diag(w) K diag(w)": {name: ranks(weighted_gram(gram, weights_R)) for name, gram in grams.items()},
    }
    write_json(options.json, result)
    print_table(result)


def check(options: ErrorOptions) -> None:
    check_model(options)
    if options.R < 2:
        raise ConfigError(f"bench: R={options.R}: allowed are whole numbers from 2")
    check_lengths(options.prompt, [options.T])
    for key, value in (("layers", options.layers), ("vocabulary", options.vocabulary)):
        if value < 0:
            raise ConfigError(f"bench: {key}={value}: allowed are whole numbers from 0 (0 = the model's own)")


def all_grams(options: ErrorOptions, model: nn.Module, batch: Batch) -> tuple[dict[str, np.ndarray], float]:
    """The Gram (R, R) by "ours", "autograd" and "float64", and the floor that GradientGram states for the dtype.

    The float64 model is the same one, widened at the end, so that there is no second copy.
    """
    gram = GradientGram(model, options.form, options.block_bytes)  # type: ignore[arg-type]
    with gram.measure(batch.group_sizes, batch.weights_B) as m:
        blockwise_sums(model, batch).sum().backward()
    grams = {"ours": m.matrices()[0]}
    floor = m.floor
    del gram, m
    drop_grads(model)
    for name in ("autograd", "float64"):
        if name == "float64":
            model.double()
        free_memory()
        grams[name] = autograd_gram(model, batch, row_budget(batch.ids_BT), lambda text: print(text, flush=True))[0]
    return {name: grams[name].numpy() for name in COLUMNS}, floor


def row_budget(on: Tensor) -> int:
    """Bytes that the rows kept at once may take."""
    if on.device.type != "cuda":
        return CPU_ROW_BYTES
    return int(SHARE_OF_FREE * free_bytes(on.device))


def grpo_weights(R: int, length: int) -> np.ndarray:
    """A_i / length, (R,), where a quarter of the rollouts (at least one) have reward 1 and the others 0."""
    rewards_GR = np.zeros((1, R))
    rewards_GR[0, : max(1, R // 4)] = 1
    return grpo(rewards_GR)[0] / length


def errors(found: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """relative_frobenius: |K - K64| / |K64|; largest_entry: max |K - K64|_ij / sqrt(K64_ii K64_jj)."""
    norms_R = np.sqrt(np.diagonal(exact))
    return {
        "relative_frobenius": float(np.linalg.norm(found - exact) / np.linalg.norm(exact)),
        "largest_entry": float((np.abs(found - exact) / np.outer(norms_R, norms_R)).max()),
    }


def ranks(gram_RR: np.ndarray) -> dict[str, float]:
    """Every rank of a Gram, by name."""
    values_R = singular_values(gram_RR)
    return {name: float(rank(values_R)) for name, rank in RANKS.items()}


def print_table(result: dict[str, Any]) -> None:
    o, shape = result["options"], result["shape"]
    print(
        f"{o['model']}, {shape['layers']} layers, a vocabulary of {shape['vocabulary']} words, random weights as "
        f"initialised ({result['parameters'] / 1e6:.1f} M parameters, {o['dtype']}), R={o['R']}, T={o['T']}, "
        f"{result['device']}, torch {result['torch']}"
    )
    print(f"{'error of K against float64 rows':<34}{'ours':>16}{'autograd, ' + o['dtype']:>24}")
    texts = {"relative_frobenius": "relative, Frobenius", "largest_entry": "largest |dK_ij| / sqrt(K_ii K_jj)"}
    for key, text in texts.items():
        print(f"{text:<34}{result['errors']['ours'][key]:>16.2e}{result['errors']['autograd'][key]:>24.2e}")
    print(f"{'floor stated for the dtype':<34}{result['floor']:>16.2e}")
    for matrix, columns in result["ranks"].items():
        print(f"{matrix:<34}{'float64':>16}{'ours':>16}{'autograd':>16}{'ours / float64 - 1':>22}")
        for name in RANKS:
            values = [columns[column][name] for column in COLUMNS]
            print(
                f"{name:<34}" + "".join(f"{value:>16.6f}" for value in values) + f"{values[1] / values[0] - 1:>22.1e}"
            )
