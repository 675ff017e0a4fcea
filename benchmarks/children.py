"""What is measured in a process of its own: `python -m benchmarks.children NAME ARGS…` prints one JSON object.

Nothing is imported before it is timed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any


def child(*args: object, **environment: str) -> dict[str, float]:
    """Runs one of these jobs in a fresh process, with more in its environment."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.children", *map(str, args)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


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


def first_example() -> dict[str, float]:
    """Seconds of the README's first example, from the start of the import of torch."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    start = perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), {})
    return {"seconds": perf_counter() - start}


def first_command() -> dict[str, float]:
    """Seconds of the README's first `cache-hit`, over a trace that is short beside what is compiled."""
    from tieredemb.__main__ import main

    start = perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        main([*["cache-hit", "--zipf", "1.05", "--target", "0.8", "--rows", "10000", "--accesses", "20000", "--quiet"]])
    return {"seconds": perf_counter() - start}


def first_step_on(device: str) -> dict[str, float]:
    """Seconds of what stands between `import torch` and the end of the first backward on a device."""
    import torch

    times = [perf_counter()]

    def note() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter())

    ids = torch.zeros((4096, 4), dtype=torch.long, device=device)
    note()
    import tieredemb

    note()
    module = tieredemb.TieredEmbeddingBag(
        1_000_000, 64, capacity=0.1, optimizer=tieredemb.RowWiseAdagrad(lr=0.1), device=device
    )
    note()
    out = module(ids.random_(1_000_000))
    note()
    out.sum().backward()
    note()
    parts = ("context", "import", "build", "forward", "backward")
    return {part: end - begin for part, begin, end in zip(parts, times[:-1], times[1:], strict=True)}


def open_tables(device: str, tables: int, rows: int, width: int) -> dict[str, float]:
    """Opens tables in memory, in unified memory on a GPU; seconds, those until its memory is committed, too, and the
    bytes of their rows."""
    import torch

    import tieredemb

    configs = [tieredemb.TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=width) for t in range(tables)]

    def opened(configs: list[tieredemb.TableConfig]) -> tieredemb.TieredEmbeddingBagCollection:
        return tieredemb.TieredEmbeddingBagCollection(
            configs, capacity=0.01, optimizer=tieredemb.RowWiseAdagrad(lr=0.1), device=device,
            storage=tieredemb.UnifiedMemory() if device == "cuda" else tieredemb.HostMemory(),
        )  # fmt: skip

    opened([tieredemb.TableConfig(name="small", num_embeddings=100, embedding_dim=width)]).close()  # compiles
    start = perf_counter()
    module = opened(configs)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = perf_counter() - start
    for group in module.tables.groups:
        group.cache.cold.wait_until_committed()
    committed = perf_counter() - start
    module.close()
    return {"seconds": seconds, "committed": committed, "bytes": tables * rows * 4 * (width + 2)}


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
    each = (imports, first_example, first_command, first_step, first_step_on, open_tables, open_file)
    jobs: dict[str, Any] = {job.__name__: job for job in each}
    print(json.dumps(jobs[name](*(int(arg) if arg.isdecimal() else arg for arg in args))))


if __name__ == "__main__":
    main(*sys.argv[1:])
