"""Launches against the kernels that they launch, without a GPU.

All of the package, the tests and the benchmarks are read for their number and, where it can be told from the text, the
kind of their arguments. Those of plans, lookups and updates are made, too, with tensors of the CPU and no driver behind
them: all that a launch checks on a GPU is checked here.
"""

from __future__ import annotations

import ast
import contextlib
import struct
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sharding.ranks import padded

import tieredemb as te
from tieredemb.cache.base import PlanKind
from tieredemb.cache.changes import IntentLog, Suspects
from tieredemb.cache.device.hot_rows import DeviceHotRows
from tieredemb.cache.device.in_place import InPlace
from tieredemb.cache.device.key_ranges import KeyRanges
from tieredemb.cache.device.moves import RowMoves
from tieredemb.cache.device.plan import BatchPlan, DevicePlan, Missed, Phase
from tieredemb.cache.policy import scoring
from tieredemb.config import LFU, Normal
from tieredemb.errors import InvalidInputError
from tieredemb.kernels import compiler
from tieredemb.kernels.arguments import signature, struct_type
from tieredemb.kernels.compiler import Kernel
from tieredemb.kernels.constants import ASSIGN, DROPPED, MOST_ADDRESSES, MOST_JOINED, PUBLISH
from tieredemb.kernels.row_format import RowFormat
from tieredemb.kernels.source import PACKAGE, read
from tieredemb.kernels.spread import RowSpread
from tieredemb.lookup import exact_sum_cuda, homes_sort
from tieredemb.lookup.bags import KeySpace
from tieredemb.lookup.device_bags import (
    DeviceKeySpace,
    Edges,
    Joined,
    find_device_bags,
    join_bags,
    new_device_bags,
    new_faults,
    number_samples,
    report_fault,
    words_of,
)
from tieredemb.lookup.device_lookup import DeviceLookup
from tieredemb.lookup.exact_sum import new_sums
from tieredemb.lookup.gradient_norm import first_occurrences, occurrence_powers
from tieredemb.lookup.optimizer import MOST_NUMBERS, recipe_file, state_width
from tieredemb.lookup.spoilt import Scaling, refuse_spoilt
from tieredemb.sharding import gpu_bags
from tieredemb.sharding.bags import parts_of
from tieredemb.sharding.device_padding import Joiner, PooledFeature
from tieredemb.sharding.gpu_bags import BagInputs, GpuPart
from tieredemb.sharding.header import Bound
from tieredemb.sharding.layout import Layout, Replicated, RowWise, TableWise
from tieredemb.sharding.request import RequestLayout
from tieredemb.step.batch import Batch
from tieredemb.storage.base import RowLayout
from tieredemb.storage.initial import InitialRows, InitialTable
from tieredemb.storage.initial_cuda import DeviceInitialRows
from tieredemb.tables.config import table_set_config

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.cu"))
REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
NUMBERS = (ast.BinOp, ast.Compare, ast.BoolOp, ast.UnaryOp)


def signatures():
    """What each kernel may take, by its name: two files have one of the same name."""
    found = {}
    for file in FILES:
        for name in read(file).kernels:
            found.setdefault(name, []).append(signature(file, name))
    return found


# --- as they are written ----------------------------------------------------------------------------------------------


def made_by(call, names):
    """The kernel that a call of `Kernel`, `kernel` or the like makes, or None."""
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).lower().endswith("kernel"):
        return None
    return next((arg.value for arg in call.args if isinstance(arg, ast.Constant) and arg.value in names), None)


