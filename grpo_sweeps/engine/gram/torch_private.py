"""Everything private of torch that the package relies on, one small function each, and the trial that finds them
changed.

No other file of the package uses a private name of torch (a test reads the syntax trees). `trial` runs once, when the
first GradientGram is made: it looks up every name and tries what each does, on a few numbers on the CPU.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from grpo_sweeps.engine.gram.layout import GramError

VERSIONS_RUN = ("2.11", "2.13")
"""The lowest and the highest version of torch with which the whole was run: 2.11 on an H200, 2.13 on a CPU."""

NAMES = (
    "_C._current_graph_task_id",
    "_C._will_engine_execute_node",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C.DisableTorchFunctionSubclass",
    "_C._FunctionBase.apply",
    "_foreach_copy_",
    "ops.aten._unsafe_view.default",
    "Tensor._base",
    "Tensor._is_view",
    "Tensor._version",
    "Tensor._backward_hooks",
    "Tensor._post_accumulate_grad_hooks",
    "nn.Module._compiled_call_impl",
    "nn.modules.batchnorm._BatchNorm",
    "utils.checkpoint._StopRecomputationError",
)
"""What must be there, below `torch`. `_C._cuda_getCurrentRawStream` is there in CUDA builds alone."""

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where an nn.Module keeps its hooks. It has no public way to ask whether it has any."""
MODULE_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""What an nn.Module notes about single hooks, by their ids."""
WRAPPED = "_orig_mod"
"""The attribute, and so the part of a parameter's name, under which torch.compile wraps a module."""


class _NeverRaised(Exception):
    """Stands in for an error that torch has no longer: the trial says so."""


StopRecomputation: type[Exception] = getattr(checkpoint, "_StopRecomputationError", _NeverRaised)
"""Raised in the forward when non-reentrant checkpointing has recomputed the last tensor it needs. Nothing public tells
a module that it is the one at which a recomputation ends."""
BatchNorm: type[nn.Module] = getattr(nn.modules.batchnorm, "_BatchNorm", nn.BatchNorm1d)
"""The base of all batch norms. The public classes are many, and a user's own may derive from this one alone."""


def backward_id() -> int:
    """The number of the backward that runs on this thread, -1 outside of one. A forward that is recomputed inside a
    backward looks like any other to the public interface."""
    return torch._C._current_graph_task_id()


def will_run(node: Any) -> bool:
    """Whether the backward that runs now comes to this node. Raises RuntimeError for a leaf whose gradient was asked
    for by autograd.grad or backward(inputs=...). Publicly one learns it when the node has run, which is too late."""
    return torch._C._will_engine_execute_node(node)


def runs_to_its_end(x: Tensor) -> bool:
    """Whether the backward that runs now, and comes to x, goes on to the leaves: not where it was asked for some inputs
    alone."""
    stack: list[Any] = [torch.autograd.graph.get_gradient_edge(x).node]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node).__name__ == "AccumulateGrad":
            try:
                return will_run(node)
            except RuntimeError:  # so torch says of a leaf that was asked for
                return False
        after = [following for following, _ in node.next_functions if following is not None and following not in seen]
        seen.update(after)
        stack += after
    return False


def saved_tensors_stay() -> bool:
    """Whether nobody takes over what autograd saves (checkpointing and offloading do). The public context managers set
    such hooks, and none tells whether some are set."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def direct(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """`function.apply(*args)` without its look for functorch transforms, which cannot be at work inside a measured
    block: the look costs the host more than a small node does."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc,no-any-return]


def torch_functions_off() -> AbstractContextManager[Any]:
    """Within it, tensor subclasses are plain tensors. The public `super().__torch_function__` does the same but makes
    the result a subclass again."""
    return torch._C.DisableTorchFunctionSubclass()


def unviewed(y: Tensor) -> Tensor:
    """y in the same memory, as a tensor that autograd does not take for a view: it may be changed in place without
    leaving the node that made it. Public ways to get one copy the memory."""
    return torch.ops.aten._unsafe_view.default(y, y.shape)


def is_view(y: Tensor) -> bool:
    """Whether autograd takes y for a view of another tensor."""
    return y._is_view()


def base_of(y: Tensor) -> Tensor:
    """The tensor that y is a view of, or y. Its node stays under what is changed in place."""
    return y if y._base is None else y._base


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place. torch's own check of it is for saved tensors alone."""
    return tensor._version


def copy_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy every value into the tensor at its place, by one launch on CUDA instead of one per tensor."""
    torch._foreach_copy_(list(into), list(values))


def gradient_hooks(parameter: Tensor) -> bool:
    """Whether a hook wants to see the parameter's gradient. The public interface registers and removes hooks, and does
    not list them."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def module_hooks(module: nn.Module) -> bool:
    """Whether the module has a hook of any kind."""
    return any(module.__dict__.get(hooks) for hooks in MODULE_HOOKS)


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The dict in which the module itself keeps its parameters, None for those it does without.

    A plain tensor that is put there is what the module's forward works on; setattr refuses one, and
    torch.func.functional_call would call the module, hooks included, and not its forward.
    """
    return module._parameters


def compiled_code(modules: Iterable[nn.Module]) -> bool:
    """Whether torch.compile compiled one of the modules, or anything else in this process. Where torch no longer tells
    what Dynamo has compiled, the answer is yes, which is safe and slower."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # transformers loads it, compiled or not
    if eval_frame is None:
        return False
    backends = getattr(eval_frame, "cached_backends", {"unknown": "torch has changed"})
    return any(backend is not None for backend in backends.values()) or any(
        type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None
        for module in modules
    )


