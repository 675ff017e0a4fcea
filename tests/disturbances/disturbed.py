"""What an interrupted or failed call may leave behind, checked against a twin that nobody disturbs.

After any exception in a public call it has not happened, or it has, or every later call says that the cache is broken,
which can then still be saved, closed, or mended by a load. `Pair` runs a module under disturbances beside its twin, all
of whose rows are resident in host memory, and compares them row by row after each of them.
"""

from __future__ import annotations

import abc
import contextlib
import dis
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import equal

import tieredemb as te
from tieredemb.errors import BrokenCacheError, CheckpointError, StorageError, TieredEmbError

LOAD_CONST = dis.opmap["LOAD_CONST"]
SHUFFLES = {dis.opmap[name] for name in ("SWAP", "POP_TOP")}  # of what a block returns
# of `try:`, which at the beginning of a `with` block is not inside of it yet; of `pass` at the end of an `except`
BESIDE = {dis.opmap["NOP"], dis.opmap["POP_EXCEPT"]}
FINALISERS = ("__del__",)
PACKAGE = str(Path(te.__file__).parent) + os.sep
ROWS = {"a": 60, "b": 50}
TABLES = [
    te.TableConfig(name="a", num_embeddings=ROWS["a"], embedding_dim=4, mode="sum"),
    te.TableConfig(name="b", num_embeddings=ROWS["b"], embedding_dim=6, mode="mean"),
]


def make(storage: Any = None, capacity: Any = 14, **keywords: Any) -> te.TieredEmbeddingBagCollection:
    """Two tables of two widths, so that a call touches two caches."""
    keywords = {"optimizer": te.SparseAdam(lr=0.1), **keywords}
    return te.TieredEmbeddingBagCollection(TABLES, capacity=capacity, storage=storage, **keywords)


def make_following(kind: Any = torch.optim.SparseAdam, **keywords: Any) -> te.TieredEmbeddingBagCollection:
    """As `make`, following a torch optimizer."""
    module = make(optimizer=kind, **keywords)
    module.follow(kind(module.parameters(), lr=0.1))
    return module


def make_member(optimizer: Any, capacity: Any = 14, storage: Any = None) -> te.TieredEmbeddingBag:
    """One of two tables that share a cache, of which the other one was used, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.EmbeddingBag(rows, 4, mode="sum") for rows in ROWS.values()])
    te.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer, storage=storage)
    model[1](torch.tensor([[1, 2], [2, 49]])).square().sum().backward()
    made: te.TieredEmbeddingBag = model[0]
    object.__setattr__(made, "beside", model[1])
    return made


def batch(number: int, samples: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of both tables, some of them often, and their offsets."""
    random = torch.Generator("cpu").manual_seed(number)
    ids = torch.cat([torch.randint(rows, (2 * samples,), generator=random, device="cpu") for rows in ROWS.values()])
    offsets = torch.arange(0, 4 * samples + 1, 2, device="cpu")
    where = torch.get_default_device()
    return ids.to(where), offsets.to(where)


def train(module: Any, number: int, samples: int = 3) -> None:
    module(*batch(number, samples)).square().sum().backward()