def kernels_of(scope, names):
    """(what a kernel is called by, line, kernel) of all that are made in a function or module."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and made_by(node.value, names):
            yield ast.unparse(node.targets[0]), node.lineno, made_by(node.value, names)
        if isinstance(node, ast.FunctionDef):
            for returned in (each for each in node.body if isinstance(each, ast.Return)):
                if made_by(returned.value, names):
                    yield node.name, node.lineno, made_by(returned.value, names)


def launches(path, attributes, names):
    """Line, kernel and arguments of every launch in a file. `attributes`: kernels that objects of other files hold."""
    tree = ast.parse(path.read_text())
    everywhere = {called: kernel for called, _, kernel in kernels_of(tree, names) if "." in called}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    everywhere |= {name: kernel for name, _, kernel in kernels_of(tree, names) if name in functions}
    seen = set()
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for scope in sorted(scopes, key=lambda node: -node.lineno):  # the inner before the outer
        local = sorted(kernels_of(scope, names), key=lambda each: each[1])
        for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call) and id(node) not in seen):
            is_partial = ast.unparse(call.func) == "partial"
            called, args = (call.args[0], call.args[1:]) if is_partial else (call.func, call.args)
            text = ast.unparse(called)
            kernel = made_by(called, names)
            for name, line, its_kernel in local:
                kernel = its_kernel if name == text and line <= call.lineno else kernel
            if isinstance(called, ast.Call) and ast.unparse(called.func) in everywhere:  # a function that returns it
                kernel = everywhere[ast.unparse(called.func)]
            kernel = kernel or everywhere.get(text) or attributes.get(text)
            if kernel and len(args) > 2:
                seen.add(id(call))
                yield call.lineno, kernel, args[2:]


def is_number(arg):
    """Whether an argument is a number, or else an address or a tensor; None where its text does not tell."""
    text = ast.unparse(arg)
    if isinstance(arg, ast.Constant):
        return None if arg.value == 0 and not isinstance(arg.value, float) else True
    if text.endswith((".data_ptr()", ".ctypes.data")) or text.startswith("_address("):
        return False
    if isinstance(arg, NUMBERS) or text.startswith(("len(", "int(", "max(", "min(")):
        return True
    return True if isinstance(arg, ast.Subscript) and ".shape[" in text else None


def misfit(args, wanted):
    """What does not fit, in words, or None."""
    if any(isinstance(arg, ast.Starred) for arg in args):
        return None if len(args) - 1 <= len(wanted) else f"{len(args)} arguments and more for {len(wanted)}"
    if len(args) != len(wanted):
        return f"{len(args)} arguments for {len(wanted)}"
    for arg, argument in zip(args, wanted.arguments, strict=True):
        number = is_number(arg)
        if number is not None and number == bool(argument.points_to or argument.whole):
            return f"{ast.unparse(arg)} for {argument.declared}"
    return None


def test_every_launch_fits_its_kernel():
    """A number in a pointer's place, or one argument too few, is not seen before a GPU runs it."""
    known, launched = signatures(), set()
    paths = [*PACKAGE.rglob("*.py"), *REPOSITORY.glob("[bt]e*/**/*.py")]
    attributes = {}
    for path in paths:
        held = kernels_of(ast.parse(path.read_text()), known)
        attributes |= {called: kernel for called, _, kernel in held if called.startswith("self.")}
    for path in paths:
        if path == Path(__file__):
            continue
        for line, kernel, args in launches(path, attributes, known):
            misfits = [misfit(args, wanted) for wanted in known[kernel]]
            assert None in misfits, f"{path.name}:{line}: {kernel}: {misfits}"
            if path.is_relative_to(PACKAGE) or kernel.startswith("slot_map"):
                launched.add(kernel)
    assert launched == set(known)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ("find(1, 32, cells, 4, keys, 3)", "4 arguments for 5"),
        ("find(1, 32, cells, 4, keys, 3, slots, 0)", "6 arguments for 5"),
        ("find(1, 32, 4, cells.data_ptr(), keys, 3, slots)", "4 for Cell *cells"),
        ("find(1, 32, cells, keys.data_ptr(), 4, 3, slots)", "keys.data_ptr() for i64 n_cells"),
        ("find(1, 32, cells, keys.shape[0], len(keys), 3, slots)", "len(keys) for i64 *keys"),
    ],
)
def test_launch_that_does_not_fit_is_found(launch, said, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(f'def run():\n    find = Kernel("hash/slot_map.cu", "slot_map_find")\n    {launch}\n')
    known = signatures()
    ((line, kernel, args),) = launches(path, {}, known)
    assert (line, kernel, misfit(args, known[kernel][0])) == (3, "slot_map_find", said)


# --- as they are made -------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels launched, whose device is the CPU: `get_device` of its tensors is −1."""
    names = []

    def load(self, device):
        names.append(self.name)
        return None, 1, 0, 0

    monkeypatch.setattr(Kernel, "load", load)
    monkeypatch.setattr(compiler, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *_: 0))
    monkeypatch.setattr(compiler, "CHECKED", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    few = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    compiler.meeting_blocks.cache_clear()
    yield names
    compiler.meeting_blocks.cache_clear()


def a_space(chosen=(0, 1), modes=("mean", "max"), features=((), ())):
    tables = [
        te.TableConfig(name=f"t{t}", num_embeddings=50, embedding_dim=8, mode=mode, feature_names=features[t])
        for t, mode in enumerate(modes)
    ]
    return DeviceKeySpace(KeySpace(tables, chosen, [0, 8, 0]), [-1] * len(chosen), CPU)


def found_bags(space, batch=3):
    ids, words = torch.arange(10), new_faults(1, CPU).zero_()
    fault, report = words[:3], words[3:]
    bags = new_device_bags(len(ids), space, batch, is_all=space.space.covers_all)
    count = max(2, len(space.space.features)) * batch + 1
    edges = Edges(torch.arange(count), count, exact=True, ids=len(ids))
    find_device_bags(bags, ids, edges, space, fault, report.data_ptr(), padding_is_dropped=True)
    report_fault(report, words.data_ptr())
    return bags, fault


def hot_rows(rows=7, width=8, state=16, dtype=torch.float32):
    return SimpleNamespace(
        weight=torch.zeros(rows, width, dtype=dtype),
        state=torch.zeros(rows, state),
        dirty=torch.zeros(rows, dtype=torch.uint8),
    )


NOWHERE = SimpleNamespace(weight=0, state=0, records=None, flags=(), uncached=False, by_key=False)
COLD = torch.zeros(4, 8)
ELSEWHERE = SimpleNamespace(
    weight=COLD.data_ptr(), state=COLD.data_ptr(), records=torch.zeros(9, 2, dtype=torch.int64), flags=("-DUNCACHED",),
    uncached=True, by_key=True,
)  # fmt: skip


@pytest.mark.parametrize("chosen", [(0, 1), (1,)])
def test_bags_are_found_by_launches_that_fit(launched, chosen):
    found_bags(a_space(chosen))
    assert launched == ["offsets_check", "bags_fill", "fault_tell"]


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("tables", [None, torch.tensor([1, 4], dtype=torch.int32)])
def test_a_spoilt_step_is_refused_by_a_launch_that_fits(launched, tables, is_dense):
    report, number = torch.zeros(words_of("Report"), dtype=torch.int64), torch.zeros(())
    refuse_spoilt(
        torch.zeros(2), tables, None if is_dense else number, number, report.data_ptr(), is_dense=is_dense,
        separate=tables is not None,
    )  # fmt: skip
    assert launched == ["spoilt_refuse"]


@pytest.mark.parametrize("overflow", [NOWHERE, ELSEWHERE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [te.SparseAdam(), te.Adam()], ids=["sparse", "dense"])
def test_lookup_and_update_are_launched_as_they_fit(launched, optimizer, dtype, overflow):
    space = a_space()
    row = RowFormat(width=space.space.width, dtype=dtype, state_width=state_width(optimizer, space.space.width))
    lookup, hot = DeviceLookup(space, row, optimizer), hot_rows(dtype=dtype, state=row.state_width)
    bags, fault = found_bags(space)
    homes, weights = torch.zeros(10, dtype=torch.int32), torch.zeros(10)
    number_samples(bags, torch.zeros_like(homes), 0, 10)
    number_samples(bags, torch.zeros_like(homes), homes, 4)
    out, argmax = torch.zeros(3, 16, dtype=dtype), torch.zeros(3, 16, dtype=torch.int32)
    grad, options, steps = (
        torch.zeros(3, 16),
        torch.zeros(MOST_NUMBERS, dtype=torch.float64),
        torch.zeros(2, dtype=torch.int64),
    )
    for given, winners in ((weights, None), (None, argmax)):
        lookup.pool(hot, overflow, homes, bags, given, out, winners)
    lookup.weights_gradient(lookup.gather(hot, overflow, homes), homes, bags, grad)
    picked = torch.zeros(10, dtype=torch.int64)
    assert lookup.gather(hot, overflow, homes, picked=picked[:3]).shape[0] == 3
    lookup.spread(hot, overflow, homes, picked, RowSpread(torch.full((2,), 2**40, dtype=torch.int64), each=5, first=0))
    n = MOST_JOINED + 1
    joined = Joined(3, [1] * n, [5 * f for f in range(n)], [5] * n, [0] * n, [3 * f for f in range(n)], [8] * n)
    together, edges = join_bags([torch.zeros(5, dtype=torch.int64)] * n, [None] * n, joined, 3 * n + 1)
    assert (together.shape, edges.shape) == ((5 * n,), (3 * n + 1,))
    segments = lookup.segments(homes, bags.bag, bags.batch)
    lookup.limit_norms(hot, overflow, segments, fault, 2.0, 1.5)
    distinct = lookup.distinct_segments(torch.arange(10, dtype=torch.int32), bags.bag, bags.batch)
    assert (distinct.order.tolist(), distinct.work.shape) == ([*range(10)], segments.work.shape)
    lookup.set_options(options, asdict(optimizer))
    past = torch.zeros(10, dtype=torch.int64) if optimizer.is_dense else None
    for scaler in (None, torch.ones(())):
        rate, numbers = lookup.begin(
            options, steps, torch.cat([fault, fault]), Scaling(scaler, scaler), segments.work, past
        )
        for scale, winners in ((lookup.mean_scale(homes, bags), None), (None, argmax)):
            lookup.update(hot, overflow, segments, grad, scale, winners, rate, numbers, past, steps)
    told = lookup.addresses([torch.zeros(4)] * (MOST_ADDRESSES + 1))
    assert (told.shape, told.dtype) == ((MOST_ADDRESSES + 1,), torch.int64)
    dense = {"segments_catch_up", "rows_keep_replayed", "rows_read_current", "step_end"}
    if past is not None:
        lookup.catch_up(hot, overflow, segments, fault, past, steps)
        lookup.catch_up(hot, overflow, segments, fault, past, steps, only=1, tables=torch.zeros(2, dtype=torch.int32))
        rows, own = lookup.read_current(hot, overflow, homes, past, steps, bag=bags.bag, batch=3)
        assert (rows.shape, own.dtype) == ((10, 8), torch.int32)
        lookup.end(options, steps, rate, numbers, past)
    kernels = {*read("lookup/embedding_bag.cu").kernels, *read(recipe_file(optimizer)).kernels}
    kernels |= {*read("lookup/bags.cu").kernels, *read("lookup/homes_sort.cu").kernels} - {"bags_place"}
    kernels -= set() if dtype == torch.float32 else {"rows_keep_replayed"}
    assert {*launched} == (kernels if optimizer.is_dense else kernels - dense)


@pytest.mark.parametrize("chosen", [(0, 1), (1,)])
def test_rows_are_asked_for_by_launches_that_fit(launched, chosen):
    tables = [
        te.TableConfig(name=f"t{t}", num_embeddings=50, embedding_dim=8, mode=mode)
        for t, mode in enumerate(("mean", "max"))
    ]
    config = table_set_config(
        tuple(tables), capacity=1.0, policy=None, storage=None, optimizer=None, seed=0, dtype=None, device="cpu",
        check_ids="deferred",
    )  # fmt: skip
    (part,) = parts_of(Layout(tables, 3, RowWise()), chosen, [0, 8])
    width = GpuPart(part, config)
    ids, words = torch.arange(10), torch.zeros(11 + 3 * 5, dtype=torch.int64)
    edges = Edges(torch.arange(7), 7, exact=True, ids=len(ids))
    batch = Batch(ids, edges.offsets, 7, True, 3, None, (ids,))
    counts = words[11:].view(3, 5)[:, 1 : 1 + 2 * len(chosen)]
    given = BagInputs(ids, edges, words[:3], words[3:].data_ptr())
    bags = width.find(width.find_bags(batch, given), counts)
    assert bags._order.shape == (10,)
    for columns, total in ((16, 16), (15, 16)):
        grad = torch.zeros(3, total)[:, :columns].contiguous()
        gradient = width.gradient(bags._bags, bags._order, grad, torch.zeros(3, columns, dtype=torch.int32), 2.0)
        assert (gradient.shape, gradient.dtype) == ((10, 8), torch.float32)
    to = RowSpread(torch.full((3,), 2**40, dtype=torch.int64), each=3, first=6)
    width.send_gradient(bags._bags, torch.zeros(9, dtype=torch.int64), grad, None, 2.0, to)
    kernels = {*read("sharding/owners.cu").kernels, *read("sharding/occurrences.cu").kernels}
    of_bags = {"bags_send", "bags_spread", "bags_unpack"}
    assert {*launched} == kernels - of_bags | {"offsets_check", "bags_fill"}


@pytest.mark.parametrize("sharding", [RowWise(), TableWise(), Replicated()])
@pytest.mark.parametrize("finds_firsts", [True, False])
@pytest.mark.parametrize("count", [10, 0])
@pytest.mark.parametrize("samples", [3, 5])
def test_padded_rows_are_asked_for_by_launches_that_fit(launched, monkeypatch, samples, count, finds_firsts, sharding):
    """Of three samples, where another rank has as many, or more."""
    monkeypatch.setattr(gpu_bags, "on_device", lambda device: contextlib.nullcontext())
    tables = [te.TableConfig(name=f"t{t}", num_embeddings=50, embedding_dim=8, mode="mean") for t in range(2)]
    config = table_set_config(
        tuple(tables), capacity=1.0, policy=None, storage=None, optimizer=None, seed=0, dtype=None, device="cpu",
        check_ids="deferred",
    )  # fmt: skip
    (part,) = parts_of(Layout(tables, 3, sharding), (0, 1), [0, 8])
    width, marked = GpuPart(part, config), []

    def note(its, packed, stream):
        if its.kernel == "order_find":
            given = dict(zip([each.name for each in its.arguments], its.packing.unpack(packed), strict=True))
            marked.append([given[name] != 0 for name in ("cells", "cell", "is_first")])

    monkeypatch.setitem(compiler.LISTENERS, threading.get_ident(), note)
    ids, words = torch.arange(count), torch.zeros(11 + 3 * 4, dtype=torch.int64)
    edges = Edges(torch.arange(7) if count else torch.zeros(7, dtype=torch.int64), 7, exact=False, ids=count)
    batch = Batch(ids, edges.offsets, 7, False, 3, None, (ids,))
    counts, given = words[11:].view(3, 4), BagInputs(ids, edges, words[:3], words[3:].data_ptr())
    width.count(width.find_bags(batch, given), counts)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # as no kernel writes there
    written = width.find_bags(batch, given)
    for part_of_it in vars(written).values():
        if isinstance(part_of_it, torch.Tensor):  # no kernel has written it
            part_of_it.zero_()
    bags = width.find(written, counts, finds_firsts=finds_firsts)
    assert marked == [[finds_firsts and not part.is_table_wise] * 3] * (count > 0)
    held, bound = {RowWise: [0, 0, 0], TableWise: [1, 1, 0], Replicated: [2, 2, 2]}[type(sharding)], Bound(5, None)
    assert padded(part, bags, bound, samples).shape == (3, 2 + 5 + max(held) * samples)
    bags._order.zero_()
    rows, scale = bags.gradient(torch.zeros(3, 16), 2.0)
    assert rows.shape == (sum(held) * samples if part.is_table_wise else 15, 8)
    assert len(rows) == sum(part.gradient_sizes(bound, samples, 0)[0])
    assert (scale is None) == part.is_table_wise
    assert scale is None or scale.shape == (15,)
    if part.is_table_wise:
        bags.pool(torch.zeros(2 * samples, 8), None, torch.zeros(3, 16), keep=False, keep_rows=False)
        to = RowSpread(torch.full((3,), 2**40, dtype=torch.int64), each=samples, first=0)
        assert bags.send_gradient(torch.zeros(3, 16), 2.0, to, 1) is None
        bags.spread(torch.zeros(3 * samples, 8), to)
        assert {*launched} >= {"bags_send", "bags_spread", "bags_unpack"}
    sent = bags.sent_weights(torch.zeros(count))
    assert sent is None if not part.is_table_wise else sent.shape == (15,)


@pytest.mark.parametrize("sharding", [RowWise(), TableWise(), Replicated(), {"t1": TableWise(), "t2": Replicated()}])
@pytest.mark.parametrize("samples", [3, 0])
@pytest.mark.parametrize("rows", [None, 4])
def test_received_messages_are_joined_by_launches_that_fit(launched, sharding, samples, rows):
    tables = [te.TableConfig(name=f"t{t}", num_embeddings=50, embedding_dim=8, mode="mean") for t in range(3)]
    parts = parts_of(Layout(tables, 2, sharding), (0, 1, 2), [0, 8, 16])
    order = RequestLayout(parts, 0, 2, torch.device("cpu"))
    pooled = [PooledFeature(p, k, f) for p, its in enumerate(order.pooled) for k, f in enumerate(its)]
    joiner = Joiner(parts, 2, order.order.tolist(), pooled, torch.device("cpu"))
    bounds = [Bound(5, rows)] * len(parts)
    messages = [torch.zeros(2, part.message_size(bounds[0], samples), dtype=torch.int64) for part in parts]
    joined = joiner.join(messages, samples, bounds)
    bags = len(pooled) * 2 * samples
    assert (joined.ids.shape, joined.row.shape) == ((10 * len(parts),), (10 * len(parts),))
    assert joined.begins.shape == ((bags + len(pooled)) * (bags > 0),)
    is_row_wise = not parts[0].is_table_wise
    assert joined.picked.shape == (is_row_wise * (10 if rows is None else 8),)
    assert {*launched} == {"pieces_find", "marks_write", "ids_join"} | ({"bags_begin"} if bags else set())


def test_norms_of_gradients_are_launched_as_they_fit(launched):
    space = a_space()
    lookup = DeviceLookup(space, RowFormat(width=8, state_width=16), te.SparseAdam())
    bags, _ = found_bags(space)
    grad, weights, argmax = torch.zeros(3, 16), torch.zeros(10), torch.zeros(3, 16, dtype=torch.int32)
    for scale, winners in ((weights, None), (None, argmax)):
        homes = torch.zeros(10, dtype=torch.int32)
        powers = occurrence_powers(lookup, homes, bags.bag, bags.batch, grad, scale, winners, 2.0)
        assert (powers.shape, powers.dtype) == ((10,), torch.float64)
    assert {*launched} >= {"segments_find", "segments_update", "long_segments_update", "scale_gather"}


def test_exact_sums_are_launched_as_they_fit(launched):
    sums = new_sums(3, torch.device("cpu"))
    exact_sum_cuda.add(sums, torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.int64))
    exact_sum_cuda.round_to(sums, torch.zeros(3, dtype=torch.float64))
    assert {*launched} == {"values_add", "sums_round"}


def test_long_batches_are_sorted_by_torch(launched, monkeypatch):
    monkeypatch.setattr(homes_sort, "SHORT", 9)
    space = a_space()
    lookup = DeviceLookup(space, RowFormat(width=8), te.SGD(lr=0.1))
    bags, _ = found_bags(space)
    segments = lookup.segments(torch.arange(10, dtype=torch.int32).flip(0), bags.bag, bags.batch)
    assert segments.homes.tolist() == list(range(10))
    assert {*launched} >= {"bags_place", "segments_find"}
    assert not {*launched} & {"digits_count", "digits_sort"}


def test_tables_apart_are_looked_up_and_updated_as_one(launched):
    space = a_space()
    lookup = DeviceLookup(space, RowFormat(width=8), te.SGD(lr=0.1), separate=True)
    bags, fault = found_bags(space)
    lookup.pool(hot_rows(state=0), NOWHERE, torch.zeros(10, dtype=torch.int32), bags, None, torch.zeros(6, 8), None)
    segments = lookup.segments(torch.zeros(10, dtype=torch.int32), bags.bag, bags.batch)
    options, steps = torch.zeros(MOST_NUMBERS, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    tables = torch.tensor([1, 3], dtype=torch.int32)
    rate, numbers = lookup.begin(options, steps, fault, Scaling(), segments.work, None, tables)
    grad = torch.zeros(6, 8)
    for separate in (None, torch.zeros(2, dtype=torch.int64)):
        lookup.update(
            hot_rows(state=0), NOWHERE, segments, grad, None, None, rate, numbers, tables=tables, grads=separate
        )
    assert {*launched} >= {"bags_pool", "step_begin", "segments_update", "long_segments_update"}


def test_shared_tables_are_updated_with_a_rate_for_each_feature(launched):
    space = a_space(features=((), ("a", "b")))
    lookup = DeviceLookup(space, RowFormat(width=8), te.SGD(lr=0.1))
    bags, fault = found_bags(space)
    segments = lookup.segments(torch.zeros(10, dtype=torch.int32), bags.bag, bags.batch)
    options, steps = torch.zeros(MOST_NUMBERS, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    rate, numbers = lookup.begin(options, steps, fault, Scaling(), segments.work)
    assert rate.shape == (3,)
    lookup.update(hot_rows(state=0), NOWHERE, segments, torch.zeros(3, 24), None, None, rate, numbers)
    assert "-DSHARED" in lookup._update
    assert "-DSHARED" not in DeviceLookup(a_space(), RowFormat(width=8), te.SGD(lr=0.1))._update


def test_rows_are_named_by_their_first_occurrence():
    homes = torch.tensor([5, -3, DROPPED, 5, 2, -3, DROPPED], dtype=torch.int32)
    assert first_occurrences(homes).tolist() == [0, 1, DROPPED, 0, 4, 1, DROPPED]


@pytest.mark.parametrize("client", [None, 1, torch.tensor([0, 2], dtype=torch.int32)], ids=["none", "one", "two"])
@pytest.mark.parametrize("clients", [(), (0, 30, 60, 100)])
@pytest.mark.parametrize("overflow", [NOWHERE, ELSEWHERE])
def test_plan_is_launched_as_it_fits(launched, overflow, clients, client):
    layout = RowLayout(rows=100, width=8, state_width=2)
    rows = DeviceHotRows(layout, 20, [(30, 30)], CPU)
    plan = DevicePlan(rows, scoring(LFU()), CPU, clients)
    plan.records.reserve(40)
    keys, homes, missed = torch.arange(30), torch.full((30,), -1, dtype=torch.int32), Missed(30, CPU)
    for scored, ages in ((True, True), (True, False), (False, True)):
        kind = PlanKind(scored=scored, ages=ages)
        plan.count(homes, kind, client=client)
        plan.begin(missed, kind, lag=1, client=client, overflow=overflow)
        plan.find(keys, homes, missed, kind, overflow=overflow)
    plan.place(missed, lag=1)
    plan.resolve(homes, missed, overflow, PUBLISH)
    plan.choose(missed)
    for part in (0, ASSIGN | PUBLISH):
        plan.resolve(homes, missed, overflow, part)
    index = {"records_clear", "records_index"}
    assert {*launched} | index == {*read("cache/plan.cu").kernels, *read("cache/policy.cu").kernels}
    assert index.isdisjoint(launched) != overflow.uncached


def test_keys_are_found_by_a_launch_that_fits(launched):
    layout = RowLayout(rows=100, width=8, state_width=2)
    slots = DeviceHotRows(layout, 20, (), CPU).find(torch.arange(30))
    assert (slots.shape, slots.dtype, launched) == ((30,), torch.int32, ["slot_map_find"])


def test_time_and_slots_in_use_are_read_where_kernels_count_them(launched):
    plan = DevicePlan(DeviceHotRows(RowLayout(rows=9, width=8, state_width=2), 5, (), CPU), scoring(LFU()), CPU)
    plan.restart(7)
    source, counts = read("cache/plan.cu"), plan.counts - plan.control.data_ptr()
    used = counts + source.layout("Counts")["used"].offset
    plan.control[used : used + 4].view(torch.int32).fill_(3)
    assert plan.time_and_used() == (7, 3)


def test_rows_are_moved_in_place_by_launches_that_fit(launched):
    layout = RowLayout(rows=100, width=8, state_width=2)
    hot = DeviceHotRows(layout, 20, [(60, 10)], CPU)
    plan, cold = DevicePlan(hot, scoring(LFU()), CPU), te.HostMemory().open(layout, name="", identity={})
    table = InitialTable(start=0, number=3, init=Normal(), padding_idx=None)
    initial = InitialRows([table], seed=1, state_value=0.0, device=CPU)
    words = {"ids": initial._ids, "seed": np.array([1, 0], np.uint32), "state_word": np.uint32(0)}
    initial._device = DeviceInitialRows(initial.tables, **words, device=CPU)
    moves = RowMoves(layout, hot, plan, initial)
    transfer = InPlace(cold, hot, plan, moves, side=None, changes=IntentLog(Suspects()))
    homes, missed = torch.full((30,), -1, dtype=torch.int32), Missed(30, CPU)
    launched.clear()
    for ahead in (False, True):  # nothing is left to be done later
        plan = BatchPlan(homes, missed, False, PlanKind(ahead=ahead), None)
        transfer.start(plan)
        assert plan.phase is Phase.MOVED
    assert launched == 2 * ["missed_place", "missed_resolve", "rows_swap", "rows_generate"]
    transfer.load(torch.arange(5), torch.arange(5, dtype=torch.int32))
    ((first_key, first_slot, rows),) = hot.resident
    assert (first_key, first_slot, rows) == (60, 20, 10)
    transfer.write_back(first_slot, rows, first_key)
    transfer.write_back(0, 20, None)
    moves.generate_range(first_key, first_slot, rows)
    assert launched[8:] == ["rows_swap", "rows_generate", "rows_write_back", "rows_write_back", "rows_generate_range"]
    launched.clear()
    ranges = KeyRanges(cold, hot, moves)
    for _ in range(2):  # what was never written is looked for once
        homes, overflow = ranges.find(10, 25)
        assert (homes.shape, homes.dtype, overflow.uncached, overflow.by_key) == ((25,), torch.int32, True, True)
    ranges.restart()
    ranges.find(10, 25)
    first = ["range_find", "rows_generate", "range_begin"]
    assert launched == [*first, "range_find", *first]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_initial_rows_are_launched_as_they_fit(launched, dtype):
    table = InitialTable(start=0, number=3, init=Normal(), padding_idx=None)
    initial = InitialRows([table], seed=2**63, state_value=0.1, device=CPU)
    words = {"seed": np.array([7, 2**31], np.uint32), "state_word": np.uint32(2**32 - 1)}
    rows = DeviceInitialRows(initial.tables, ids=initial._ids, **words, device=CPU)
    hot, missed = hot_rows(dtype=dtype), Missed(5, CPU)
    count = torch.zeros(1, dtype=torch.int32)
    rows.generate_missed(
        count, 5, missed.keys, missed.slots, missed.untouched, hot.weight, hot.state, 0, 0, 16, some=count.data_ptr()
    )
    keys, slots, untouched = torch.arange(5), torch.zeros(5, dtype=torch.int32), torch.ones(5, dtype=torch.uint8)
    address = COLD.data_ptr()
    rows.generate_missed(count, 5, keys, slots, untouched, hot.weight, hot.state, address, address, 16, by_key=False)
    rows.generate_range(0, 2, 5, hot.weight, hot.state, 16)
    assert {*launched} == {*read("storage/initial.cu").kernels}


# --- what is refused --------------------------------------------------------------------------------------------------


CELLS, KEYS, SLOTS = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(3).int()


@pytest.mark.parametrize(
    ("position", "bad"),
    [
        (0, CELLS.int()),
        (1, CELLS),
        (1, 4.0),
        (2, KEYS.int()),
        (2, CELLS[:3, 0]),
        (2, np.zeros(3)),
        (2, 3),
        (2, 2**40 + 4),
        (2, None),
        (3, torch.tensor(3)),
        (4, SLOTS.float()),
    ],
)
def test_launch_refuses_an_argument_that_does_not_fit(launched, position, bad):
    find, arguments = Kernel("hash/slot_map.cu", "slot_map_find"), [CELLS, 4, KEYS, 3, SLOTS]
    find(1, 32, *arguments)
    arguments[position] = bad
    with pytest.raises(InvalidInputError, match=f"argument {position} of slot_map_find"):
        find(1, 32, *arguments)
    assert launched == ["slot_map_find"]


def test_launch_refuses_a_tensor_of_another_device(launched, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    with pytest.raises(InvalidInputError, match=r"argument 0 of slot_map_find .* on cuda:1"):
        Kernel("hash/slot_map.cu", "slot_map_find")(1, 32, CELLS, 4, KEYS, 3, SLOTS)
    assert launched == []


def test_launch_takes_addresses_in_place_of_tensors(launched):
    find = Kernel("hash/slot_map.cu", "slot_map_find")
    find(1, 32, 0, 4, KEYS.data_ptr(), 3, SLOTS.data_ptr())
    assert launched == ["slot_map_find"]


def test_launch_refuses_another_number_of_arguments(launched):
    with pytest.raises(InvalidInputError, match="takes 5 arguments, got 1"):
        Kernel("hash/slot_map.cu", "slot_map_find")(1, 32, CELLS)
    assert launched == []


# --- structs ----------------------------------------------------------------------------------------------------------


SPACE = struct_type("lookup/bags.cu", "Space")


def test_struct_has_the_bytes_of_its_fields():
    space = SPACE(blocks=0, features=3, first=KEYS, size=0, padding=2**40, resident=CELLS, n_features=7, separate=1)
    assert space == struct.pack("@qqqqqqii", 0, 3, KEYS.data_ptr(), 0, 2**40, CELLS.data_ptr(), 7, 1)
    assert len(space) == read("lookup/bags.cu").layout("Space").size
    assert any(field is KEYS for field in space.fields)  # else its memory might be another's at the launch


@pytest.mark.parametrize("fields", [{}, {"first": 0, "padding": 0, "resident": 0, "n_features": 0, "keys": 0}])
def test_struct_refuses_other_fields(fields):
    with pytest.raises(InvalidInputError, match="a Space has the fields blocks, features, first, size, padding"):
        SPACE(**fields)


def test_struct_is_packed_where_c_aligns_it():
    arguments = signature("lookup/bags.cu", "offsets_check")
    assert arguments.starts == [0, 8, 16, 24, 32, 40, 48, 104, 112]
    packed = arguments.packing.pack(*range(1, 7), b"x" * 56, 8, 9)
    assert packed[48:] == b"x" * 56 + struct.pack("qq", 8, 9)


@pytest.mark.parametrize("bad", [{"first": KEYS.int()}, {"first": CELLS[:, 0]}, {"padding": 3}])
def test_launch_refuses_a_struct_that_does_not_fit(launched, bad):
    fields = {"blocks": 0, "features": KEYS, "first": KEYS, "size": KEYS, "padding": KEYS, "resident": KEYS}
    fields |= {"n_features": 2, "separate": 0}
    check = Kernel("lookup/bags.cu", "offsets_check")
    check(1, 32, KEYS, 3, 3, 3, True, 1, SPACE(**fields), KEYS, KEYS)
    for space in (SPACE(**{**fields, **bad}), bytes(SPACE(**fields)), 0):
        with pytest.raises(InvalidInputError, match=r"argument 6 of offsets_check \(Space space\)"):
            check(1, 32, KEYS, 3, 3, 3, True, 1, space, KEYS, KEYS)
    assert launched == ["offsets_check"]


# --- flags ------------------------------------------------------------------------------------------------------------


def test_kernel_refuses_a_flag_that_is_none():
    with pytest.raises(InvalidInputError, match="begin with a dash"):
        Kernel("hash/slot_map.cu", "slot_map_find", ("any n i64 n i32",))


@pytest.mark.parametrize("optimizer", [te.SparseAdam(), te.Adam()], ids=["sparse", "dense"])
def test_tables_that_take_steps_of_their_own_are_updated_by_launches_that_fit(launched, optimizer):
    space = a_space()
    row = RowFormat(width=space.space.width, state_width=state_width(optimizer, space.space.width))
    lookup = DeviceLookup(space, row, optimizer, separate=True)
    bags, fault = found_bags(space)
    segments = lookup.segments(torch.zeros(10, dtype=torch.int32), bags.bag, bags.batch)
    options, steps = torch.zeros(MOST_NUMBERS, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    past = torch.zeros((2, 10), dtype=torch.int64) if optimizer.is_dense else None
    tables = torch.tensor([1], dtype=torch.int32)
    rate, numbers = lookup.begin(options, steps, fault, Scaling(), segments.work, past, tables)
    assert (rate.shape, numbers.shape) == ((2,), (2 * MOST_NUMBERS,))
    hot = hot_rows(state=row.state_width)
    lookup.update(hot, NOWHERE, segments, torch.zeros(3, 16), None, None, rate, numbers, past, steps)
    if past is not None:
        lookup.end(options, steps, rate, numbers, past, tables)
        lookup.catch_up(hot, NOWHERE, segments, fault, past, steps, only=1, tables=tables)
        homes = torch.zeros(10, dtype=torch.int32)
        found = lookup.read_current(hot, NOWHERE, homes, past, steps, bag=bags.bag, batch=3, tables=tables)
        assert found[1].shape == (10,)
        assert {"segments_catch_up", "rows_keep_replayed", "rows_read_current"} <= {*launched}
    assert "-DSEPARATE" in lookup._update
