"""A CUDA graph's semantics on a CPU: operators are recorded once and repeated without Python.

Tensors that were there before keep their place; what was made while recording is made again. Reading a value on the
host while recording is an error, as it is for a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

HOST_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}


@dataclass(frozen=True)
class Made:
    """Stands for the tensor of that number among those made while recording."""

    number: int


class HostRead(RuntimeError):
    """The step looked at a value while it was recorded."""


class Tape(TorchDispatchMode):
    """Records every operator that is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[int | None]]] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no two tensors have one id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            raise HostRead(f"{func} reads a value on the host")
        given = {id(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        recorded = tree_map(self._recorded, (args, kwargs))
        out = func(*args, **kwargs)
        places = [self._place(x, given) for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        self.calls.append((func, *recorded, places))
        return out

    def _recorded(self, x: Any) -> Any:
        """What stands for an argument: where it lies in memory now, whatever becomes of the tensor later."""
        if not isinstance(x, Tensor):
            return x
        return Made(self.numbers[id(x)]) if id(x) in self.numbers else x.detach()

    def _place(self, x: Tensor, given: set[int]) -> int | None:
        if id(x) not in self.numbers:
            if id(x) in given:  # written in place
                return None
            self.numbers[id(x)] = len(self.alive)
            self.alive.append(x)
        return self.numbers[id(x)]

    def replay(self, wanted: Tensor) -> Tensor:
        """Call everything again; what stands where `wanted` stood."""
        made: dict[int, Tensor] = {}

        def tensor(x: Any) -> Any:
            return made[x.number] if isinstance(x, Made) else x

        for func, args, kwargs, places in self.calls:
            args, kwargs = tree_map(tensor, (args, kwargs), is_leaf=lambda x: isinstance(x, Made))
            outs = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, Tensor)]
            made.update({place: x for place, x in zip(places, outs, strict=True) if place is not None})
        return made[self.numbers[id(wanted)]]


def tape(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The recorder of a `GraphSampler` on a CPU."""
    recording = Tape()
    with recording:
        out = step()
    return lambda: recording.replay(out)