def contents(module: Any) -> list[torch.Tensor]:
    """Weights, optimizer states and steps of all tables, as they are at the current step."""
    follows = bool(module.engine.table_parameters)
    optimizer = module.engine.optimizer.optimizer if follows else module.fused_optimizer
    state = optimizer.state_dict()["state"]
    values = [value for entry in state.values() for name, value in entry.items() if name != "lagging"]
    return [*module.state_dict().values(), *(torch.as_tensor(value, device="cpu") for value in values)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


class Disturbance(abc.ABC):
    """Raises at event number `at`; `count` tells how many there were."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0

    def hit(self) -> bool:
        self.count += 1
        return self.at is not None and self.count == self.at + 1

    @abc.abstractmethod
    def on(self) -> contextlib.AbstractContextManager[None]:
        """Disturbs what is run inside."""

    def is_over(self) -> None:  # noqa: B027 - most disturb the library alone
        """Called once nothing is left of what was run: mends what it has done to others."""


class LineInterrupts(Disturbance):
    """Ctrl-C before a line of the package, counted from the first one that this thread runs inside the context.
    `inside`: of the files whose names begin so, instead."""

    def __init__(self, at: int | None = None, *, inside: str = PACKAGE) -> None:
        super().__init__(at)
        self._inside = inside

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._inside) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and not (self.count == self.at and _is_out_of_reach(frame)) and self.hit():
            sys.settrace(None)
            self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self._line


def _is_out_of_reach(frame: Any) -> bool:
    """Whether no signal is handled here: at the end of a `with` block that is about to leave its context, or at a `try`
    that begins it, where what is raised would leave a lock taken; where an `except` has ended but for its exception,
    which would stay the one that is handled; or in a finaliser, where Python would drop it."""
    code, at = frame.f_code, frame.f_lasti
    if code.co_code[at] in BESIDE:
        return True
    while code.co_code[at] in SHUFFLES:
        at += 2
    following = code.co_code[at : at + 6]  # what `__exit__` is called with: None three times
    if all(
        following[i] == LOAD_CONST and code.co_consts[following[i + 1]] is None for i in range(0, len(following), 2)
    ):
        return len(following) == 6
    while frame is not None:
        if frame.f_code.co_filename.endswith("weakref.py") or frame.f_code.co_qualname.endswith(FINALISERS):
            return True
        frame = frame.f_back
    return False


class Pair:
    """A module that is disturbed, and its twin that is not. `reopen`: makes a module of what a closed one has left, or
    a new one. `clear`: ends what keeps the disk from working."""

    def __init__(self, build: Callable[[], Any], directory: Path, twin: Any = None) -> None:
        self._build = build
        self.module = build()
        self.twin = make(capacity=1.0) if twin is None else twin
        self.directory = directory
        self.broken = 0  # how often the cache knew itself broken

    def run(self, act: Callable[[Any], Any], disturbance: Disturbance) -> bool:
        """Runs `act` on the module under the disturbance, and on the twin; checks the rule, and leaves both as after
        `act`. Returns whether it was disturbed."""
        before = contents(self.twin)
        act(self.twin)
        after = contents(self.twin)
        error: BaseException | None = None
        try:
            with disturbance.on():
                act(self.module)
        except (TieredEmbError, KeyboardInterrupt) as caught:
            error = caught.with_traceback(None)  # its frames hold batches in flight
        disturbance.is_over()
        if self._is_broken():
            assert error is not None
            self._mend()
        elif self._is_closed():
            self.module = self._build()
        found = contents(self.module)
        if same(found, after):
            return error is not None
        assert error is not None, "not what the twin has, undisturbed"
        assert same(found, before), f"neither before nor after: {vars(disturbance)}, {error!r}"
        act(self.module)
        assert same(contents(self.module), after), f"not what it was when run again: {vars(disturbance)}"
        return True

    def _is_closed(self) -> bool:
        try:
            self.module.flush()
        except StorageError as error:
            if "closed" not in str(error):
                raise
            return True
        return False

    def _is_broken(self) -> bool:
        try:
            self.module.stats()
        except BrokenCacheError:
            return True
        return False

    def _mend(self) -> None:
        """A broken cache says so in every call, can be saved with a mark, and mended by a load."""
        self.broken += 1
        for call in (self.module.flush, self.module.state_dict, lambda: train(self.module, 0)):
            with pytest.raises(BrokenCacheError):
                call()
        marked, good = self.directory / "marked", self.directory / "good"
        self.module.save_checkpoint(str(marked))
        with pytest.raises(CheckpointError, match="recover=True"):
            self.twin.load_checkpoint(str(marked))
        self.twin.save_checkpoint(str(good))
        self.module.zero_grad()  # a load does not drop the gradients that wait for a torch optimizer's step
        self.module.load_checkpoint(str(good))


def positions(total: int, most: int, *, all_of_them: bool) -> list[int]:
    """Which of `total` events to disturb: all, or at most `most`, evenly spread and the first ones among them."""
    if all_of_them or total <= most:
        return list(range(total))
    return sorted({number * (total - 1) // (most - 1) for number in range(most)})
