"""`TieredEmbeddingBag` and `TieredEmbedding` against the torch modules they replace."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from devices import assert_close, equal, given_on_devices, on_cpu, randint, randn
from hypothesis import strategies as st
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, IdOutOfRangeError, InvalidInputError, UnsupportedError

TOLERANCE = {  # sums of up to 40 rows in float32, rounded once to the output's dtype: half an ulp of it, and slack
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
MODES = ["sum", "mean", "max"]


def pair(rows=50, width=5, **options):
    """A tiered module and torch's with the same weights."""
    tiered_only = {name: options.pop(name) for name in ("capacity", "optimizer", "check_ids") if name in options}
    ours = te.TieredEmbeddingBag(rows, width, **options, **tiered_only)
    theirs = on_cpu(nn.EmbeddingBag(rows, width, **options))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@st.composite
def bags(draw, rows=50):
    sizes = draw(st.lists(st.integers(0, 6), max_size=8))
    ids = draw(st.lists(st.integers(0, rows - 1), min_size=sum(sizes), max_size=sum(sizes)))
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64)


@given_on_devices(
    bags(), st.sampled_from(MODES), st.sampled_from([None, 3, -1]), st.integers(1, 50), st.booleans(), cuda=40
)
def test_forward_equals_torch_in_every_mode(device, batch, mode, padding_idx, capacity, narrow):
    ids, offsets = batch
    ours, theirs = pair(mode=mode, padding_idx=padding_idx, capacity=capacity)
    if narrow:
        ids, offsets = ids.int(), offsets.int()
    for _ in range(2):
        assert_close(ours(ids, offsets), theirs(ids, offsets))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", MODES)
def test_forward_equals_torch_in_every_dtype(device, mode, dtype):
    ours, theirs = pair(mode=mode, dtype=dtype, capacity=7)
    ids = randint(0, 50, (12, 40), seed=1)
    out = ours(ids)
    assert out.dtype == dtype
    assert_close(out, theirs(ids), **TOLERANCE[dtype])


@pytest.mark.parametrize("mode", MODES)
def test_offsets_may_include_the_last_one(device, mode):
    ours, theirs = pair(mode=mode, include_last_offset=True, capacity=7)
    ids, offsets = torch.tensor([1, 2, 3, 4, 4]), torch.tensor([0, 2, 2, 5])
    assert_close(ours(ids, offsets), theirs(ids, offsets))
    assert ours(ids[:0], torch.tensor([0])).shape == (0, 5)
    assert_close(ours(ids, torch.tensor([0, 2, 4])), theirs(ids[:4], torch.tensor([0, 2, 4])))


def test_two_dimensional_input_is_a_bag_a_row(device):
    ours, theirs = pair(mode="sum", capacity=3)
    for shape in ((4, 6), (4, 1), (1, 7), (4, 0), (0, 4)):
        ids = torch.randint(0, 50, shape)
        expected = theirs(ids) if ids.numel() else torch.zeros(shape[0], 5)
        assert_close(ours(ids), expected)


def test_empty_bags_and_empty_batches_are_zeros(device):
    for mode in MODES:
        ours, _ = pair(mode=mode)
        none = torch.empty(0, dtype=torch.int64)
        assert ours(none, torch.tensor([0, 0, 0])).tolist() == [[0.0] * 5] * 3
        assert ours(none, none).shape == (0, 5)
        assert ours(torch.tensor([1]), torch.tensor([0, 1]))[1].tolist() == [0.0] * 5


def test_non_contiguous_input_is_read_right(device):
    ours, theirs = pair(mode="sum", capacity=3)
    ids = torch.randint(0, 50, (6, 8))
    assert_close(ours(ids.t()), theirs(ids.t()))
    assert_close(ours(ids[:, ::2]), theirs(ids[:, ::2]))


@given_on_devices(bags(), st.integers(1, 50), st.sampled_from([None, 3]), cuda=25)
def test_per_sample_weights_and_their_gradient_equal_torch(device, batch, capacity, padding_idx):
    ids, offsets = batch
    ours, theirs = pair(mode="sum", capacity=capacity, padding_idx=padding_idx, optimizer=te.SGD(lr=0.0))
    weights = randn(len(ids), seed=0)
    mine, reference = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    out, expected = ours(ids, offsets, mine), theirs(ids, offsets, reference)
    assert_close(out, expected)
    upstream = randn(*out.shape, seed=1)
    out.backward(upstream)
    expected.backward(upstream.cpu())
    assert_close(mine.grad, reference.grad)


