"""What the tables of a model are called in messages and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tieredemb.modules.lookup_module import LookupModule
from tieredemb.modules.one_table import OneTable

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def table_name(path: str, module: LookupModule, table: str) -> str:
    """The name of a `table` of the module at `path`: "user.weight", "tables.item"."""
    return ".".join(part for part in (path, "weight" if isinstance(module, OneTable) else table) if part)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`, each module once, under the names that it has without `torch.compile`,
    `DataParallel` and `DistributedDataParallel` around it or around others."""
    yield from _named(model, "", set())


def _named(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    is_wrapper = isinstance(module, _PARALLEL) or "_orig_mod" in module._modules  # as torch.compile calls it
    if not is_wrapper:
        yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named(child, path if is_wrapper else ".".join(filter(None, (path, name))), seen)
