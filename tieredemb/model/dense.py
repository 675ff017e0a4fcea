"""The dense layers of a model, as a checkpoint has them beside the tables: as torch saves them, and loaded without
running code that a file names (`weights_only`)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tieredemb.errors import CheckpointError, ConfigError
from tieredemb.model.dense_optimizer import DenseOptimizer
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.modules.names import named_modules


class DenseLayers:
    """Those of a `model`: its parameters and persistent buffers that are no tables, and what an `optimizer` keeps of
    them. Raises `ConfigError` for an optimizer that is not of the model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        modules = dict(named_modules(model))
        self._modules = {name: each for name, each in modules.items() if not isinstance(each, LookupModule)}
        self._trains = any(isinstance(each, LookupModule) and each.is_trainable for each in modules.values())
        self._optimizer = None if optimizer is None else DenseOptimizer(optimizer, self._names())

    def to_bytes(self) -> bytes:
        """What is saved of them. Raises `ConfigError` for what could not be loaded."""
        file = io.BytesIO()
        optimizer = None if self._optimizer is None else self._optimizer.state()
        torch.save({"layers": self._state(), "optimizer": optimizer}, file)
        try:
            _loaded(file.getvalue())
        except Exception as error:
            raise ConfigError(
                f"the dense layers hold what cannot be loaded again without running code ({error}); pass dense=False, "
                f"and save them yourself"
            ) from error
        return file.getvalue()

    def taking(self, data: bytes | None) -> Callable[[], None]:
        """What loads the layers of `data`. Raises `CheckpointError`, before anything changes, where they are not those
        of this model."""
        if data is None:
            raise CheckpointError(
                "the checkpoint has no dense layers, as it was saved with dense=False; pass dense=False. Nothing was "
                "changed"
            )
        try:
            found = _loaded(data)
            layers, saved = dict(found["layers"]), found["optimizer"]
        except Exception as error:
            raise CheckpointError(
                f"the file of dense layers holds what no save writes: {error}; use another checkpoint. Nothing was "
                f"changed"
            ) from error
        self._check(layers)
        options = None if self._optimizer is None else self._optimizer.state_dict_of(saved)

        def take() -> None:
            for path, module in self._modules.items():
                module._load_from_state_dict(layers, _prefix(path), {}, False, [], [], [])
            if self._optimizer is not None and options is not None:
                self._optimizer.load(options)
            elif saved is not None and self._trains:
                warnings.warn(
                    "the checkpoint has what a torch optimizer keeps of the dense layers, which was not loaded: pass "
                    "optimizer= to go on as before the save",
                    stacklevel=4,
                )

        return take

    def _names(self) -> dict[int, str]:
        """The names of the parameters, by their identity."""
        return {
            id(param): f"{_prefix(path)}{name}"
            for path, module in self._modules.items()
            for name, param in module._parameters.items()
            if param is not None
        }

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for path, module in self._modules.items():
            module._save_to_state_dict(state, _prefix(path), False)
        for name, value in state.items():
            if hasattr(value, "to_local"):
                raise ConfigError(
                    f"{name!r} is sharded over several processes; pass dense=False, and save the dense layers by "
                    f"torch.distributed.checkpoint"
                )
        return state

    def _check(self, layers: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` where names or shapes are not those of the model."""
        own = self._state()
        differ = [
            f"{what} {sorted(names)}"
            for what, names in (
                ("the checkpoint lacks", own.keys() - layers.keys()),
                ("this model lacks", layers.keys() - own.keys()),
            )
            if names
        ]
        differ += [
            f"{name!r} has the shape {tuple(layers[name].shape)} in the checkpoint and {tuple(value.shape)} in this "
            f"model"
            for name, value in own.items()
            if isinstance(layers.get(name), torch.Tensor) and value.shape != layers[name].shape
        ]
        if differ:
            raise CheckpointError(
                f"the checkpoint has the dense layers of another model: {'; '.join(differ[:3])}. Nothing was changed; "
                f"dense=False loads the tables alone"
            )


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
