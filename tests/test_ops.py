"""Operators of torch's dispatcher: what they compute, that torch accepts them, and that a compiler keeps them whole."""

from __future__ import annotations

import forks
import pytest
import torch
from devices import assert_close, equal, randint, randn
from torch.nn.functional import embedding_bag

import tieredemb as te
from tieredemb.errors import InvalidInputError
from tieredemb.ops import pooled_lookup

MODES = ("sum", "mean", "max")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OP = torch.ops.tieredemb.pooled_lookup.default


def batch(rows, width, *, dtype=torch.float32, seed=0, bags=7, most=5, padding=True):
    """Integer rows, so that sums are exact in any order, and bags of 0 … `most` homes, some of them padding."""
    weight = randint(-4, 5, (rows, width), seed=seed).to(dtype)
    lengths = randint(0, most + 1, (bags,), seed=seed + 1)
    lengths[0] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    homes = randint(-1 if padding else 0, rows, (int(lengths.sum()),), seed=seed + 2).to(torch.int32)
    return weight, homes, offsets


def expected(weight, homes, offsets, weights=None, mode="sum"):
    """torch's on the CPU, with one row more for padding, which it skips too."""
    weight, homes, offsets = weight.cpu(), homes.cpu(), offsets.cpu()
    weights = None if weights is None else weights.cpu()
    rows = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    ids = torch.where(homes < 0, len(weight), homes.long())
    return embedding_bag(
        ids, rows, offsets, mode=mode, per_sample_weights=weights, padding_idx=len(weight), include_last_offset=True
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [1, 3, 8, 130])
def test_pooled_lookup_equals_that_of_torch(device, width, mode, dtype):
    weight, homes, offsets = batch(11, width, dtype=dtype)
    out = pooled_lookup(weight, homes, offsets, mode=mode)
    assert out.dtype == dtype
    assert equal(out, expected(weight.float(), homes, offsets, mode=mode).to(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_pooled_lookup_gives_the_bits_of_the_modules(device, mode):
    bag = te.TieredEmbeddingBag(50, 6, mode=mode, capacity=4, include_last_offset=True)
    weight = bag.state_dict()["weight"].to(torch.get_default_device())
    _, homes, offsets = batch(50, 6, padding=False, bags=40)
    assert equal(pooled_lookup(weight, homes, offsets, mode=mode), bag(homes, offsets))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bags", "most"), [(7, 5), (40, 30)])  # 40 bags of 15 over 3 rows: 190 occurrences a row
def test_gradient_of_rows_equals_that_of_torch(device, bags, most, mode):
    weight, homes, offsets = batch(3, 6, bags=bags, most=most)
    upstream = randint(-4, 5, (bags, 6), seed=9).float()
    ours, theirs = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    pooled_lookup(ours, homes, offsets, mode=mode).backward(upstream)
    expected(theirs, homes, offsets, mode=mode).backward(upstream.cpu())
    if mode == "mean":
        assert_close(ours.grad, theirs.grad)
    else:
        assert equal(ours.grad, theirs.grad)


def test_gradient_is_summed_in_float32_and_rounded_once(device):
    """2,048 + 1 + 1 is 2,050 in float16, but 2,048 where every sum is rounded."""
    weight = torch.zeros(1, 1, dtype=torch.float16, requires_grad=True)
    upstream = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    pooled_lookup(weight, torch.zeros(3, dtype=torch.int32), torch.arange(4)).backward(upstream)
    assert weight.grad.tolist() == [[2050.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_per_sample_weights_and_their_gradient_equal_those_of_torch(device, dtype):
    weight, homes, offsets = batch(11, 6)
    upstream = randint(-4, 5, (7, 6), seed=9).float()
    factors = randint(-4, 5, (len(homes),), seed=8)
    ours, theirs = factors.to(dtype).requires_grad_(), factors.float().requires_grad_()
    rows, reference = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    out, other = pooled_lookup(rows, homes, offsets, ours), expected(reference, homes, offsets, theirs)
    assert equal(out, other)
    out.backward(upstream)
    other.backward(upstream.cpu())
    assert ours.grad.dtype == dtype
    assert equal(ours.grad.float(), theirs.grad)
    assert equal(rows.grad, reference.grad)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_look_up_gives_zeros(device, mode):
    weight = torch.ones(3, 4, requires_grad=True)
    for homes, bags in (([], 0), ([], 2), ([-1, -7, -(2**31)], 1)):
        edges = torch.tensor([0] + [len(homes)] * bags)
        out = pooled_lookup(weight, torch.tensor(homes, dtype=torch.int32), edges, mode=mode)
        assert equal(out, torch.zeros(bags, 4))
        weight.grad = None
        out.sum().backward()
        assert equal(weight.grad, torch.zeros(3, 4))


def test_rows_may_be_written_between_forward_and_backward_unless_it_reads_them(device):
    weight, homes, offsets = batch(5, 4)
    for mode, reads in (("sum", False), ("mean", False), ("max", True)):
        rows = weight.clone().requires_grad_()
        out = pooled_lookup(rows, homes, offsets, mode=mode)
        with torch.no_grad():
            rows.add_(1)
        if reads:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


# --- as torch sees them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "trained"),
    [("sum", "weights"), ("sum", "both"), *((mode, trained) for mode in MODES for trained in ("nothing", "rows"))],
)
def test_operator_passes_the_checks_of_torch(device, mode, trained):
    weight, homes, offsets = batch(11, 6)
    weight.requires_grad_(trained in ("rows", "both"))
    weighted = trained in ("weights", "both")
    factors = randn(len(homes), seed=3).requires_grad_() if weighted else None
    torch.library.opcheck(OP, (weight, homes, offsets, factors, mode))


@pytest.mark.parametrize("mode", MODES)
def test_operators_of_the_backward_pass_the_checks_of_torch(device, mode):
    weight, homes, offsets = batch(11, 6)
    grad, factors = randn(7, 6, seed=4), randn(len(homes), seed=3) if mode == "sum" else None
    rows = weight if mode == "max" else None
    backward = torch.ops.tieredemb.pooled_lookup_rows_gradient.default
    torch.library.opcheck(backward, (grad, rows, homes, offsets, factors, 11, mode))
    torch.library.opcheck(torch.ops.tieredemb.pooled_lookup_weights_gradient.default, (grad, weight, homes, offsets))


@pytest.mark.parametrize("mode", MODES)
def test_compiled_lookup_is_one_graph_for_any_number_of_homes(device, mode):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def loss_of(weight, homes, offsets, factors):
        return (pooled_lookup(weight, homes, offsets, factors, mode=mode) * 2).square().sum()

    compiled = torch.compile(loss_of, backend=backend, fullgraph=True, dynamic=True)
    for seed in range(6):
        weight, homes, offsets = batch(
            11, 6, seed=10 * seed, bags=20 + seed
        )  # sizes that agree by chance are taken for one
        factors = randn(len(homes), seed=seed) if mode == "sum" else None
        grads = []
        for function in (compiled, loss_of):
            inputs = [x if x is None else x.clone().requires_grad_() for x in (weight, factors)]
            function(inputs[0], homes, offsets, inputs[1]).backward()
            grads.append([x.grad for x in inputs if x is not None])
        assert all(equal(mine, other) for mine, other in zip(*grads, strict=True))
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_import_of_the_package_leaves_operators_out():
    code = "import sys, tieredemb; sys.exit('tieredemb.ops' in sys.modules)"
    assert forks.run(code, base=forks.TORCH).returncode == 0


def test_operators_do_not_import_the_compiler_before_they_are_called():
    code = "import sys, tieredemb.ops; sys.exit('torch._dynamo' in sys.modules or 'numba' in sys.modules)"
    assert forks.run(code, base=forks.TORCH).returncode == 0


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG = {
    r"mode must be one of sum, mean, max, got 'min'": {"mode": "min"},
    r"float32, float16 or bfloat16 of shape \(C, D\).*float64": {"weight": lambda w: w.double()},
    r"at least one row and column.*\(0, 6\)": {"weight": lambda w: w[:0]},
    r"weight must be contiguous": {"weight": lambda w: w.t()},
    r"homes must be torch.int32 .*int64": {"homes": lambda h: h.long()},
    r"homes must be torch.int32 with one dimension.*\(1, 4\)": {"homes": lambda h: h.reshape(1, -1)},
    r"offsets must be torch.int64 .*int32": {"offsets": lambda o: o.int()},
    r"offsets has B \+ 1 elements": {"offsets": lambda o: o[:0]},
    r"floats of the homes' shape \(4,\).*\(3,\)": {"weights": lambda _: torch.ones(3)},
    r"must be floats .*int64": {"weights": lambda _: torch.ones(4, dtype=torch.int64)},
    r"per_sample_weights needs mode='sum', got mode='max'": {"weights": lambda _: torch.ones(4), "mode": "max"},
}


def arguments(changes):
    given = {
        "weight": torch.ones(5, 6),
        "homes": torch.tensor([0, 4, -1, 2], dtype=torch.int32),
        "offsets": torch.tensor([0, 3, 4]),
        "weights": None,
        "mode": "sum",
    }
    return {name: changes[name](value) if callable(changes.get(name)) else changes.get(name, value)
            for name, value in given.items()}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused(device, message):
    with pytest.raises(InvalidInputError, match=message):
        OP(*arguments(WRONG[message]).values())


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"homes\[1\] = 5 is out of range: the rows are 0 … 4", {"homes": torch.tensor([0, 5, 9], dtype=torch.int32)}),
        (r"offsets\[0\] must be 0", {"offsets": torch.tensor([1, 3])}),
        (r"offsets must not fall", {"offsets": torch.tensor([0, 3, 2, 3])}),
        (r"beyond the 3 ids", {"offsets": torch.tensor([0, 4])}),
        (r"the last offset is 2, and must be the number of homes, 3", {"offsets": torch.tensor([0, 2])}),
    ],
)
def test_values_out_of_range_are_refused_on_the_cpu(message, changes):
    given = {"homes": torch.zeros(3, dtype=torch.int32), "offsets": torch.tensor([0, 3])} | changes
    with pytest.raises(InvalidInputError, match=message):
        pooled_lookup(torch.ones(5, 6), given["homes"], given["offsets"])


