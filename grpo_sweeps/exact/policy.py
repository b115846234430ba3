"""A softmax policy over short token sequences, small enough that every sequence can be listed.

The parameters are shared by all prompts, positions and tokens, so that the scores of different sequences overlap as a
language model's do; a table of logits would make scores of different prefixes orthogonal. Every parameter belongs to
an nn.Embedding or nn.Linear: the modules whose gradients `engine.gram` measures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

Model = Callable[[Tensor, Tensor], Tensor]
"""prompt_B, tokens_BT -> logits_BTV: a `SoftmaxPolicy` or a function of the same kind."""


class SoftmaxPolicy(nn.Module):
    """logits_t = head(tanh(hidden(token[x_{t-1}] + position[t] + prompt[q]))) / temperature, in float64.

    Embeddings are drawn from N(0, 1), linear layers from N(0, 1 / inputs), from a generator of their own. The policy
    sees no token before x_{t-1}, but a prefix is still a state: rewards may depend on all of it.

    Args:
        prompts: number P of prompts, with ids 0 .. P - 1.
        tokens: size V of the vocabulary, the end of sequence (id 0) included where `ends`.
        max_length: longest sequence T, in tokens; a sequence of T tokens stops there, ended or not.
        ends: token 0 ends a sequence. Otherwise every sequence has T tokens and token 0 is one like the others.
        width: hidden width H.
        temperature: the logits are divided by it, > 0; large values make the policy uniform.
        seed: seed of the parameters.

    Raises:
        ValueError: on a size below 1, fewer than 2 tokens or a temperature that is not positive.
    """

    def __init__(
        self,
        prompts: int = 2,
        tokens: int = 4,
        max_length: int = 4,
        ends: bool = True,
        width: int = 6,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(prompts, max_length, width) < 1 or tokens < 2 or not temperature > 0:
            raise ValueError(
                f"prompts={prompts}, tokens={tokens}, max_length={max_length}, width={width}, "
                f"temperature={temperature}: needed are sizes >= 1, two tokens or more, a positive temperature"
            )
        self.prompts, self.tokens, self.max_length = prompts, tokens, max_length
        self.ends, self.temperature = ends, temperature
        # The last token id, one beyond the vocabulary, stands before the first token.
        self.token = skip_init(nn.Embedding, tokens + 1, width, dtype=torch.float64)
        self.position = skip_init(nn.Embedding, max_length, width, dtype=torch.float64)
        self.prompt = skip_init(nn.Embedding, prompts, width, dtype=torch.float64)
        self.hidden = skip_init(nn.Linear, width, width, dtype=torch.float64)
        self.head = skip_init(nn.Linear, width, tokens, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            deviation = width**-0.5 if name.startswith(("hidden", "head")) else 1.0
            nn.init.normal_(parameter, std=deviation, generator=generator)

    def forward(self, prompt_B: Tensor, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) for token t given the tokens before it; T may be any length up to `max_length`."""
        B, T = tokens_BT.shape
        start_B1 = tokens_BT.new_full((B, 1), self.tokens)
        previous_BT = torch.cat([start_B1, tokens_BT[:, :-1]], dim=1)
        positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
        x_BTH = self.token(previous_BT) + self.position(positions_BT) + self.prompt(prompt_B[:, None].expand(B, T))
        logits_BTV: Tensor = self.head(torch.tanh(self.hidden(x_BTH)))
        return logits_BTV / self.temperature


def token_log_probs(policy: Model, prompt_B: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log pi(token t | tokens before), natural logarithm, 0 where `mask_BT` is False (padding). Shape (B, T)."""
    log_probs_BTV = policy(prompt_B, tokens_BT).log_softmax(dim=-1)
    taken_BT: Tensor = log_probs_BTV.gather(-1, tokens_BT[..., None])[..., 0]
    return taken_BT * mask_BT


def row_log_probs(policy: Model, prompt_B: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log pi(sequence), the sum over its tokens, each row from its own tokens only, as `GradientGram` requires.
    Shape (B,)."""
    return token_log_probs(policy, prompt_B, tokens_BT, mask_BT).sum(dim=1)
