"""Log-probabilities through a blockwise output head: the T x V logits never exist, in neither direction.

forward:  z_tv = <h_t, W_v> / temperature for a block of the vocabulary at a time, running log-sum-exp;
          log pi(y_t) = z_ty - logsumexp_v z_tv
backward: z is formed again block by block, dz_tv = g_t (1[v = y_t] - exp(z_tv - lse_t)) / temperature, and from it the
          hidden states' gradient and the weight's, with the Gram of the rows' weight gradients when a block of
          `GradientGram.measure` is open.

Products are in the model's dtype, the softmax in float32 (float64 for a float64 model), as in
`model(...).logits.float()`.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo_sweeps.engine.gram.host import fetched
from grpo_sweeps.engine.gram.layout import GramError, accumulation_dtype, wide_mm
from grpo_sweeps.engine.gram.linear import LinearRecorder
from grpo_sweeps.engine.gram.patch import aside, recorder_of
from grpo_sweeps.engine.gram.recorder import Partial
from grpo_sweeps.engine.unmasked import unmasked
from grpo_sweeps.models.families import LOGIT_SETTINGS

# Logits of one block; the CPU's fits its cache.
LOGIT_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Columns of a block are a multiple of this: kernels read rows of whole 128 bytes, whatever the number of tokens.
COLUMNS = 64

_checked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@overload
def completion_log_probs(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    completion_mask_BT: Tensor,
    temperature: float = 1.0,
    with_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def completion_log_probs(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    completion_mask_BT: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def completion_log_probs(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    completion_mask_BT: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """(B, T): log pi(input_ids[:, t] | earlier tokens) in nats at completion tokens, 0 elsewhere; float32 (float64
    models: float64).

    completion_mask is 1 at the tokens to be scored, also at an EOS; column 0 has no predictor and must be 0. Logits
    are divided by `temperature`. with_entropy: also the (B, T) entropies in nats of the distributions these tokens
    were drawn from, without gradient. Raises GramError for a model whose logits are not hidden states times the
    head's weight.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: it divides the logits and must be positive")
    if not input_ids_BT.shape == attention_mask_BT.shape == completion_mask_BT.shape or input_ids_BT.dim() != 2:
        shapes = [tuple(t.shape) for t in (input_ids_BT, attention_mask_BT, completion_mask_BT)]
        raise ValueError(
            f"input_ids, attention_mask and completion_mask must be (B, T), all of one shape; got {shapes}"
        )
    causal = causal_model(model)
    head = output_head(causal)
    check_plain_head(model, causal, head)
    mask_BT = completion_mask_BT.bool()
    positions_BN, valid_BN = completion_positions(mask_BT)
    hidden_BTH = hidden_states(model, causal, input_ids_BT, attention_mask_BT)
    H = hidden_BTH.shape[-1]
    hidden_BNH = hidden_BTH.gather(1, (positions_BN - 1)[..., None].expand(-1, -1, H))
    targets_BN = input_ids_BT.gather(1, positions_BN)
    logprobs_BN, entropy_BN = head_log_probs(hidden_BNH, head, targets_BN, temperature, with_entropy)
    logprobs_BT = _spread(logprobs_BN, positions_BN, valid_BN, mask_BT)
    return (logprobs_BT, _spread(entropy_BN, positions_BN, valid_BN, mask_BT)) if with_entropy else logprobs_BT


def position_ids(attention_mask_BT: Tensor) -> Tensor:
    """(B, T) positions, 0 at a row's first real token, whichever side is padded. Padding gets 0 or the last
    position."""
    return (attention_mask_BT.long().cumsum(1) - 1).clamp_min(0)


