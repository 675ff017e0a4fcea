"""`DistributedDataParallel` around a model with tables: excludes these from the average over processes.

It would keep a dense gradient of each parameter, and wait for all of them. It reads what to exclude from the module
that it wraps, which knows nothing of tables in its submodules. So this listens for the assignment of that module: that
is done after its parameters were listed, and before they are used.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tieredemb.step.table_parameter import TableParameter


def _leave_tables_out(parent: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    if name != "module" or wrapped is None or not isinstance(parent, nn.parallel.DistributedDataParallel):
        return
    tables = [key for key, each in wrapped.named_parameters(remove_duplicate=False) if _is_table(each)]
    if not tables:
        return
    parent.parameters_to_ignore.update(tables)
    parent._module_parameters = [each for each in parent._module_parameters if not _is_table(each)]
    if not any(each.requires_grad for each in parent._module_parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed for a module whose only parameters that require a gradient are "
            "tiered tables: it leaves those out; use the module as it is"
        )


def _is_table(each: nn.Parameter) -> bool:
    return isinstance(each, TableParameter)


register_module_module_registration_hook(_leave_tables_out)
