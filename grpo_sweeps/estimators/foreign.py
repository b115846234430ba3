"""An estimator of a user's own, written for numpy or for torch, called with numpy arrays.

A function whose first parameter is annotated as a numpy array (`np.ndarray`, `NDArray`, `ArrayLike`) is given arrays;
any other is given float64 tensors on the CPU, and what it returns is made an array again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_type_hints

LENGTHS = "lengths_GR"  # an estimator with a parameter of this name is given the completions' lengths
NUMPY = ("numpy", "np.", "ndarray", "NDArray", "ArrayLike")


def takes_lengths(function: Callable[..., Any]) -> bool:
    """Does the function have a parameter `lengths_GR`? A built-in one does not say, and has none."""
    try:
        return LENGTHS in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def takes_arrays(function: Callable[..., Any]) -> bool:
    """Is the first parameter annotated as a numpy array?"""
    function = getattr(function, "func", function)  # what a partial binds
    try:
        first = next(iter(inspect.signature(function).parameters.values()))
    except (TypeError, ValueError, StopIteration):
        return False
    try:
        annotation: Any = get_type_hints(function).get(first.name, first.annotation)
    except Exception:  # names that only a type checker imports: the annotation as it is written says enough
        annotation = first.annotation
    return any(word in str(annotation) for word in NUMPY)


def on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one of numpy arrays, whatever it was written for. What is neither a tensor nor an array comes
    back as it is, to be refused where it is used."""
    if takes_arrays(function):
        return function
    import torch

    @wraps(getattr(function, "func", function), updated=())
    def called(*arrays: Any, **keywords: Any) -> Any:
        given = {name: torch.from_numpy(value) if name == LENGTHS else value for name, value in keywords.items()}
        found = function(*(torch.from_numpy(array) for array in arrays), **given)
        # numpy has no bfloat16; float64 holds every value of the narrower types
        return found.detach().cpu().double().numpy() if isinstance(found, torch.Tensor) else found

    return called
