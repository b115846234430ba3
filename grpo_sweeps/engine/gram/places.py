"""Where a model holds its parameters. Every block begins by making sure that nothing has changed there, and the card
waits meanwhile: what can be compared with what was seen before is not looked at again."""

from __future__ import annotations

from torch import nn

from grpo_sweeps.engine.gram.claims import plain_name, refuse_couplings
from grpo_sweeps.engine.gram.layout import GramError


class Places:
    """The modules and parameters of one model; `claimed` are the names of those that train."""

    def __init__(self, model: nn.Module, claimed: set[str]) -> None:
        self.model = model
        names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        self._places = [  # a shared parameter has its first name
            (names[id(parameter)], parameter, module, attribute)
            for module in model.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.parameters = [parameter for _, parameter, _, _ in self._places]
        self._trains = [name in claimed for name, _, _, _ in self._places]
        self._claimed = [parameter for name, parameter, _, _ in self._places if name in claimed]
        self.device = self._claimed[0].device
        self._tree: list[tuple[nn.Module, tuple[nn.Module | None, ...]]] = []
        self.modules: list[nn.Module] = []
        self.wrapped = False  # by torch.compile, as a module around another
        self._seen: list[int] = []  # identities of what every module holds, module by module
        self.look()

    def look(self) -> None:
        """Bring `modules` up to date. Raises GramError where a parameter was frozen, unfrozen, replaced or moved, or
        the model gained or lost some; modules that torch.compile put around others are no change."""
        if not self._tree or any(tuple(module._modules.values()) != children for module, children in self._tree):
            self.modules = every_module(self.model)
            self._tree = [(module, tuple(module._modules.values())) for module in self.modules]
            refuse_couplings(self.model)
            self.wrapped = any(type(module).__name__ == "OptimizedModule" for module in self.modules)
        seen = [id(parameter) for module in self.modules for parameter in module._parameters.values()]
        trains = [parameter.requires_grad for parameter in self.parameters]
        moved = any(parameter.device != self.device for parameter in self._claimed)
        if seen != self._seen or trains != self._trains or moved:
            self._look_closely()
            self._seen = seen

    def _look_closely(self) -> None:
        reached = set(self.modules)
        for trained, (name, parameter, owner, attribute) in zip(self._trains, self._places, strict=True):
            trains = parameter.requires_grad
            there = owner in reached and owner._parameters.get(attribute) is parameter
            if trains != trained or not there:
                raise GramError(
                    f"parameter {name} was frozen, unfrozen or replaced since GradientGram was made: make a new one"
                )
            if trains and parameter.device != self.device:
                raise GramError(
                    f"parameter {name} moved to {parameter.device} since GradientGram was made: make a new one"
                )
        found = sum(p is not None for module in self.modules for p in module._parameters.values())
        if found != len(self._places):
            raise GramError("the model gained or lost parameters since GradientGram was made: make a new one")


def every_module(model: nn.Module) -> list[nn.Module]:
    """`model.modules()` in another order, in a tenth of its time."""
    found, seen = [model], {model}
    for module in found:
        fresh = [child for child in module._modules.values() if child is not None and child not in seen]
        seen.update(fresh)
        found.extend(dict.fromkeys(fresh))
    return found