def test_per_sample_weights_gradient_uses_the_weights_of_the_forward(device):
    ours, theirs = pair(mode="sum", capacity=3, optimizer=te.SGD(lr=1.0))
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    weights = torch.ones(3, requires_grad=True)
    out = ours(ids, offsets, weights)
    ours(ids, offsets).sum().backward()  # updates the rows between forward and backward
    out.sum().backward()
    assert_close(weights.grad, theirs.weight.detach()[ids.cpu()].sum(1))


def test_per_sample_weights_get_a_gradient_where_the_table_is_frozen(device):
    ours, theirs = pair(mode="sum")
    ours.requires_grad_(False)
    weights = torch.ones(3, requires_grad=True)
    ours(torch.tensor([1, 2, 3]), torch.tensor([0, 2]), weights).sum().backward()
    assert_close(weights.grad, theirs.weight.detach()[1:4].sum(1))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_max_norm_limits_the_rows_looked_up_as_torch_does(device, norm_type):
    ours, theirs = pair(mode="sum", max_norm=1.0, norm_type=norm_type, capacity=2)
    ids, offsets = torch.tensor([1, 1, 2, 7, 8, 9]), torch.tensor([0, 3])
    with torch.no_grad():
        assert_close(ours(ids, offsets), theirs(ids, offsets))
        ours(torch.tensor([20, 21, 22]), torch.tensor([0]))
    theirs(torch.tensor([20, 21, 22]), torch.tensor([0]))
    assert_close(ours.state_dict()["weight"], theirs.state_dict()["weight"])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_scale_grad_by_freq_divides_by_the_occurrences_in_the_call(device, mode):
    ours = te.TieredEmbeddingBag(50, 5, mode=mode, scale_grad_by_freq=True, capacity=3, optimizer=te.SGD(lr=1.0))
    # torch 2.13 with scale_grad_by_freq divides by another row's count
    theirs = on_cpu(nn.EmbeddingBag(50, 5, mode=mode))
    theirs.load_state_dict(ours.state_dict())
    ids, offsets = torch.tensor([1, 1, 1, 2, 2, 7]), torch.tensor([0, 1, 5])
    ours(ids, offsets).square().sum().backward()
    theirs(ids, offsets).square().sum().backward()
    expected = theirs.weight.detach() - theirs.weight.grad / torch.bincount(ids.cpu(), minlength=50).clamp(1)[:, None]
    assert_close(ours.state_dict()["weight"], expected)


def test_scale_grad_by_freq_of_padding_alone_changes_nothing(device):
    ours = te.TieredEmbeddingBag(9, 4, mode="sum", padding_idx=2, scale_grad_by_freq=True, optimizer=te.SGD(lr=1.0))
    before = ours.state_dict()["weight"]
    for ids in (torch.tensor([[2, 2]]), torch.empty(0, 4, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64)):
        ours(ids).sum().backward()
    assert equal(ours.state_dict()["weight"], before)


def test_embedding_scale_grad_by_freq_equals_torch(device):
    ours = te.TieredEmbedding(9, 4, scale_grad_by_freq=True, optimizer=te.SGD(lr=1.0))
    theirs = on_cpu(nn.Embedding(9, 4, scale_grad_by_freq=True))
    theirs.load_state_dict(ours.state_dict())
    ids = torch.tensor([[1, 1, 8], [1, 0, 8]])
    ours(ids).sum().backward()
    theirs(ids).sum().backward()
    assert_close(ours.state_dict()["weight"], theirs.weight.detach() - theirs.weight.grad)


def test_max_gradient_goes_to_the_first_winner(device):
    ours = te.TieredEmbeddingBag(4, 4, mode="max", capacity=1, optimizer=te.SGD(lr=1.0))
    ours.load_state_dict({"weight": torch.tensor([[1.0, 5, 7, 1], [1, 2, 7, 2], [0, 5, 7, 2], [9, 9, 9, 9]])})
    ours(torch.tensor([0, 1, 2]), torch.tensor([0])).sum().backward()
    assert ours.state_dict()["weight"].tolist() == [[0.0, 4, 6, 1], [1, 2, 7, 1], [0, 5, 7, 2], [9, 9, 9, 9]]


def test_constructor_takes_the_arguments_of_torch_in_their_order():
    for ours, theirs in ((te.TieredEmbeddingBag, nn.EmbeddingBag), (te.TieredEmbedding, nn.Embedding)):
        mine = list(inspect.signature(ours.__init__).parameters.values())
        torchs = list(inspect.signature(theirs.__init__).parameters.values())
        assert [p.name for p in mine if p.kind is not p.KEYWORD_ONLY] == [p.name for p in torchs]
        assert [p.default for p in mine if p.kind is not p.KEYWORD_ONLY] == [p.default for p in torchs]
        assert [*inspect.signature(ours.forward).parameters] == [*inspect.signature(theirs.forward).parameters]


