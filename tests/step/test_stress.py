"""Thousands of random small steps, eager and captured, with prefetch and without, while kernels are delayed at random
on every stream: the numbers are those of whole tables, at every step. On the CPU the prefetch thread, lookups and
updates are delayed."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from counters import Plans, Replays
from devices import assert_same_bits
from oracle import integer_weights
from training import OPTIMIZERS, bits
from training_scripts import Comparison, Trainee, Turn, WholeTables, assert_rows_can_leave

import tieredemb as te
from tieredemb.cache.host.cache import HostCache
from tieredemb.cache.host.hot_rows import HotRows
from tieredemb.kernels.compiler import Kernel
from tieredemb.step import host_call
from tieredemb.step.host_call import HostGroupCall
from tieredemb.storage.base import ColdRows

pytestmark = pytest.mark.filterwarnings("error:prefetch")  # plans that nothing uses would prove nothing

MODES = {  # depths of prefetch, and whether steps are captured
    "eager": ([0], False),
    "prefetch1": ([1], False),
    "prefetch3": ([3], False),
    "graph": ([0], True),
    "graph-prefetch": ([1, 1, 3], True),
}
SEEDS = 4
STEPS = {"cpu": 300, "cuda": 1000}  # of each mode and seed
MODELS = 4  # that take these steps, one after the other
MOST_SAMPLES = 8


class Delays:
    """Lets a share of the kernels wait, on the stream that they go to: a captured one in each replay. On the CPU plans,
    storage, lookups and updates wait, on whatever thread they are."""

    def __init__(self, device, monkeypatch, seed):
        self.share = 0.0
        self.count = 0
        self._random = random.Random(seed)
        if device == "cuda":
            torch.cuda._sleep(1)  # loads the kernel, which is no work for a capture
            self._wait = lambda: torch.cuda._sleep(self._log_uniform(1e3, 5e5))  # clock cycles: up to 0.3 ms
            places = [(Kernel, "__call__")]
        else:
            self._wait = lambda: time.sleep(self._log_uniform(1e4, 1e6) * 1e-9)
            places = [
                (HostCache, "plan"),
                (HotRows, "__setattr__"),  # between copying rows to longer arrays and using these
                (ColdRows, "read"),
                (ColdRows, "write"),
                (HostGroupCall, "pool"),
                (HostGroupCall, "gradient"),
                (host_call, "apply"),
            ]
        for owner, name in places:
            late = self._late(getattr(owner, name))
            static = isinstance(vars(owner).get(name), staticmethod)
            monkeypatch.setattr(owner, name, staticmethod(late) if static else late)

    def __call__(self):
        """Waits, or does not."""
        if self._random.random() < self.share:
            self.count += 1
            self._wait()

    def _log_uniform(self, low, high):
        return int(low * (high / low) ** self._random.random())

    def _late(self, function):
        @functools.wraps(function)
        def late(*args, **keywords):
            self()
            return function(*args, **keywords)

        return late


# --- models and scripts -----------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """A model, and what its script is made of.

    `forwards`: of each step · `samples`: B of all batches, or None for any · `changes`: whether ids may change after
    they were handed on, which no captured step sees; those of one forward in two, so that prefetch need not complain ·
    `busy`: share of the turns before which something else is done · `delayed`: share of the kernels that wait.
    """

    tables: list[te.TableConfig]
    capacity: int | float
    optimizer: te.config.OptimizerConfig
    policy: te.config.Policy
    tier: str
    forwards: int
    micro: bool
    weighted: bool
    samples: int | None
    ids: torch.dtype
    changes: bool
    busy: float
    delayed: float

    @property
    def integer(self):
        """Whether whole tables give the same numbers bit for bit."""
        return self.optimizer == te.SGD(lr=1.0)

    def model(self, path):
        storage = {"default": None, "host": te.HostMemory(), "file": te.File(str(path))}[self.tier]
        keywords = {name: getattr(self, name) for name in ("capacity", "optimizer", "policy")}
        return self._integers(te.TieredEmbeddingBagCollection(self.tables, storage=storage, **keywords))

    def resident_model(self):
        return self._integers(te.TieredEmbeddingBagCollection(self.tables, capacity=1.0, optimizer=self.optimizer))

    def _integers(self, model):
        if self.integer:
            integer_weights(model)
        return model

    def __str__(self):
        """What a failing test shows of it."""
        tables = [(t.num_embeddings, t.embedding_dim, t.mode, t.padding_idx, t.placement) for t in self.tables]
        rest = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "tables")
        return f"{tables}, {rest}"


def draw_setup(draw, *, integer, graphed):
    widths = draw.choice([(4,), (5,), (8,), (4, 8), (4, 5)])
    modes = ("sum",) if integer or draw.random() < 0.5 else ("sum", "mean", "max")
    placement = draw.choice(["auto", "cached", "cached"])
    tables = []
    for t in range(draw.randint(1, 4)):
        rows = draw.choice([1, 3, draw.randint(1, 40), draw.randint(1, 300)])
        padding = draw.choice([None, None, draw.randrange(rows)])
        keywords = {"mode": draw.choice(modes), "padding_idx": padding, "placement": placement}
        width = widths[t % len(widths)]
        tables.append(te.TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=width, **keywords))
    total, forwards = sum(table.num_embeddings for table in tables), draw.choice([1, 1, 2])
    return Setup(
        tables=tables,
        capacity=draw.choice([1, 2, draw.randint(1, total), total // 4 + 1, total // 2 + 1, max(1, total - 1), 1.0]),
        optimizer=te.SGD(lr=1.0) if integer else draw.choice(OPTIMIZERS),
        policy=draw.choice([te.LFU(), te.LFU(half_life_batches=1.0), te.LRU()]),
        tier=draw.choice(["default", "default", "host"] if graphed else ["default", "default", "host", "file"]),
        forwards=forwards,
        micro=forwards > 1 and draw.random() < 0.5,
        weighted=all(table.mode == "sum" for table in tables) and draw.random() < 0.3,
        samples=draw.randint(1, MOST_SAMPLES) if graphed else None,
        ids=draw.choice([torch.int64, torch.int64, torch.int32]),
        changes=forwards > 1 and not graphed,
        busy=draw.choice([0.02, 0.1, 0.3]),
        delayed=draw.choice([0.05, 0.1, 0.3]),
    )


class ScriptWriter:
    """Makes up a script for a setup. Tensors lie in host memory, from which a GPU takes them without waiting."""

    def __init__(self, setup, draw, *, pinned):
        self._setup = setup
        self._draw = draw
        self._random = np.random.default_rng(draw.getrandbits(32))
        self._pinned = pinned

    def write(self, turns):
        script = []
        for _ in range(turns):
            draw, samples = self._draw, self._setup.samples
            if samples is None:
                samples = draw.choice([0, 1, 4, 4, MOST_SAMPLES])
            forwards = [self._inputs(samples) for _ in range(self._setup.forwards)]
            turn = Turn(forwards, self._upstream(samples), rate=draw.choice([1.0, 1.0, 1.0, 2.0]))
            turn.leaves = draw.random() < 0.02
            if script and script[-1].was is None and draw.random() < 0.03:
                turn.forwards, turn.upstream, turn.again = script[-1].forwards, script[-1].upstream, True
            elif self._setup.changes and draw.random() < 0.03:
                turn.was = self._others(forwards[0][0])
            while draw.random() < self._setup.busy:
                turn.before.append(self._something_else())
            script.append(turn)
        return script

    def _something_else(self):
        draw = self._draw
        what = draw.choice(["evaluate"] * 4 + ["drop"] * 3 + ["keep"] * 2 + ["flush", "stats", "weights"])
        if what in ("evaluate", "drop"):
            return what, None if draw.random() < 0.3 else self._inputs(draw.randint(0, MOST_SAMPLES))
        if what == "keep":
            samples = draw.randint(1, MOST_SAMPLES)
            return what, self._inputs(samples), self._upstream(samples), draw.randint(1, 4)
        return (what,)

    def _inputs(self, samples):
        """Bags of one kind in all tables: none, few ids, some with a few hot rows among them, always the same rows, or
        all rows there are."""
        kind = self._draw.choice(["none"] + ["few"] * 3 + ["some"] * 6 + ["same"] * 2 + ["all"])
        ids, sizes = [], []
        for table in self._setup.tables:
            rows, random = table.num_embeddings, self._random
            if kind == "all" and samples:
                ids.append(random.permutation(rows))
                sizes.append(random.multinomial(rows, np.full(samples, 1 / samples)))
                continue
            most = {"none": 0, "few": 1, "some": 5, "same": 2}.get(kind, 0)
            sizes.append(random.integers(0, most + 1, samples))
            n = int(sizes[-1].sum())
            skewed = np.minimum((random.pareto(1.0, n) * 2).astype(np.int64), rows - 1)
            ids.append(np.arange(n) % min(rows, 3) if kind == "same" else (skewed + random.integers(0, 3)) % rows)
        every = np.concatenate(ids)
        offsets = np.cumsum([0, *np.concatenate(sizes)])
        weights = self._numbers(-2, 3, len(every)) if self._setup.weighted else None
        return self._tensor(every, self._setup.ids), self._tensor(offsets, self._setup.ids), weights

    def _others(self, ids):
        """As many ids, of the table that has the fewest rows."""
        fewest = min(table.num_embeddings for table in self._setup.tables)
        return self._tensor(self._random.integers(0, fewest, len(ids)), ids.dtype)

    def _upstream(self, samples):
        return self._numbers(-1, 2, (samples, sum(table.embedding_dim for table in self._setup.tables)))

    def _numbers(self, low, high, shape):
        random = self._random
        numbers = random.integers(low, high, shape) if self._setup.integer else random.standard_normal(shape)
        return self._tensor(numbers, torch.float32)

    def _tensor(self, array, dtype):
        tensor = torch.from_numpy(np.asarray(array)).to(dtype)
        return tensor.pin_memory() if self._pinned else tensor


# --- the test ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("mode", MODES)
def test_random_steps_with_random_delays_are_exact(device, monkeypatch, tmp_path, mode, seed):
    depths, graphed = MODES[mode]
    draw = random.Random(f"{mode}, {seed}")
    delays, replays = Delays(device, monkeypatch, seed), Replays(monkeypatch)
    found = 0
    for number in range(MODELS):
        setup, depth = draw_setup(draw, integer=number % 2 == 0, graphed=graphed), draw.choice(depths)
        script = ScriptWriter(setup, draw, pinned=device == "cuda").write(STEPS[device] // MODELS)
        expected, end = expectation(setup, script)
        trainee = Trainee(setup.model(tmp_path / f"rows{number}"), micro=setup.micro)
        plans = Plans(trainee.model, monkeypatch)
        context = f"mode {mode}, depth {depth}, seed {seed}, model {number}: {setup}"
        comparison = Comparison(trainee, expected, context)

        def each(comparison=comparison):
            delays()
            comparison()

        delays.share = setup.delayed
        trainee.play(
            script,
            depth=depth,
            graphed=graphed,
            told=draw.random() < 0.5,
            from_host=draw.random() < 0.5,
            each=each,
        )
        delays.share = 0.0
        comparison.finish()
        found += plans.found
        assert_rows_can_leave(trainee.model)
        assert_same_bits(state(setup, trainee.model), end)
        trainee.model.close()
    assert delays.count >= 10 * MODELS
    if graphed:
        replays.check(device, STEPS[device] // 3)
    elif mode != "eager":
        assert found >= STEPS[device] // 2


def expectation(setup, script):
    """What is seen of a script, and the state it leads to: of whole tables where the numbers are integers, else of the
    same library with every row resident, one step after the other."""
    trainee = Trainee(setup.resident_model(), micro=setup.micro)
    if setup.integer:
        whole = WholeTables(setup.tables, trainee.model.state_dict().values())
        whole.play(script)
        return whole.seen, [torch.from_numpy(weight.astype(np.float32)) for weight in whole.weights]
    trainee.play(script)
    return trainee.seen, state(setup, trainee.model)


def state(setup, model):
    return list(model.state_dict().values()) if setup.integer else bits(model)