def recompilations(limit: int) -> AbstractContextManager[None]:
    """Inside, Dynamo compiles a function for so many different calls before it leaves it uncompiled, which it does
    without a word. The limit is in no public part of torch."""
    return torch._dynamo.config.patch(recompile_limit=limit)  # type: ignore[no-any-return]


def raw_stream(device: torch.device) -> int:
    """The current CUDA stream as the driver knows it. torch.cuda.current_stream makes an object of it, which costs
    more than the rest of a launch."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def set_allocator(settings: str) -> bool:
    """Set up the GPU's allocator in words of PYTORCH_ALLOC_CONF; False where this torch cannot. The variable itself is
    read when torch is imported, and nothing public sets it up later."""
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        return False
    setter(settings)
    return True


@functools.cache
def trial() -> None:
    """Raises GramError, once per process, where a private name is not there or does not do what it did."""
    for name in NAMES:
        try:
            operator.attrgetter(name)(torch)
        except AttributeError:
            raise _changed(f"torch.{name} is not there") from None
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        for function, holds in TRIALS.items():
            try:
                good = holds()
            except Exception as error:  # whatever a changed torch may raise
                raise _changed(f"torch_private.{function} fails ({type(error).__name__}: {error})") from error
            if not good:
                raise _changed(f"torch_private.{function} does not do what it did")


def _changed(what: str) -> GramError:
    low, high = VERSIONS_RUN
    return GramError(
        f"torch {torch.__version__}: {what}, on which the Gram relies; it was run with torch {low} to {high}: install "
        "one of these, or train without the Gram (analysis.every=0)"
    )


class _Probe(torch.autograd.Function):
    """x + y. Its backward notes what the backward that runs tells of itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, seen: list[Any]) -> Tensor:
        ctx.seen, ctx.x = seen, x
        return x + y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_y = (node for node, _ in ctx.next_functions[:2])
        ctx.seen += [backward_id() >= 0, will_run(of_x), will_run(of_y), runs_to_its_end(ctx.x)]
        return g, g, None


def _backwards_tell_of_themselves() -> bool:
    x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    whole: list[Any] = []
    part: list[Any] = []
    direct(_Probe, x * 2, y * 2, whole).sum().backward()
    torch.autograd.grad(direct(_Probe, x * 2, y * 2, part).sum(), [x])
    return backward_id() == -1 and whole == [True, True, True, True] and part == [True, True, False, False]


def _saved_tensors_are_watched() -> bool:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        within = saved_tensors_stay()
    return not within  # without these hooks the caller may have set some


def _views_are_told() -> bool:
    base = torch.ones(2, requires_grad=True) * 2
    view, version = base.view(1, 2), version_of(base)
    same = unviewed(view)
    made = is_view(view) and base_of(view) is base and base_of(base) is base
    made = made and not is_view(same) and same.data_ptr() == view.data_ptr()
    copies = [torch.zeros(2)]
    copy_each(copies, [torch.ones(2)])
    base.mul_(2)
    return made and version_of(base) == version + 1 and float(copies[0].sum()) == 2.0


def _hooks_are_told() -> bool:
    module, watched, post = nn.ReLU(), *(nn.Parameter(torch.ones(1)) for _ in range(2))
    before = module_hooks(module) or gradient_hooks(watched) or gradient_hooks(post)
    module.register_forward_pre_hook(lambda *_: None)
    watched.register_hook(lambda g: g)
    post.register_post_accumulate_grad_hook(lambda p: None)
    return not before and module_hooks(module) and gradient_hooks(watched) and gradient_hooks(post)


def _parameters_are_exchanged() -> bool:
    module = nn.ReLU()  # none whose making would draw random numbers
    module.register_parameter("weight", nn.Parameter(torch.ones(1)))
    module.register_parameter("bias", None)
    parameters_of(module)["weight"] = replaced = torch.zeros(1)
    return module.weight is replaced and parameters_of(module)["bias"] is None


class _Plain(Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_functions_off():
            return type(function(*args))


def _subclasses_are_left_out() -> bool:
    return torch.neg(torch.ones(1).as_subclass(_Plain)) is Tensor and issubclass(StopRecomputation, Exception)


TRIALS: dict[str, Callable[[], bool]] = {
    "will_run": _backwards_tell_of_themselves,
    "saved_tensors_stay": _saved_tensors_are_watched,
    "unviewed": _views_are_told,
    "gradient_hooks": _hooks_are_told,
    "parameters_of": _parameters_are_exchanged,
    "torch_functions_off": _subclasses_are_left_out,
}
