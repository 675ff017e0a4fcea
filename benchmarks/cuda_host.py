"""What an eager step costs the host, part by part: `python -m benchmarks.cuda_host`.

One collection, and as many tables converted, each with plans and updates that are launched every time and with those
that are recorded, beside an `autograd.Function` that does nothing. On a GPU; `--device cpu` tries the harness out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import tieredemb
from benchmarks.cuda_command import keep, make_parser, parse
from benchmarks.cuda_converted import ALPHA, Collection, Model
from benchmarks.cuda_modes import ONE_THREAD, on_one_thread
from benchmarks.cuda_step import release, say
from benchmarks.cuda_workload import CudaWorkload, batches
from benchmarks.record import Record, measured
from benchmarks.timing import Quantiles
from benchmarks.warm_steps import GPU, GPU_TABLES
from tieredemb.kernels import recorder

TABLES, ROWS, WIDTH, BATCH, SHARE = GPU_TABLES, GPU.rows, GPU.width, GPU.samples, GPU.capacity
STEPS, WARM_UP = 100, 80
LR = 0.05
NEVER = 10**9  # times that launches come before they are recorded
COLLECTION, CONVERTED = "one collection", "converted"
PARTS = ("next batch", "forward", "backward", "step()", "in all")


class Nothing(torch.autograd.Function):
    """A function of Python that does nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@contextlib.contextmanager
def launched_each_time() -> Iterator[None]:
    """Nothing is recorded inside."""
    times, recorder.TIMES = recorder.TIMES, NEVER
    try:
        yield
    finally:
        recorder.TIMES = times


THREADS: dict[str, Callable[[], Any]] = {"": contextlib.nullcontext, ONE_THREAD: on_one_thread}
WAYS: tuple[tuple[str, Callable[[], Any], str], ...] = (
    ("launched", launched_each_time, ""),
    ("recorded", contextlib.nullcontext, ""),
    ("recorded", contextlib.nullcontext, ONE_THREAD),
)  # how updates and plans are launched, and where backward runs


def empty_functions(device: torch.device, rounds: int) -> tuple[Quantiles, Quantiles]:
    """Seconds of a forward and backward through one `Nothing`, and of a further one in the same backward."""
    x, grad = torch.zeros(4, device=device, requires_grad=True), torch.ones(TABLES * 4, device=device)

    def seconds(count: int) -> list[float]:
        found = []
        for _ in range(rounds):
            start = perf_counter()
            torch.cat([Nothing.apply(x) for _ in range(count)]).backward(grad[: 4 * count])  # type: ignore[no-untyped-call]
            found.append(perf_counter() - start)
        return found

    seconds(1)
    one, many = seconds(1), seconds(TABLES)
    further = [(more - less) / (TABLES - 1) for more, less in zip(sorted(many), sorted(one), strict=True)]
    return Quantiles.of(one), Quantiles.of(further)


def parts_of_steps(
    given: Iterable[Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]
) -> Iterator[tuple[float, ...]]:
    """Seconds of the parts of each step on the batches `given`, until Python has enqueued their work."""
    source = iter(given)
    while True:
        start = perf_counter()
        batch = next(source, None)
        if batch is None:
            return
        fetched = perf_counter()
        optimizer.zero_grad()
        out = model(batch)
        looked_up = perf_counter()
        torch.autograd.backward(out, gradients)
        passed_back = perf_counter()
        optimizer.step()
        end = perf_counter()
        yield fetched - start, looked_up - fetched, passed_back - looked_up, end - passed_back, end - start
        del out


