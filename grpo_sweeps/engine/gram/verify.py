"""The measured block against ordinary autograd, parameter by parameter, and against separate backwards, row by row.

A parameter that nobody claimed, or that is read around its module, is invisible to the run-time check of w'Kw: both
of its sides miss it. Ordinary autograd does not. `measured_floor` says how exactly K is the Gram of the gradients that
were applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram.gram import GradientGram, uncompiled
from grpo_sweeps.engine.gram.layout import GramError, unit_inner
from grpo_sweeps.engine.gram.measurement import GramCheckError, Measurement, widest_eps
from grpo_sweeps.engine.gram.uses import plain_name

# By the dtype that the model computes in, which for adapters is not their own; relative to sum_i |w_i| ||psi_i||: two
# orders of summation of the same products, and in float16 what is too small to be halved exactly.
GRADIENT_TOL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# The rows that are compared are a sample of those to come. Seen: the worst entry of other rows in groups of 8 up to 9
# times that of four verified ones (bfloat16 and float32, small Llama and Qwen2 models).
SAFETY = 10.0
# Rows weighted alike hide that rows interact, or that they changed places; weights over many decades hide the small
# ones below the tolerance. Powers of two commute with rounding, so that weights before the backward (autograd) and
# after it (the Gram) differ by nothing else.
SIZES = (1.0, -0.5, 4.0, -2.0, 0.5, -4.0, 2.0, -1.0)


@functools.cache
def default_weights(rows: int) -> tuple[float, ...]:
    """Weights +-1/2, +-1, +-2, +-4 in a fixed order without a period: each eight rows have all of them, in an order of
    their own, so that no shift of the rows and no exchange of two groups leaves the weighted sum as it was.

    >>> default_weights(4)
    (1.0, -0.5, 4.0, -2.0)
    """
    weights, draw = [np.array(SIZES)], np.random.Generator(np.random.Philox(0))
    while len(weights) * len(SIZES) < rows:
        order = draw.permutation(SIZES)
        if not (order == weights[-1]).any():
            weights.append(order)
    return tuple(np.concatenate(weights)[:rows].tolist())


def measured_floor(
    model: nn.Module, gram: GradientGram, row_sums_fn: Callable[[], Tensor], group_sizes: Sequence[int]
) -> float:
    """The error of K_ij against the rows' gradients by separate backwards, relative to sqrt(K_ii K_jj), times SAFETY.

    K is the Gram of the gradients that are applied, in the dtype that the model trains in. It differs from the products
    of the rows that ordinary autograd gives, one backward per row from one forward, by the rounding of its sums. How
    far such gradients are from those of a wider dtype is another question (`loop.verification`).

    row_sums_fn: the forward, returning (rows,); few rows, since all their gradients are held at once. `.grad` is left
    as it was. Raises GramCheckError with both numbers where an entry misses by more than GRADIENT_TOL.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with uncompiled(gram.model.modules()):
        exact = _gram_of_separate_rows(_one_per_row(row_sums_fn(), sum(group_sizes)), parameters)
        with set_aside(parameters), gram.measure(group_sizes, cross_groups=True) as m:
            row_sums_fn().sum().backward()
    found, norms = m.matrix(), exact.diagonal().clamp_min(0).sqrt()
    scale = torch.outer(norms, norms).clamp_min(torch.finfo(torch.float64).tiny)
    misses = (found - exact).abs() / scale
    worst, tol = float(misses.max()), GRADIENT_TOL[widest_eps(gram.model.parameters())]
    if not worst <= tol:
        i, j = divmod(int(torch.nan_to_num(misses, nan=torch.inf).argmax()), len(found))
        raise GramCheckError(
            f"K[{i}, {j}] = {float(found[i, j]):.9g} but separate backwards give {float(exact[i, j]):.9g}: they differ "
            f"by {worst:.3g} of sqrt(K_ii K_jj), allowed are {tol:.1g}"
        )
    return SAFETY * worst


def _one_per_row(row_sums: Tensor, rows: int) -> Tensor:
    """row_sums unchanged. Raises GramError where it is not one differentiable scalar per row."""
    if row_sums.shape != (rows,) or not row_sums.requires_grad:
        state = "" if row_sums.requires_grad else ", without a gradient"
        raise GramError(
            f"row_sums_fn gave shape {tuple(row_sums.shape)}{state}: group_sizes make {rows} rows, and one "
            "differentiable scalar per row is needed"
        )
    return row_sums