# --- on a GPU alone ---------------------------------------------------------------------------------------------------


def test_values_out_of_range_reach_no_memory_on_a_gpu(gpu):
    """Nobody sees them there: homes beyond the rows are padding, offsets are cut."""
    weight = torch.ones(5, 6, requires_grad=True)
    homes = torch.tensor([0, 5, 2**31 - 1, 4], dtype=torch.int32)
    out = pooled_lookup(weight, homes, torch.tensor([-(2**40), 3, 2**40]))
    assert out[:, 0].tolist() == [1.0, 1.0]
    out.sum().backward()
    assert weight.grad[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
    pooled_lookup(weight, homes, torch.tensor([2, 4, 1, 9])).sum().backward()  # any numbers, but no fault


def test_tensors_on_several_devices_are_refused(gpu):
    given = arguments({})
    for name in ("homes", "offsets"):
        with pytest.raises((InvalidInputError, RuntimeError), match="cpu"):
            OP(*(given | {name: given[name].cpu()}).values())


def test_rows_that_start_off_a_vector_are_refused(gpu):
    weight = torch.ones(41)[1:].reshape(5, 8)
    with pytest.raises(InvalidInputError, match="must start at a multiple of 16 bytes"):
        pooled_lookup(weight, torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1]))
    assert (
        pooled_lookup(torch.ones(16)[1:].reshape(5, 3), torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1])).sum()
        == 3
    )


@pytest.mark.parametrize("mode", MODES)
def test_lookup_and_backward_do_not_wait_for_the_gpu_and_can_be_captured(gpu, mode):
    weight, homes, offsets = batch(11, 6)
    weight.requires_grad_()
    factors = randn(len(homes), seed=3).requires_grad_() if mode == "sum" else None

    def step():
        out = pooled_lookup(weight, homes, offsets, factors, mode)
        return torch.autograd.grad(out.square().sum(), [x for x in (weight, factors) if x is not None])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        wanted = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(equal(mine, other) for mine, other in zip(captured, wanted, strict=True))
