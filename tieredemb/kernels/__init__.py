"""The only place that compiles: numba for the CPU (`cpu`), CUDA for the GPU (`compiler`, loaded if there is one).

`twin` finds the implementation of an op for a device: the module `<op>_cpu` or `<op>_cuda` beside the op's contract.
Twins take the same arguments. They load on first use, so that `import tieredemb` stays quick.
"""

from __future__ import annotations

import importlib
import time
from types import ModuleType

import torch

from tieredemb.errors import UnsupportedError

DEVICES = ("cpu", "cuda")
IMPORTED = time.time()  # what this process runs are the files of the package as they were then


def check_device(device: torch.device) -> torch.device:
    """Returns `device` if it exists and has kernels; raises `UnsupportedError` otherwise, or
    `MissingDependencyError` without CuPy."""
    if device.type not in DEVICES:
        raise UnsupportedError(
            f"device {str(device)!r} has no kernels in this version of tieredemb (available: {', '.join(DEVICES)}); "
            f"pass device='cpu', or move the cache with .to('cpu')"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
            raise UnsupportedError(
                f"device {str(device)!r} was given, but torch {torch.__version__} (built for {built}) finds no GPU; "
                f"install a CUDA build of torch and a driver, or pass device='cpu'"
            )
        from tieredemb.kernels.compiler import cupy

        cupy()
    return device


def twin(op: str, device: torch.device) -> ModuleType:
    """The implementation of `op` (a dotted module name such as `tieredemb.hash.slot_map`) for `device`."""
    return importlib.import_module(f"{op}_{check_device(device).type}")
