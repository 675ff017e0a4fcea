"""`DistributedDataParallel` around a model with tables: it leaves them out of what it averages over its processes.

It would keep a gradient of each of its parameters as a whole, and wait for all of them. It reads what to leave out from
the module that it wraps, which knows nothing of tables in modules of it. So this listens for that module becoming its
own: that comes when its parameters were listed, and before anything is made of them.
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