def test_from_pretrained_serves_the_given_rows_frozen_or_not(device):
    rows = torch.randn(20, 4)
    frozen = te.TieredEmbeddingBag.from_pretrained(rows, mode="sum", capacity=0.1)
    out = frozen(torch.tensor([[3, 4]]))
    assert not out.requires_grad
    assert_close(out[0], rows[3] + rows[4])
    trained = te.TieredEmbeddingBag.from_pretrained(rows, False, mode="sum", optimizer=te.SGD(lr=1.0))
    trained(torch.tensor([[3]])).sum().backward()
    assert equal(trained.state_dict()["weight"][3], rows[3] - 1)
    with pytest.raises(ConfigError, match="freeze=False"):
        te.TieredEmbeddingBag.from_pretrained(rows, optimizer=te.SGD(lr=1.0))
    embedding = te.TieredEmbedding.from_pretrained(rows, padding_idx=2)
    assert equal(embedding(torch.tensor([2, 5])), rows[[2, 5]])
    with pytest.raises(ConfigError, match="two dimensions"):
        te.TieredEmbedding.from_pretrained(rows[0])


# --- TieredEmbedding --------------------------------------------------------------------------------------------------


@given_on_devices(
    st.integers(1, 30),
    st.sampled_from([None, 0, -1]),
    st.sampled_from([(), (0,), (5,), (2, 3), (2, 3, 4)]),
    cpu=30,
    cuda=15,
)
def test_embedding_equals_torch_forward_and_backward(device, capacity, padding_idx, shape):
    ours = te.TieredEmbedding(30, 4, padding_idx=padding_idx, capacity=capacity, optimizer=te.Adagrad(lr=0.1))
    theirs = on_cpu(nn.Embedding(30, 4, padding_idx=padding_idx))
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for seed in range(3):
        ids = randint(0, 30, shape, seed=seed)
        out, expected = ours(ids), theirs(ids)
        assert_close(out, expected)
        upstream = randn(*out.shape, seed=seed)
        optimizer.zero_grad()
        out.backward(upstream)
        expected.backward(upstream.cpu())
        optimizer.step()
    assert_close(ours.state_dict()["weight"], theirs.state_dict()["weight"])


def test_embedding_reads_the_padding_row_and_never_trains_it(device):
    rows = torch.randn(5, 4)
    ours = te.TieredEmbedding.from_pretrained(rows, False, padding_idx=1, optimizer=te.SparseAdam(lr=0.5), capacity=1)
    for _ in range(2):
        out = ours(torch.tensor([1, 2, 1]))
        assert equal(out[0], rows[1])
        out.sum().backward()
    a, b = ours(torch.tensor([1, 3])), ours(torch.tensor([3, 1]))
    (a + b).sum().backward()
    weight = ours.state_dict()["weight"]
    assert equal(weight[1], rows[1])
    assert not equal(weight[2], rows[2])
    assert not equal(weight[3], rows[3])


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 50, 2**31, 2**40, -(2**62)])
@pytest.mark.parametrize("position", [0, 3, 8])
def test_id_out_of_range_names_table_id_and_position_and_changes_nothing(device, bad, position):
    ours, _ = pair(mode="sum", optimizer=te.SGD(lr=1.0), capacity=3, check_ids="always")
    ids = torch.arange(9)
    ids[position] = bad
    before, stats = ours.state_dict()["weight"], ours.stats()
    with pytest.raises(IdOutOfRangeError, match=rf"id {bad} at position {position} .*'weight' \(0 … 49\)"):
        ours(ids, torch.tensor([0, 4]))
    assert equal(ours.state_dict()["weight"], before)
    assert ours.stats().lookups == stats.lookups


