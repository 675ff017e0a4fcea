"""What is measured in a process of its own: `python -m benchmarks.children NAME ARGS…` prints one JSON object.

Nothing is imported before it is timed.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any


def imports() -> dict[str, float]:
    """Seconds that `import torch` takes, and that `import tieredemb` adds."""
    start = perf_counter()
    import torch  # noqa: F401

    torch_done = perf_counter()
    import tieredemb  # noqa: F401

    return {"torch": torch_done - start, "tieredemb": perf_counter() - torch_done}


def first_step() -> dict[str, float]:
    """Seconds of the first forward and of the first backward and update of this process, and kernels compiled."""
    import torch

    import tieredemb

    module = tieredemb.TieredEmbeddingBag(1000, 64, capacity=100, optimizer=tieredemb.SGD(lr=0.1))
    ids, offsets = torch.arange(50), torch.arange(50)
    compiled = _count_compilations()
    start = perf_counter()
    out = module(ids, offsets)
    forward_done = perf_counter()
    out.sum().backward()
    done = perf_counter()
    return {"forward": forward_done - start, "backward": done - forward_done, "compiled": len(compiled)}


def _count_compilations() -> list[str]:
    """A list that grows by the name of every kernel that numba compiles from now on; loading a cached one is none."""
    from numba.core import event

    names: list[str] = []

    class Listener(event.Listener):
        def on_start(self, noticed: Any) -> None:
            names.append(noticed.data["dispatcher"].py_func.__name__)

        def on_end(self, noticed: Any) -> None:
            pass

    event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]
    return names


def open_file(path: str, rows: int, capacity: int, batches: int, batch: int) -> dict[str, float]:
    """Opens a table of `rows` × 64 on a new file, trains it, closes it; seconds and bytes."""
    import os

    import numpy as np
    import torch

    import tieredemb

    before = _resident_bytes()
    start = perf_counter()
    module = tieredemb.TieredEmbeddingBag(
        rows, 64, capacity=capacity, storage=tieredemb.File(path), optimizer=tieredemb.SGD(lr=0.1)
    )
    opened = perf_counter() - start
    after = _resident_bytes()
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, rows, (batches, batch))
    start = perf_counter()
    for part in ids:
        module(torch.from_numpy(part), torch.arange(batch)).sum().backward()
    module.close()
    trained = perf_counter() - start
    used, page = np.unique(ids), os.sysconf("SC_PAGE_SIZE")
    pages = sum(len(np.unique(used * row_bytes // page)) for row_bytes in (64 * 4, 4))
    status = os.stat(path)
    return {
        "seconds": opened,
        "resident": after - before,
        "train_seconds": trained,
        "rows_used": len(used),
        "pages_bytes": pages * page,
        "disk_bytes": status.st_blocks * 512,
        "file_bytes": status.st_size,
    }


def _resident_bytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def main(name: str, *args: str) -> None:
    jobs: dict[str, Any] = {"imports": imports, "first_step": first_step, "open_file": open_file}
    print(json.dumps(jobs[name](*(int(arg) if arg.isdecimal() else arg for arg in args))))


if __name__ == "__main__":
    main(*sys.argv[1:])
