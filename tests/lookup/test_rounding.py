"""Stochastic rounding: unbiased, finite, the same bits wherever a row lies, and tables that train as float32 ones."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from devices import assert_same_bits, equal
from torch import nn

import tieredemb as te
from tieredemb.config import TablePart
from tieredemb.errors import ConfigError
from tieredemb.kernels.cpu import jit
from tieredemb.kernels.rounding_cpu import stochastic_bfloat16, stochastic_half
from tieredemb.lookup.options import LookupOptions
from tieredemb.lookup.rounding import MIX
from tieredemb.step.batch import Batch
from tieredemb.step.engine import Engine
from tieredemb.tables.config import table_set_config
from tieredemb.tables.table_set import TableSet

HALVES = (torch.bfloat16, torch.float16)
ALL_BITS = np.arange(1 << 16, dtype=np.uint32)
CARRIERS = {torch.bfloat16: np.int16, torch.float16: np.uint16}


@jit
def bfloat16s(value, bits, out):
    for i in range(bits.shape[0]):
        out[i] = stochastic_bfloat16(value, bits[i])


@jit
def halves(value, bits, out):
    for i in range(bits.shape[0]):
        out[i] = stochastic_half(value, bits[i])


def rounded(dtype, value, bits=ALL_BITS):
    """What `value` is rounded to by each of the random `bits`, as float64."""
    out = np.empty(len(bits), CARRIERS[dtype])
    (bfloat16s if dtype is torch.bfloat16 else halves)(np.float32(value), bits, out)
    return torch.from_numpy(out.view(np.int16)).view(dtype).double()


def some_values(seed, low, high, count=60):
    """Of all sizes from 2^low to 2^high, and both signs."""
    random = np.random.default_rng(seed)
    values = random.choice([-1, 1], count) * 2.0 ** random.uniform(low, high, count)
    return values.astype(np.float32).tolist()


# --- one value --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.bfloat16, -149, 127), (torch.float16, -14, 15.9)])
def test_the_mean_over_all_random_bits_is_the_value(dtype, low, high):
    for value in (0.0, 1.0, *some_values(1, low, high)):
        found = rounded(dtype, value)
        assert found.sum().item() == value * 65536  # sums of so few values are exact in float64
        assert len(found.unique()) <= 2
        assert (found.min() <= value) & (value <= found.max())


def test_halves_below_the_normal_ones_miss_the_mean_by_less_than_the_last_random_bit():
    for value in some_values(2, -45, -14):
        found = rounded(torch.float16, value)
        assert abs(found.mean().item()) <= abs(value)
        assert abs(found.mean().item() - value) < 2.0**-24 * 2.0**-16
        assert len(found.unique()) <= 2


@pytest.mark.parametrize("dtype", HALVES)
def test_finite_values_stay_finite_and_others_what_they_are(dtype):
    most, largest = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    for value in (most, np.nextafter(np.float32(most), np.float32(np.inf)), 65519.99, 65520.0, 1e30, largest):
        for sign in (-1, 1):
            found = rounded(dtype, sign * value)
            assert found.isfinite().all()
            assert (found.abs() <= most).all()
    assert (rounded(dtype, math.inf) == math.inf).all()
    assert (rounded(dtype, -math.inf) == -math.inf).all()
    tiny_nan = np.uint32(0x7F800001).view(np.float32)  # whose upper half is an infinity's
    for nan in (math.nan, tiny_nan, -tiny_nan):
        assert rounded(dtype, nan).isnan().all()
    assert (torch.signbit(rounded(dtype, -0.0))).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_a_row_can_hold_stays(dtype):
    for value in torch.tensor(some_values(3, -14, 15)).to(dtype).tolist():
        assert (rounded(dtype, value) == value).all()


# --- rows -------------------------------------------------------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10 in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ k[0], q & 0xFFFFFFFF, (p >> 32) ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def expected_rows(dtype, values, *, ids, seed, table, step, purpose=0):
    """Float32 `values` (K, D) of `ids`, rounded as the documentation says."""
    mixed, found = seed ^ MIX, []
    for row, id in zip(values.cpu(), ids, strict=True):
        for element, value in enumerate(row.tolist()):
            block = element // 8 | purpose << 16 | (id >> 32) << 18
            words = philox((id & 0xFFFFFFFF, step, table, block), (mixed & 0xFFFFFFFF, mixed >> 32))
            bits = words[element % 8 // 2] >> (16 * (element % 2)) & 0xFFFF
            found.append(rounded(dtype, value, np.array([bits], np.uint32)).item())
    return torch.tensor(found, dtype=torch.float64, device="cpu").view(values.shape).to(dtype)


def bag(dtype, *, rows=50, width=12, capacity=4, seed=5, rounding="stochastic", optimizer=None, **keywords):
    return te.TieredEmbeddingBag(
        rows, width, mode="sum", dtype=dtype, rounding=rounding, capacity=capacity, seed=seed,
        optimizer=optimizer or te.SGD(lr=1.0), **keywords,
    )  # fmt: skip


def weight(module):
    return module.state_dict()["weight"].cpu()


@pytest.mark.parametrize("capacity", [1, 4, 50])
@pytest.mark.parametrize("width", [1, 7, 12, 32])
@pytest.mark.parametrize("dtype", HALVES)
def test_an_update_is_rounded_by_seed_table_id_and_step(device, dtype, width, capacity):
    module, ids = bag(dtype, width=width, capacity=capacity), [3, 49, 0, 17, 21, 30]
    for step in range(1, 4):
        before = weight(module)[ids].float()
        out = module(torch.tensor(ids).view(-1, 1))
        gradient = torch.linspace(-1e-3, 3e-3, len(ids) * width).view(len(ids), width)
        out.backward(gradient.to(dtype))
        target = before - gradient.to(dtype).float().cpu()
        assert equal(weight(module)[ids], expected_rows(dtype, target, ids=ids, seed=5, table=0, step=step))


def test_collections_number_their_tables(device):
    tables = [
        te.TableConfig(name=f"t{t}", num_embeddings=9 + t, embedding_dim=width) for t, width in enumerate((4, 8, 4))
    ]
    module = te.TieredEmbeddingBagCollection(
        tables, capacity=5, dtype=torch.bfloat16, rounding="stochastic", optimizer=te.SGD(lr=1.0), seed=9
    )
    before = module.state_dict()
    gradient = torch.linspace(-1e-3, 2e-3, 2 * 16).view(2, 16)
    module(torch.tensor([1, 8, 2, 9, 3, 10]), torch.arange(7)).backward(gradient.bfloat16())
    for t, (columns, ids) in enumerate([((0, 4), [1, 8]), ((4, 12), [2, 9]), ((12, 16), [3, 10])]):
        key = f"tables.t{t}.weight"
        target = before[key][ids].float().cpu() - gradient[:, slice(*columns)].bfloat16().float().cpu()
        found = module.state_dict()[key][ids].cpu()
        assert equal(found, expected_rows(torch.bfloat16, target, ids=ids, seed=9, table=t, step=1))


@pytest.mark.parametrize("capacity", [1, 20])
def test_rows_of_a_part_are_rounded_as_those_of_the_whole_table(device, capacity):
    tables = tuple(te.TableConfig(name=f"t{t}", num_embeddings=20, embedding_dim=12) for t in range(2))
    config = table_set_config(
        tables, capacity=capacity, policy=None, storage=None, optimizer=te.SGD(lr=1.0), seed=9, dtype=torch.bfloat16,
        device=None, check_ids="deferred", rounding="stochastic",
        parts=(TablePart(3, 1, 4, 80), TablePart(0, 2**33, 2, 2**33 + 40)),
    )  # fmt: skip
    engine = Engine(TableSet(config))
    before = [engine.tables.weight(table) for table in range(2)]
    ids, offsets = torch.tensor([3, 19, 0, 0, 7, 19]), torch.arange(7)
    batch = Batch(ids, offsets, 7, True, 3, None, (ids, offsets))
    hook = torch.zeros(0, requires_grad=True)
    gradient = torch.linspace(-1e-3, 2e-3, 3 * 24).view(3, 24).bfloat16()
    engine.lookup(batch, engine.context(LookupOptions()), hook).backward(gradient)
    for table, (rows, part) in enumerate(zip(ids.view(2, 3).tolist(), config.parts, strict=True)):
        target = before[table][rows].float() - gradient[:, 12 * table : 12 * table + 12].float().cpu()
        whole = [part.first + part.step * row for row in rows]
        expected = expected_rows(torch.bfloat16, target, ids=whole, seed=9, table=part.number, step=1)
        assert equal(engine.tables.weight(table)[rows], expected)
    engine.tables.close()


OPTIMIZERS = {
    "SGD": te.SGD(lr=0.1),
    "Adagrad": te.Adagrad(lr=0.1),
    "row-wise Adagrad": te.RowWiseAdagrad(lr=0.1),
    "SparseAdam": te.SparseAdam(lr=0.01),
    "Adam, dense": te.Adam(lr=0.01, weight_decay=0.1),
    "RMSprop, dense": te.RMSprop(lr=0.01, alpha=0.9, momentum=0.5, centered=True),
    "Adamax, dense": te.Adamax(lr=0.01),
    "NAdam, dense": te.NAdam(lr=0.01),
    "SGD, dense": te.SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
}


def trained(
    optimizer, capacity, *, dtype=torch.bfloat16, depth=0, max_norm=None, steps=12, evaluates=False, **keywords
):
    """Outputs of all steps, and the rows in the end."""
    random = torch.Generator("cpu").manual_seed(0)
    module = bag(dtype, capacity=capacity, optimizer=OPTIMIZERS[optimizer], max_norm=max_norm, **keywords)
    device = module.tables.config.device
    batches = [(torch.rand((6, 3), generator=random, device="cpu") ** 2 * 50).long().to(device) for _ in range(steps)]
    found = []
    for number, ids in enumerate(te.prefetch(batches, module, depth) if depth else batches):
        if evaluates and number % 3 == 2:
            with torch.no_grad():
                found.append(module(ids).clone())
            continue
        out = module(ids)
        found.append(out.detach().clone())
        out.float().square().sum().backward()
    return [*found, weight(module)]


@pytest.mark.parametrize("max_norm", [None, 1.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_are_those_of_any_capacity_and_depth(device, optimizer, max_norm):
    whole = trained(optimizer, 50, max_norm=max_norm, evaluates=True)
    for capacity, depth in ((1, 0), (7, 0), (7, 2)):
        assert_same_bits(trained(optimizer, capacity, depth=depth, max_norm=max_norm, evaluates=True), whole)


@pytest.mark.parametrize(("optimizer", "dtype"), [*zip(OPTIMIZERS, itertools.cycle(HALVES), strict=False)])
def test_a_file_goes_on_with_the_same_bits(device, optimizer, dtype, tmp_path):
    whole = trained(optimizer, 50, dtype=dtype)
    assert_same_bits(trained(optimizer, 3, dtype=dtype, storage=te.File(str(tmp_path / "rows"))), whole)


@pytest.mark.parametrize("optimizer", ["SGD", "row-wise Adagrad", "Adam, dense"])
def test_seeds_and_rounding_to_nearest_give_other_bits(device, optimizer):
    ones = te.Normal(mean=1.0, std=0.0)
    found = [
        trained(optimizer, 50, init=ones, **keywords)[-1] for keywords in ({}, {"seed": 6}, {"rounding": "nearest"})
    ]
    for first, second in itertools.combinations(found, 2):
        assert not equal(first, second)


def test_captured_steps_have_the_bits_of_eager_ones(gpu):
    def run(graph):
        module = bag(torch.bfloat16, rows=200, width=16, capacity=30, optimizer=te.Adagrad(lr=0.1))

        def step(ids):
            module(ids).float().square().sum().backward()

        run_step = te.graph_step(step) if graph else step
        random = torch.Generator("cpu").manual_seed(3)
        for _ in range(12):
            run_step((torch.rand((8, 4), generator=random, device="cpu") ** 2 * 200).long().cuda())
        return [weight(module)]

    assert_same_bits(run(True), run(False))


def test_tables_that_share_a_cache_draw_for_themselves(device):
    def run(fetched):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
        model.forward = lambda batch: [table(ids) for table, ids in zip(model, batch, strict=True)]
        te.replace_embedding_bags(model, capacity=0.3, optimizer=optimizer, dtype=torch.bfloat16, rounding="stochastic")
        random = torch.Generator("cpu").manual_seed(1)
        batches = [torch.randint(30, (3, 5, 2), generator=random, device="cpu").to(device).unbind() for _ in range(8)]
        for batch in te.prefetch(batches, model) if fetched else batches:
            optimizer.zero_grad()
            sum(out.square().sum() for out in model(batch)).backward()
            optimizer.step()
        assert all(out.dtype is torch.float32 for out in model(batches[0]))  # as before the conversion
        return [each.cpu() for each in model.state_dict().values()]

    apart = run(fetched=False)
    assert_same_bits(run(fetched=True), apart)
    assert {each.dtype for each in apart} == {torch.bfloat16}
    assert not equal(apart[0], apart[1])


# --- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_below_half_a_gap_add_up(device, dtype):
    """Of 4,000 weights at 1 that 200 updates move up by a tenth of the gap each: the sum of independent roundings has a
    variance of at most a quarter gap² each, so the mean of all is off by more than five of its deviations once in
    1,700,000 runs."""
    rows, width, steps = 250, 16, 200
    gap = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-10
    means = {}
    for rounding in ("nearest", "stochastic"):
        module = te.TieredEmbeddingBag(
            rows, width, mode="sum", dtype=dtype, rounding=rounding, capacity=1.0, optimizer=te.SGD(lr=1.0), seed=1,
            init=te.Normal(mean=1.0, std=0.0),
        )  # fmt: skip
        ids = torch.arange(rows).view(-1, 1)
        gradient = torch.full((rows, width), -gap / 8, dtype=dtype)
        for _ in range(steps):
            module(ids).backward(gradient)
        means[rounding] = weight(module).double().mean().item()
    assert means["nearest"] == 1.0
    wanted = 1.0 + steps * gap / 8
    deviation = gap / 2 * 2 * math.sqrt(steps / (rows * width))  # the gap doubles at 2
    assert abs(means["stochastic"] - wanted) < 5 * deviation


# --- outputs and mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [torch.float32, torch.float16])
@pytest.mark.parametrize("pooled", [True, False])
def test_outputs_have_the_dtype_that_was_asked_for(device, pooled, out):
    make = te.TieredEmbeddingBag if pooled else te.TieredEmbedding
    keywords = {"mode": "sum"} if pooled else {}
    modules = [
        make(20, 8, capacity=3, dtype=torch.bfloat16, output_dtype=asked, optimizer=te.SGD(lr=0.1), seed=2, **keywords)
        for asked in (None, out)
    ]
    ids = torch.tensor([[1, 2, 19]])
    own, asked = (module(ids) for module in modules)
    assert (own.dtype, asked.dtype) == (torch.bfloat16, out)
    single = [module(torch.tensor([[7]])) for module in modules]
    assert equal(single[0].float(), single[1].float())
    for each in (own, asked):
        each.backward(torch.ones_like(each))
    assert equal(*map(weight, modules))
    collection = te.TieredEmbeddingBagCollection(
        [te.TableConfig(name="a", num_embeddings=5, embedding_dim=4)], dtype=torch.float16, output_dtype=out
    )
    assert collection(torch.tensor([1, 2]), torch.tensor([0, 2])).dtype is out


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"rounding": "stochastic"}, "those of table 'weight' are of float32; pass dtype=torch.bfloat16"),
        ({"rounding": "up", "dtype": torch.bfloat16}, "one of nearest, stochastic, got 'up'"),
        ({"rounding": None}, "one of nearest, stochastic, got None"),
        ({"output_dtype": torch.int32}, "output_dtype must be one of torch.float32, torch.float16, torch.bfloat16"),
    ],
)
def test_mistakes_are_told(keywords, said):
    with pytest.raises(ConfigError, match=said):
        te.TieredEmbeddingBag(10, 4, **keywords)