def test_bad_id_in_one_width_leaves_the_tables_of_another_alone(device):
    tables = [te.TableConfig(name=n, num_embeddings=9, embedding_dim=d) for n, d in (("a", 4), ("b", 5))]
    model = te.TieredEmbeddingBagCollection(tables, capacity=2, max_norm=0.1, check_ids="always")
    before = model.state_dict()
    with pytest.raises(IdOutOfRangeError, match="table 'b'"):
        model(torch.tensor([1, 9]), torch.tensor([0, 1, 2]))
    assert model.stats().lookups == 0
    for name, weight in model.state_dict().items():
        assert equal(weight, before[name])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2], r"offsets\[0\] must be 0"),
        ([0, 3, 2], r"offsets\[2\] = 2 after offsets\[1\] = 3"),
        ([0, 7], r"beyond the 6 ids"),
        ([0, -1], r"offsets\[1\] = -1"),
        ([[0, 2]], "one dimension"),
    ],
)
def test_wrong_offsets_are_refused(device, offsets, message):
    for last in (False, True):
        ours = te.TieredEmbeddingBag(50, 5, mode="sum", include_last_offset=last, check_ids="always")
        with pytest.raises(InvalidInputError, match=message):
            ours(torch.arange(6), torch.tensor(offsets))


@pytest.mark.parametrize(
    ("make_arguments", "message"),
    [
        (lambda: (torch.arange(4).float(), torch.tensor([0])), "must be int32 or int64"),
        (lambda: (torch.arange(4).bool(), torch.tensor([0])), "must be int32 or int64"),
        (lambda: (torch.arange(4), torch.tensor([0.0])), "must be int32 or int64"),
        (lambda: (torch.arange(4), None), "offsets is missing"),
        (lambda: (torch.arange(4).reshape(2, 2), torch.tensor([0])), "must be None for 2-D"),
        (lambda: (torch.arange(8).reshape(2, 2, 2),), "one or two dimensions"),
        (lambda: ([1, 2], torch.tensor([0])), "must be a tensor"),
        (lambda: (torch.arange(4), torch.tensor([0]), torch.ones(3)), "same shape as the input"),
        (lambda: (torch.arange(4), torch.tensor([0]), torch.ones(4).long()), "same type as the rows"),
        (lambda: (torch.zeros(1, dtype=torch.int64).expand(2**31), torch.tensor([0])), "split the batch"),
        (lambda: (torch.arange(4), torch.tensor([0]), torch.ones(4, device="meta")), "are on meta"),
        (lambda: (torch.arange(4, device="meta"), torch.tensor([0])), "is on meta"),
    ],
)
def test_wrong_arguments_are_refused(device, make_arguments, message):
    bag = te.TieredEmbeddingBag(50, 2, mode="sum")
    with pytest.raises(InvalidInputError, match=message):
        bag(*make_arguments())
    assert bag.stats().batches == 0


def test_include_last_offset_needs_an_offset(device):
    with pytest.raises(InvalidInputError, match="at least one"):
        te.TieredEmbeddingBag(50, 2, include_last_offset=True)(torch.arange(0), torch.arange(0))


def test_per_sample_weights_need_sums(device):
    with pytest.raises(InvalidInputError, match="mode='sum'"):
        te.TieredEmbeddingBag(50, 2, mode="mean")(torch.arange(4), torch.tensor([0]), torch.ones(4))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings"),
        ({"embedding_dim": -1}, "embedding_dim"),
        ({"num_embeddings": 2.5}, "num_embeddings"),
        ({"mode": "median"}, "mode"),
        ({"padding_idx": 10}, "padding_idx 10"),
        ({"padding_idx": -11}, "padding_idx -11"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": 0.0}, "share"),
        ({"capacity": 1.5}, "share"),
        ({"capacity": True}, "capacity"),
        ({"capacity": "12 parsecs"}, r"or bytes \('512MiB'\), got '12 parsecs'"),
        ({"capacity": "8B"}, "holds no row"),
        ({"policy": "lru"}, "policy"),
        ({"storage": "host"}, "storage"),
        ({"storage": ""}, "storage"),
        ({"init": 0}, "init"),
        ({"storage": te.HostMemory}, "storage"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"optimizer": te.SGD}, "optimizer"),
        ({"seed": -1}, "seed"),
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.int8}, "int8"),
        ({"max_norm": -1.0}, "max_norm"),
        ({"max_norm": math.nan}, "max_norm"),
        ({"norm_type": 0}, "norm_type"),
        ({"init": 3.0}, "init"),
        ({"mode": "max", "scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"_weight": torch.zeros(3, 3)}, "_weight"),
    ],
)
def test_constructor_refuses_by_name_what_it_cannot_do(keywords, message):
    with pytest.raises(ConfigError, match=message):
        te.TieredEmbeddingBag(**{"num_embeddings": 10, "embedding_dim": 4} | keywords)


def test_device_without_kernels_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="'meta' has no kernels"):
        te.TieredEmbeddingBag(10, 4, device="meta")


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("meta"),
        lambda m: m.share_memory(),
    ],
)
def test_conversions_of_the_rows_are_refused(device, call):
    model = nn.Sequential(te.TieredEmbeddingBag(10, 4), nn.Linear(4, 1))
    with pytest.raises(UnsupportedError):
        call(model[0])
    model.float().to(device).train().eval()


