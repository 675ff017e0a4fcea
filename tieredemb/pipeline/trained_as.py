"""Whether modules train as they did when a step was captured: asked of all as one, in a fraction of the time that each
of many tables takes, as each replay asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tieredemb.modules.base import TieredModule
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.tables.stand_in import StandIn


class TrainedAs:
    """What `modules` did when it was made."""

    def __init__(self, modules: Sequence[LookupModule]) -> None:
        self._modules = [(module, module.is_trainable) for module in modules]
        self._look()

    def _look(self) -> None:
        """What tells that all is as it is, of those that follow a torch optimizer: their stand-ins, where these are
        among the parameters, and whether they want gradients."""
        self._stand_ins: list[tuple[dict[str, Any], str, StandIn, bool]] = []
        self._others = []
        for module, trains in self._modules:
            if isinstance(module, TieredModule) and module.stand_ins:
                parameters: dict[str, Any] = module._parameters
                self._stand_ins += [
                    (parameters, name, each, each.requires_grad) for name, each in module.stand_ins.items()
                ]
            else:
                self._others.append((module, trains))

    def is_still_so(self) -> bool:
        """Whether they do now. Raises what a forward would raise of one that was written to."""
        for parameters, name, each, wanted in self._stand_ins:
            if parameters.get(name) is not each or each.requires_grad is not wanted:
                return self._ask()
            if each._version != each.unwritten or each.is_copy:
                return self._ask()
        return all(module.is_trainable is trains for module, trains in self._others)

    def _ask(self) -> bool:
        """Each by itself."""
        if any(module.is_trainable is not trains for module, trains in self._modules):
            return False
        self._look()
        return True