def _gram_of_separate_rows(row_sums: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """(rows, rows) float64 on the CPU: inner products of the rows' gradients, one backward per row."""
    rows = [
        torch.autograd.grad(row, parameters, retain_graph=index < len(row_sums) - 1, allow_unused=True)
        for index, row in enumerate(row_sums.unbind())
    ]
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for index, parameter in enumerate(parameters):
        grads = [torch.zeros_like(parameter) if row[index] is None else row[index] for row in rows]
        stacked = torch.stack(grads)  # type: ignore[arg-type]
        total += unit_inner(*[stacked.view(len(rows), len(parameter) if parameter.dim() > 1 else 1, -1)] * 2).cpu()
    return total


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within it `.grad` is empty. Afterwards it is what it was."""
    kept = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad


@dataclass(frozen=True)
class Verification:
    """The largest relative misses over the parameters: of the gradient, and of its squared norm by the Gram."""

    gradient: float
    norm: float


def verify_against_autograd(
    model: nn.Module,
    gram: GradientGram,
    row_sums_fn: Callable[[], Tensor],
    group_sizes: Sequence[int],
    weights: Sequence[float] | Tensor | None = None,
) -> Verification:
    """The misses of a measured block against ordinary autograd on the same rows. `.grad` is left as it was.

    row_sums_fn: the forward, returning (rows,). It runs twice from the same random state, and uncompiled, since
    compiled code may round otherwise. weights: one per row, by default `default_weights`, which tell a row from
    the others of its eight and every shift of the rows and exchange of groups from what it was: rows that interact or
    changed places pass with equal weights. (Two rows of one weight in each other's place pass here too, and are seen
    by `measured_floor`.) Raises GramCheckError, naming the parameter, when the patched forward is not the plain one bit
    for bit, when a parameter's gradient differs, or when its Gram does not give its squared norm.
    """
    trainable = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    names, parameters = zip(*trainable, strict=True)
    weights = default_weights(sum(group_sizes)) if weights is None else weights
    devices = [gram.device] if gram.device.type == "cuda" else []
    with set_aside(parameters):
        with uncompiled(gram.model.modules()):
            with torch.random.fork_rng(devices=devices):
                plain_sums, plain = _plain_gradients(row_sums_fn, parameters, weights)
            for parameter in parameters:  # what the forward itself may have left
                parameter.grad = None
            with gram.measure(group_sizes, weights, cross_groups=True) as m:
                row_sums = row_sums_fn()
                row_sums.sum().backward()
        if not torch.equal(row_sums.detach(), plain_sums):
            worst = float((row_sums.detach() - plain_sums).abs().max())
            raise GramCheckError(
                f"the measured forward differs from the plain one, by up to {worst:.3g} in a row's sum"
            )
        tol = GRADIENT_TOL[widest_eps(gram.model.parameters())]
        misses = [
            _compare(name, parameter, grad, m, tol)
            for name, parameter, grad in zip(names, parameters, plain, strict=True)
        ]
    return Verification(max(miss[0] for miss in misses), max(miss[1] for miss in misses))


def _plain_gradients(
    row_sums_fn: Callable[[], Tensor], parameters: tuple[nn.Parameter, ...], weights: Sequence[float] | Tensor
) -> tuple[Tensor, list[Tensor]]:
    row_sums = _one_per_row(row_sums_fn(), len(weights))
    w = torch.as_tensor(weights).to(row_sums)
    grads = torch.autograd.grad((row_sums * w).sum(), parameters, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    return row_sums.detach(), filled


def _compare(name: str, parameter: nn.Parameter, plain: Tensor, m: Measurement, tol: float) -> tuple[float, float]:
    """(gradient miss, norm miss) of one parameter, relative to s = sum_i |w_i| ||psi_i|| and s^2."""
    w = m.layout.weights_B.cpu()
    gram = m.parameter_matrix(name)
    scale = float(w.abs() @ gram.diagonal().clamp_min(0).sqrt())
    measured = torch.zeros_like(plain) if parameter.grad is None else parameter.grad
    plain_norm = float(torch.linalg.vector_norm(plain, dtype=torch.float64))
    gradient = float(torch.linalg.vector_norm(measured.double() - plain.double()))
    norm = abs(float(w @ gram @ w) - plain_norm**2)
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
