"""C6: three things that "sparsity of the gradient" could mean, along exact gradient ascent of a small policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_sweeps.exact import SoftmaxPolicy, TokenReward, several_prompts
from grpo_sweeps.science.claim import Claim

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Step:
    """One step of ascent. all_equal: chance of a group of R with equal rewards; hoyer: of grad J; unchanged: share of
    weights that the step does not change in a dtype."""

    J: float
    sigma: float
    all_equal: float
    hoyer: float
    unchanged: dict[str, float]


def hoyer(values: np.ndarray) -> float:
    """(sqrt D - |x|_1 / |x|_2) / (sqrt D - 1): 0 where all are alike, 1 where one alone is not zero (Hoyer 2004)."""
    root = np.sqrt(values.size)
    return float((root - np.abs(values).sum() / np.linalg.norm(values)) / (root - 1))


def ascend(policy: SoftmaxPolicy, rewards: Sequence[TokenReward], steps: int, rate: float, R: int) -> list[Step]:
    """The policy's own weights follow grad J in float64; `policy` is changed."""
    found = []
    for _ in range(steps):
        enumerations = several_prompts(policy, rewards)
        gradient_D = torch.stack([e.grad_J_D for e in enumerations]).mean(dim=0)
        p = np.array([e.J for e in enumerations])
        weights_D = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
        after_D = weights_D + rate * gradient_D
        unchanged = {
            name: float((weights_D.to(dtype) == (weights_D.to(dtype) + (rate * gradient_D).to(dtype))).double().mean())
            for name, dtype in DTYPES.items()
        }
        all_equal = float(np.mean(p**R + (1 - p) ** R))
        sigma = float(np.mean(np.sqrt(p * (1 - p))))
        found.append(Step(float(p.mean()), sigma, all_equal, hoyer(gradient_D.numpy()), unchanged))
        torch.nn.utils.vector_to_parameters(after_D, policy.parameters())
    return found


def sparsity(path: Sequence[Step], R: int) -> Claim:
    """C6, from a path of `ascend`."""
    first, last = path[0], path[-1]

    def change(name: str, a: float, b: float) -> str:
        return f"{name} {a:.2f} to {b:.2f}"

    words = [
        change("mean reward", first.J, last.J),
        change(f"all-equal groups of {R}", first.all_equal, last.all_equal),
        change("Hoyer sparsity of grad J", first.hoyer, last.hoyer),
        *(change(f"weights unchanged in {name}", first.unchanged[name], last.unchanged[name]) for name in DTYPES),
    ]
    return Claim(
        "C6",
        "gradient sparsity",
        "The gradient becomes sparser during training.",
        "Undefined: one number in front of a dense score makes no zeros. Groups without gradient become more "
        "frequent as p nears 0 or 1, and in a narrow dtype a smaller step changes fewer weights; the gradient "
        "itself need not become sparser.",
        f"{len(path)} steps of exact ascent: " + "; ".join(words),
        "",
        "undefined",
    )
