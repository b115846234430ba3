"""Once before step 0: the measured block against ordinary autograd, parameter by parameter.

A parameter that nobody claimed, or that is read around its module, is invisible to the run-time check of w'Kw: both
of its sides miss it. Ordinary autograd does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram.claims import plain_name
from grpo_sweeps.engine.gram.gram import GradientGram, uncompiled
from grpo_sweeps.engine.gram.measurement import GramCheckError, Measurement
from grpo_sweeps.engine.gram.precision import widest_eps

# relative to sum_i |w_i| ||psi_i||: two orders of summation of the same products
GRADIENT_TOL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
SAFETY = 4.0  # the rows that are compared are a sample of those to come


def measured_floor(model: nn.Module, row_sums_of: Callable[[nn.Module], Tensor], group_sizes: Sequence[int]) -> float:
    """Error of K_ij relative to sqrt(K_ii K_jj), against a copy of the model in the next wider dtype, times SAFETY.

    row_sums_of: the forward of a model, (rows,). The largest error within the groups counts. The copy takes its
    room for the time of one forward and backward. A model in float64 has no wider copy: 0. `.grad` is left as it was.
    """
    dtype = widest_eps(model.parameters())
    if dtype not in WIDER:
        return 0.0
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [parameter.grad for parameter in parameters]
    worst = 0.0
    try:
        for parameter in parameters:
            parameter.grad = None
        own = _grams(model, row_sums_of, group_sizes)
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
    wide = _grams(copy.deepcopy(model).to(WIDER[dtype]), row_sums_of, group_sizes)
    for found, exact in zip(own, wide, strict=True):
        norms = exact.diagonal().clamp_min(0).sqrt()
        scale = torch.outer(norms, norms)
        worst = max(worst, float(((found - exact).abs() / scale.clamp_min(torch.finfo(scale.dtype).tiny)).max()))
    return SAFETY * worst


def _grams(model: nn.Module, row_sums_of: Callable[[nn.Module], Tensor], group_sizes: Sequence[int]) -> list[Tensor]:
    with GradientGram(model).measure(group_sizes) as m:
        row_sums_of(model).sum().backward()
    return m.matrices()


@dataclass(frozen=True)
class Verification:
    """Largest relative misses over the parameters: of the gradient itself, and of its squared norm by the Gram."""

    gradient: float
    norm: float


def verify_against_autograd(
    model: nn.Module,
    gram: GradientGram,
    row_sums_fn: Callable[[], Tensor],
    group_sizes: Sequence[int],
    weights: Sequence[float] | Tensor | None = None,
) -> Verification:
    """Compare a measured block with ordinary autograd on the same rows; `.grad` is left as it was.

    row_sums_fn: the forward, returning (rows,). It runs twice from the same random state, and uncompiled, since
    compiled code may round otherwise. Raises GramCheckError, naming the parameter, when the patched forward is not the
    plain one bit for bit, when a parameter's gradient differs, or when its Gram does not give its squared norm.
    """
    trainable = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    names, parameters = zip(*trainable, strict=True)
    kept = [parameter.grad for parameter in parameters]
    devices = [gram.device] if gram.device.type == "cuda" else []
    try:
        with uncompiled(gram.places):
            with torch.random.fork_rng(devices=devices):
                plain_sums, plain = _plain_gradients(row_sums_fn, parameters, weights)
            for parameter in parameters:
                parameter.grad = None
            with gram.measure(group_sizes, weights, cross_groups=True) as m:
                row_sums = row_sums_fn()
                row_sums.sum().backward()
        if not torch.equal(row_sums.detach(), plain_sums):
            worst = float((row_sums.detach() - plain_sums).abs().max())
            raise GramCheckError(
                f"the measured forward differs from the plain one, by up to {worst:.3g} in a row's sum"
            )
        misses = [
            _compare(name, parameter, grad, m) for name, parameter, grad in zip(names, parameters, plain, strict=True)
        ]
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
    return Verification(max(miss[0] for miss in misses), max(miss[1] for miss in misses))


def _plain_gradients(
    row_sums_fn: Callable[[], Tensor], parameters: tuple[nn.Parameter, ...], weights: Sequence[float] | Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    row_sums = row_sums_fn()
    w = torch.ones_like(row_sums) if weights is None else torch.as_tensor(weights).to(row_sums)
    grads = torch.autograd.grad((row_sums * w).sum(), parameters, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    return row_sums.detach(), filled


def _compare(name: str, parameter: nn.Parameter, plain: Tensor, m: Measurement) -> tuple[float, float]:
    """(gradient miss, norm miss) of one parameter, relative to s = sum_i |w_i| ||psi_i|| and s^2."""
    w = m.layout.weights_B.cpu()
    gram = m.parameter_matrix(name)
    scale = float(w.abs() @ gram.diagonal().clamp_min(0).sqrt())
    measured = torch.zeros_like(plain) if parameter.grad is None else parameter.grad
    plain_norm = float(torch.linalg.vector_norm(plain, dtype=torch.float64))
    gradient = float(torch.linalg.vector_norm(measured.double() - plain.double()))
    norm = abs(float(w @ gram @ w) - plain_norm**2)
    tol = GRADIENT_TOL[parameter.dtype]
    if not gradient <= tol * scale:
        raise GramCheckError(
            f"parameter {name}: the measured gradient has norm {float(measured.double().norm()):.9g}, ordinary "
            "autograd's "
            f"{plain_norm:.9g}, and they differ by {gradient:.3g}, allowed are {tol * scale:.3g}"
        )
    if not norm <= 2 * tol * scale**2:
        raise GramCheckError(
            f"parameter {name}: w'Kw = {float(w @ gram @ w):.9g} but ordinary autograd's gradient has squared "
            f"norm {plain_norm**2:.9g}"
        )
    return (gradient / scale if scale else gradient, norm / scale**2 if scale else norm)