def completion_positions(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of each row's completion tokens, moved to the left: (B, N) positions >= 1, and which of them are
    real."""
    known_BT = fetched(mask_BT)  # the one wait for the device, where the host does not know the mask
    N = int(known_BT.sum(axis=1).max())
    if known_BT[:, 0].any():
        raise ValueError("completion_mask is 1 in column 0: no token before it predicts that one")
    N = max(1, N)  # where all completions are empty a column that is not real stands in: no kernel meets an empty batch
    order_BT = torch.argsort((~mask_BT).to(torch.int8), dim=1, stable=True)
    valid_BN = torch.arange(N, device=mask_BT.device)[None] < mask_BT.sum(1)[:, None]
    return order_BT[:, :N].clamp_min(1), valid_BN


def _spread(values_BN: Tensor, positions_BN: Tensor, valid_BN: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T): the values at the columns they came from, 0 elsewhere."""
    kept = torch.where(valid_BN, values_BN, 0)
    # Adding, not writing: places that are not real share columns with real ones and carry 0.
    return torch.zeros(mask_BT.shape, dtype=values_BN.dtype, device=values_BN.device).scatter_add(1, positions_BN, kept)


def causal_model(model: nn.Module) -> nn.Module:
    """The transformers causal model inside a DistributedDataParallel or peft wrapper."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    config = getattr(inner, "active_peft_config", None)
    if config is not None:
        if config.is_prompt_learning:
            raise GramError(
                f"peft method {config.peft_type} prepends virtual tokens, which the blockwise head would skip"
            )
        inner = inner.get_base_model()  # type: ignore[operator]
    return inner


def output_head(causal: nn.Module) -> nn.Linear:
    """The head's nn.Linear. Raises GramError for any other module and for settings that change the logits."""
    config = getattr(causal, "config", None)
    for name in LOGIT_SETTINGS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise GramError(
                f"config.{name}={getattr(config, name)} changes the logits after the head: the blockwise head "
                "does not know it"
            )
    head: Any = causal.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        raise GramError(
            f"the output head is a {type(head).__name__}{'' if getattr(head, 'bias', None) is None else ' with bias'}: "
            "the blockwise head knows nn.Linear without bias; take log-probabilities from model(...).logits instead"
        )
    return head


def hidden_states(model: nn.Module, causal: nn.Module, input_ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """The last hidden states (B, T, H), after the final norm."""
    body = causal.base_model
    if body is causal:
        raise GramError(f"{type(causal).__name__} has no body apart from its head (base_model_prefix)")
    with unmasked(causal, attention_mask_BT):
        output = body(  # type: ignore[operator]
            input_ids=input_ids_BT,
            attention_mask=attention_mask_BT,
            position_ids=position_ids(attention_mask_BT),
            use_cache=False,
        )
    return output[0]


def check_plain_head(model: nn.Module, causal: nn.Module, head: nn.Linear) -> None:
    """Make sure, once per model, that its logits are the head's product of the hidden states: a transform that nobody
    listed is refused here."""
    if model in _checked_models:
        return
    training = [module for module in causal.modules() if module.training]
    ids = torch.arange(3, device=head.weight.device)[None]
    try:
        for module in training:
            module.training = False
        with torch.no_grad(), aside(causal):
            logits = causal(input_ids=ids, use_cache=False).logits.double()  # type: ignore[operator]
            ours = nn.functional.linear(hidden_states(model, causal, ids, torch.ones_like(ids)), head.weight).double()
    finally:
        for module in training:
            module.training = True
    miss, scale = float((logits - ours).abs().max()), float(ours.abs().max())
    if not miss <= 8 * torch.finfo(head.weight.dtype).eps * scale:
        raise GramError(
            f"{type(causal).__name__} changes its logits after the head (by {miss:.3g} of {scale:.3g}): not known here"
        )
    _checked_models.add(model)


def head_log_probs(
    hidden_BNH: Tensor, head: nn.Linear, targets_BN: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """(B, N) log-probabilities of the targets, and entropies (zeros unless asked for)."""
    recorder = recorder_of(head) if torch.is_grad_enabled() else None
    if recorder is not None:
        recorder.begin(hidden_BNH.shape[0])
    return HeadLogProbs.apply(hidden_BNH, head.weight, targets_BN, temperature, with_entropy, recorder)


def vocabulary_blocks(V: int, tokens: int, dtype: torch.dtype, device: torch.device) -> list[tuple[int, int]]:
    """The (begin, end) of each block of the vocabulary: logits of at most LOGIT_BYTES, COLUMNS at least."""
    limit = LOGIT_BYTES.get(device.type, LOGIT_BYTES["cpu"])
    step = max(1, limit // max(1, tokens * accumulation_dtype(dtype).itemsize) // COLUMNS) * COLUMNS
    return [(low, min(V, low + step)) for low in range(0, V, step)]


def block_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Logits / temperature, the product in the model's dtype and the rest in the accumulation dtype."""
    logits = (hidden @ weight.T).to(accumulation_dtype(hidden.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


class HeadLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies as the module's text says. Keeps hidden states, targets and log-sum-exp; the
    entropy has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BNH: Tensor,
        weight_VH: Tensor,
        targets_BN: Tensor,
        temperature: float,
        with_entropy: bool,
        recorder: LinearRecorder | None,
    ) -> tuple[Tensor, Tensor]:
        hidden, targets = hidden_BNH.flatten(0, 1), targets_BN.reshape(-1)
        dtype = accumulation_dtype(hidden.dtype)
        lse = torch.full(targets.shape, -torch.inf, dtype=dtype, device=hidden.device)
        chosen, mean = torch.zeros_like(lse), torch.zeros_like(lse)
        for low, high in vocabulary_blocks(weight_VH.shape[0], hidden.shape[0], hidden.dtype, hidden.device):
            logits = block_logits(hidden, weight_VH[low:high], temperature)
            inside, column = _targets_in_block(targets, low, high)
            chosen = torch.where(inside, logits.gather(1, column).squeeze(1), chosen)
            block_lse = logits.logsumexp(1)
            total = torch.logaddexp(lse, block_lse)
            if with_entropy:  # mean logit under the softmax so far, then H = lse - mean
                block_mean = torch.linalg.vecdot(torch.softmax(logits, 1), logits)
                mean = torch.exp(lse - total) * mean + torch.exp(block_lse - total) * block_mean
            lse = total
        ctx.save_for_backward(hidden_BNH, weight_VH, targets_BN, lse)
        ctx.temperature, ctx.recorder = temperature, recorder
        entropy_BN = (lse - mean).view_as(targets_BN) if with_entropy else torch.zeros_like(lse).view_as(targets_BN)
        ctx.mark_non_differentiable(entropy_BN)
        return (chosen - lse).view_as(targets_BN), entropy_BN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BN: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BNH, weight_VH, targets_BN, lse = ctx.saved_tensors
        recorder: LinearRecorder | None = ctx.recorder
        if recorder is not None:
            recorder.begin_backward()
        logit_grads = _LogitGradients(hidden_BNH, weight_VH, targets_BN, lse, g_BN, ctx.temperature)
        B, N, H = hidden_BNH.shape
        hidden = hidden_BNH.flatten(0, 1)
        grad_hidden = torch.zeros(B * N, H, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        sums = None if recorder is None else recorder.sums(N, whole=False)
        plain = torch.empty_like(weight_VH) if recorder is None and ctx.needs_input_grad[1] else None
        for low, high in vocabulary_blocks(weight_VH.shape[0], B * N, hidden.dtype, hidden.device):
            d = logit_grads.block(low, high)
            if hidden.dtype == grad_hidden.dtype:
                grad_hidden.addmm_(d, weight_VH[low:high])
            else:
                grad_hidden += wide_mm(d, weight_VH[low:high])
            if sums is not None:
                sums.add(d.view(B, N, high - low), hidden_BNH, low)
            elif plain is not None:
                torch.mm(d.T, hidden, out=plain[low:high])
        gh = grad_hidden.to(hidden.dtype).view_as(hidden_BNH)
        if recorder is None or sums is None:
            return gh, plain, None, None, None, None
        if recorder.link is not None:
            recorder.link.offer(logit_grads.columns(recorder.link), hidden_BNH, sums.grad)
        part = sums.partial()
        if recorder.store is not None:  # T x V output gradients are not kept for a large group, but formed again
            again = functools.partial(head_partial, weight_VH, ctx.temperature)
            recorder.store.add(recorder, part, (hidden_BNH, targets_BN, lse.view_as(targets_BN), g_BN), again)
        return gh, recorder.keep(sums.grad, part), None, None, None, None


def head_partial(
    weight_VH: Tensor,
    temperature: float,
    recorder: LinearRecorder,
    hidden_BNH: Tensor,
    targets_BN: Tensor,
    lse_BN: Tensor,
    g_BN: Tensor,
) -> Partial:
    """The head weight's part of the Gram, from what the forward kept and the gradient g of its output.

    It serves all rows of a large group together, when their backwards are over. Padding has hidden states and g of 0.
    """
    logit_grads = _LogitGradients(hidden_BNH, weight_VH, targets_BN, lse_BN, g_BN, temperature)
    B, N, _ = hidden_BNH.shape
    sums = recorder.sums(N, whole=False)
    for low, high in vocabulary_blocks(weight_VH.shape[0], B * N, hidden_BNH.dtype, hidden_BNH.device):
        sums.add(logit_grads.block(low, high).view(B, N, high - low), hidden_BNH, low)
    if recorder.link is not None:
        recorder.link.offer(logit_grads.columns(recorder.link), hidden_BNH, sums.grad)
    return sums.partial()


def _targets_in_block(targets: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """(tokens,): whether a target lies in low .. high; (tokens, 1): its column there, some column where it does not."""
    inside = (targets >= low) & (targets < high)
    return inside, (targets - low).clamp(0, high - low - 1)[:, None]


class _LogitGradients:
    """Gradients of the logits, formed again from the log-sum-exp wherever they are needed."""

    def __init__(
        self, hidden_BNH: Tensor, weight_VH: Tensor, targets_BN: Tensor, lse: Tensor, g_BN: Tensor, temperature: float
    ) -> None:
        self.hidden_BNH, self.weight_VH, self.targets_BN = hidden_BNH, weight_VH, targets_BN
        self.lse = lse.view(-1, 1)
        self.g = (g_BN.to(lse.dtype) / temperature).reshape(-1, 1)
        self.temperature = temperature

    def block(self, low: int, high: int) -> Tensor:
        """(B N, high - low) in the model's dtype."""
        logits = block_logits(self.hidden_BNH.flatten(0, 1), self.weight_VH[low:high], self.temperature)
        d = logits.sub_(self.lse).exp_().mul_(-self.g)
        inside, column = _targets_in_block(self.targets_BN.reshape(-1), low, high)
        d.scatter_add_(1, column, torch.where(inside[:, None], self.g, 0))
        return d.to(self.hidden_BNH.dtype)

    def columns(self, link: Any) -> Any:
        """A function for the tied cross term: (R, N, u) gradients at a unit's unique ids low .. high."""
        B, N, _ = self.hidden_BNH.shape

        def of(unit: int, low: int, high: int) -> Tensor:
            rows = link.layout.units[unit]
            ids = link.unit_ids[unit].ids_U[low:high]
            hidden = self.hidden_BNH[rows]
            logits = block_logits(hidden.flatten(0, 1), self.weight_VH[ids], self.temperature).view(
                *hidden.shape[:2], -1
            )
            lse, g = self.lse.view(B, N, 1)[rows], self.g.view(B, N, 1)[rows]
            hit = self.targets_BN[rows][..., None] == ids
            return (hit.to(lse.dtype) - logits.sub_(lse).exp_()).mul_(g).to(self.hidden_BNH.dtype)

        return of