def records(work: CudaWorkload, warm_up: int, steps: int, device: torch.device) -> list[Record]:
    found, empty = [], {}
    for threads, running in THREADS.items():
        with running():
            one, further = empty_functions(device, max(steps, 10))
        empty[threads] = one.median
        config = f"forward and backward{threads}"
        found += [
            measured("an empty autograd.Function", "torch", config, "µs", one, scale=1e6),
            measured("a further one", "torch", config, "µs", further, scale=1e6),
        ]
    ids = batches(work, 2 * (warm_up + steps), device)
    apart = [list(each.view(work.tables, -1).unbind()) for each in ids]
    whole = torch.full((work.batch, work.tables * work.width), 1e-2, device=device)
    each = [part.contiguous() for part in whole.chunk(work.tables, 1)]
    makers: dict[str, tuple[Callable[[], tuple[Any, Any]], list[Any], list[torch.Tensor]]] = {
        COLLECTION: (lambda: _collection(work, device), list(ids), [whole]),
        CONVERTED: (lambda: _converted(work, device), apart, each),
    }
    for form, (make, given, gradients) in makers.items():
        for way, recorded, threads in WAYS:
            start, (model, optimizer) = perf_counter(), make()
            with recorded(), THREADS[threads]():
                runs = {"": given[: warm_up + steps], ", prefetch": given[warm_up + steps :]}
                for mode, some in runs.items():
                    source = tieredemb.prefetch(some, model) if mode else some
                    seconds = list(parts_of_steps(source, model, optimizer, gradients))[warm_up:]
                    for part, of_part in zip(PARTS, zip(*seconds, strict=True), strict=True):
                        samples = Quantiles.of(of_part)
                        more = {"ratio": samples.median / empty[threads], "ratio_label": "× an empty function"}
                        config = f"{form}, {way}{threads}{mode}"
                        found.append(measured(part, "tieredemb", config, "µs", samples, scale=1e6, **more))
            _tables(model)[0].close()
            del model, optimizer, source
            release(device)
            say(f"{form}, {way}{threads}: {perf_counter() - start:.1f} s")
    return found


def _tables(model: torch.nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "tables") and hasattr(part, "engine")]


def _collection(work: CudaWorkload, device: torch.device) -> tuple[Any, Any]:
    model = Collection(work, SHARE, device)
    optimizer = torch.optim.Adagrad(model.tables.parameters(), lr=LR)
    model.tables.follow(optimizer)
    return model, optimizer


def _converted(work: CudaWorkload, device: torch.device) -> tuple[Any, Any]:
    model = Model(work, device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    tieredemb.replace_embedding_bags(model, capacity=SHARE, optimizer=optimizer)
    return model, optimizer


def title(work: CudaWorkload, warm_up: int, steps: int) -> str:
    return (
        f"Host time until Python has enqueued a part's work, of eager steps under torch.optim.Adagrad: {work.tables} × "
        f"{work.rows:,} × {work.width}, batch {work.batch:,}, bags of 1 id, Zipf {work.alpha:g}, fp32, capacity "
        f"{SHARE:.0%}. Launched: plan, lookup and update are launches, as in the first steps; recorded: as later ones. "
        f"One thread: with `torch.autograd.set_multithreading_enabled(False)`. Medians of "
        f"{steps} steps, after {warm_up} of warm-up, all of the same batches."
    )


# --- command line ---------------------------------------------------------------------------------------------------


def main(args: Sequence[str] | None = None) -> None:
    parser = make_parser("cuda_host", __doc__, rows=ROWS)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the first (default: %(default)s)")
    chosen = parse(parser, args)
    rows, batch = (min(chosen.rows, 300), 32) if chosen.quick else (chosen.rows, BATCH)
    tables, width = (3, 8) if chosen.quick else (TABLES, WIDTH)
    steps, warm_up = (min(chosen.steps, 5), min(chosen.warm_up, 4)) if chosen.quick else (chosen.steps, chosen.warm_up)
    work = CudaWorkload(name="host", tables=tables, rows=rows, width=width, batch=batch, alpha=ALPHA, caches=())
    results: Path | None = chosen.results
    found = records(work, warm_up, steps, chosen.device)
    keep(
        results, "cuda-host", title(work, warm_up, steps), found, statistic="Medians of host time, 20–80 % in brackets"
    )


if __name__ == "__main__":
    main()