def test_conversion_offers_only_dtypes_that_a_module_is_built_with():
    bag = te.TieredEmbeddingBag(10, 4, device="cpu")
    for convert in (bag.double, bag.half, bag.bfloat16):
        with pytest.raises(UnsupportedError, match="build the module with dtype= one of") as refused:
            convert()
        advice = str(refused.value).partition("build the module")[2]
        offered = re.findall(r"torch\.(\w+)", advice)
        assert offered == ["float32", "float16", "bfloat16"]
        for name in offered:
            te.TieredEmbeddingBag(10, 4, device="cpu", dtype=getattr(torch, name))


def cache_bytes(module):
    """Bytes of all caches, without batch buffers."""
    report = module.memory_report()
    return sum(sum(report[f"width {group.space.width}"]["cache"].values()) for group in module.tables.groups)


def test_capacity_in_bytes_covers_everything_but_batch_buffers(device):
    bag = te.TieredEmbeddingBag(100_000, 16, capacity="1MiB", optimizer=te.Adagrad())
    assert 2**20 * 0.99 < cache_bytes(bag) <= 2**20


@pytest.mark.parametrize("capacity", ["1MiB", 5000, 0.001])
def test_capacity_is_shared_among_widths_by_rows(device, capacity):
    tables = [
        te.TableConfig(name=name, num_embeddings=rows, embedding_dim=width)
        for name, rows, width in (("large", 100_000, 64), ("half", 50_000, 8), ("tiny", 3, 5))
    ]
    model = te.TieredEmbeddingBagCollection(tables, capacity=capacity, optimizer=te.Adagrad())
    slots = {group.space.width: group.cache.slots for group in model.tables.groups}
    assert slots[5] == 1
    assert slots[64] == pytest.approx(2 * slots[8], abs=2)
    used = cache_bytes(model)
    if isinstance(capacity, str):
        assert 2**20 * 0.99 < used <= 2**20
    if isinstance(capacity, int):
        assert capacity - 3 <= sum(slots.values()) <= capacity + 1


def test_capacity_in_bytes_needs_a_row_of_each_width():
    tables = [te.TableConfig(name=str(width), num_embeddings=9, embedding_dim=width) for width in (4, 8)]
    with pytest.raises(ConfigError, match="no row of each of 2 caches"):
        te.TieredEmbeddingBagCollection(tables, capacity="100B")


def test_max_norm_is_kept_when_the_row_leaves_the_cache(device):
    ours = te.TieredEmbeddingBag(50, 4, mode="sum", max_norm=1.0, capacity=1)
    ours.load_state_dict({"weight": torch.full((50, 4), 3.0)})
    with torch.no_grad():
        for row in (1, 2, 3):
            ours(torch.tensor([[row]]))
    norms = ours.state_dict()["weight"].norm(dim=1)
    assert_close(norms[:5], torch.tensor([6.0, 1.0, 1.0, 1.0, 6.0]))


def test_the_first_of_several_ids_out_of_range_is_named(device):
    embedding = te.TieredEmbedding(50, 5, capacity=1.0, check_ids="always")
    ids = torch.zeros(200_000, dtype=torch.int64)
    ids[[70_000, 150_000, 199_999]] = 50
    with pytest.raises(IdOutOfRangeError, match="position 70000 "):
        embedding(ids)


@pytest.mark.parametrize(
    ("capacity", "slots"),
    [(7, 7), (1000, 100), (0.5, 50), (0.001, 1), (1.0, 100), ("640B", 10), ("1KiB", 16), ("1.28 kB", None)],
)
def test_capacity_in_rows_share_or_bytes(capacity, slots):
    from tieredemb.config import slots_for

    if slots is None:
        with pytest.raises(ConfigError, match="capacity must be rows"):
            slots_for(capacity, rows=100, slot_bytes=64)
    else:
        assert slots_for(capacity, rows=100, slot_bytes=64) == slots


def test_capacity_in_bytes_is_never_exceeded_by_several_widths(device):
    tables = [
        te.TableConfig(name=str(width), num_embeddings=rows, embedding_dim=width)
        for rows, width in ((3, 4), (2000, 8), (500, 16))
    ]
    for budget in range(400, 3000, 61) if device == "cpu" else range(2000, 20_000, 1777):
        model = te.TieredEmbeddingBagCollection(tables, capacity=f"{budget}B")
        assert cache_bytes(model) <= budget
