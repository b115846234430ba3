"""GradientGram in a training loop of your own, with none of the rest of the package: a spectrum at every step.

    python examples/gradient_gram.py

Four sampled continuations of one prompt make a group; a made-up reward tells them apart. What matters is the `with`
block: an ordinary forward and backward inside it leave the weighted gradient in `.grad`, and the R x R matrix of inner
products between the rollouts' gradients in `m`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_sweeps import GradientGram
from grpo_sweeps.models import tiny_path

R = 4
PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples does Tom have?\nAnswer:"


def effective_rank(gram_RR: Tensor, weights_R: Tensor) -> float:
    """(sum s)^2 / sum s^2 of the matrix with rows w_i psi_i, from the Gram of the psi_i."""
    weighted_RR = weights_R[:, None] * gram_RR * weights_R[None, :]
    singular = torch.linalg.eigvalsh(weighted_RR).clamp_min(0).sqrt()
    return float(singular.sum() ** 2 / (singular**2).sum())


def main(steps: int = 3) -> list[float]:
    """Train a few steps and return the effective rank of each."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_path())
    model = AutoModelForCausalLM.from_pretrained(tiny_path())
    gram = GradientGram(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    ranks = []
    for step in range(steps):
        # Sampled to a fixed length, end of text or not, so that no row needs padding.
        rows_RT = prompt.expand(R, -1)
        with torch.no_grad():
            for _ in range(16):
                last_RV = model(rows_RT).logits[:, -1]
                rows_RT = torch.cat([rows_RT, torch.multinomial(last_RV.softmax(-1), 1)], dim=1)
        completions_RT = rows_RT[:, prompt.shape[1] :]
        rewards_R = (completions_RT.double().mean(dim=1) > completions_RT.double().mean()).double()
        weights_R = rewards_R - rewards_R.mean()

        optimizer.zero_grad()
        with gram.measure(group_sizes=[R], weights=-weights_R) as m:  # minus: the optimiser descends
            logits_RTV = model(rows_RT[:, :-1]).logits[:, prompt.shape[1] - 1 :]
            logprobs_RT = logits_RTV.log_softmax(-1).gather(-1, completions_RT[..., None])[..., 0]
            logprobs_RT.sum().backward()
        ranks.append(effective_rank(m.matrix(), weights_R))
        optimizer.step()
        print(f"step {step}  correct {int(rewards_R.sum())}/{R}  effective rank {ranks[-1]:.2f}")
    return ranks


if __name__ == "__main__":
    main()
