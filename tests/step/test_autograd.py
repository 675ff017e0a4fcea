"""The protocol between forward, backward and other calls (tickets): what one backward pass collects, and when."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading

import pytest
import torch
from devices import assert_close, equal, idle
from failing import FailsBackward
from torch import nn
from torch.utils.checkpoint import checkpoint

import tieredemb as te
from tieredemb.errors import BackwardError, ConfigError, StorageError, UnsupportedError

ROWS, WIDTH = 30, 4


def make(capacity=3, optimizer=None, **keywords):
    # without an initial accumulator Adagrad's first step has the size lr: tests would see the gradient's sign alone
    optimizer = optimizer or te.Adagrad(lr=0.5, initial_accumulator_value=0.1)
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=optimizer, **keywords)
    reference = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    reference.load_state_dict(bag.state_dict())
    return bag, reference, torch.optim.Adagrad(reference.parameters(), lr=0.5, initial_accumulator_value=0.1)


def ids(*values):
    return torch.tensor([values])


def assert_rows_equal(bag, reference):
    assert_close(bag.state_dict()["weight"], reference.weight.detach())


def test_two_calls_in_one_backward_are_one_step(device):
    bag, reference, optimizer = make()
    for _ in range(3):
        for model in (bag, reference):
            out = model(ids(1, 2, 3)) * 2 + model(ids(3, 4, 4)) * model(ids(9, 1, 1))
            out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_rows_equal(bag, reference)
    assert idle(bag)


def test_two_calls_of_different_size_in_one_backward(device):
    bag, reference, optimizer = make()
    for model in (bag, reference):
        a = model(torch.tensor([1, 2, 3, 1]), torch.tensor([0, 1, 3]))
        b = model(torch.tensor([3, 7]), torch.tensor([0]))
        (a.sum() * 3 + b.square().sum()).backward()
    optimizer.step()
    assert_rows_equal(bag, reference)


def test_two_max_calls_in_one_backward_keep_their_winners_apart(device):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="max", capacity=2, optimizer=te.SGD(lr=1.0))
    reference = nn.EmbeddingBag(ROWS, WIDTH, mode="max")
    reference.load_state_dict(bag.state_dict())
    for model in (bag, reference):
        (model(ids(1, 2, 3)).sum() + 2 * model(torch.tensor([[4, 5], [2, 1]])).sum()).backward()
    assert_close(bag.state_dict()["weight"], reference.weight.detach() - reference.weight.grad)


def test_evaluation_between_forward_and_backward_changes_nothing(device):
    bag, reference, optimizer = make(capacity=2)
    out = bag(ids(1, 2))
    with torch.no_grad():
        for first in range(0, ROWS, 3):
            bag(ids(first, first + 1, first + 2))
    out.sum().backward()
    reference(ids(1, 2)).sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)


def test_forwards_may_be_backpropagated_in_another_order(device):
    bag, reference, _ = make(capacity=1, optimizer=te.SGD(lr=0.5))
    sgd = torch.optim.SGD(reference.parameters(), lr=0.5)
    first, second = bag(ids(1, 2)), bag(ids(2, 3))
    second.sum().backward()
    first.sum().backward()
    for batch in (ids(2, 3), ids(1, 2)):
        sgd.zero_grad()
        reference(batch).sum().backward()
        sgd.step()
    assert_rows_equal(bag, reference)


def test_a_forward_whose_backward_never_comes_is_released(device):
    bag, _, _ = make()
    out = bag(ids(1, 2))
    assert not idle(bag)
    del out
    assert idle(bag)
    with torch.no_grad():
        bag(ids(5, 6, 7))
    assert idle(bag)


def test_second_backward_through_one_forward_raises_and_updates_once(device):
    bag, reference, optimizer = make()
    out = bag(ids(1, 2)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(BackwardError, match="backpropagated already"):
        out.backward()
    reference(ids(1, 2)).sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)


def test_double_backward_raises(device):
    bag, _, _ = make()
    weights = torch.ones(1, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(bag(ids(1, 2), None, weights).square().sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gradients_of_other_inputs_alone_leave_the_rows(device):
    """As torch does, which touches a parameter's gradient only where it is asked for."""
    bag, reference, optimizer = make()
    before = bag.state_dict()["weight"]
    weights = torch.ones(1, 2, requires_grad=True)
    out = bag(ids(1, 2), None, weights).square().sum()
    (gradient,) = torch.autograd.grad(out, weights, retain_graph=True)
    out.backward(inputs=[weights], retain_graph=True)
    assert equal(gradient, weights.grad)
    assert equal(bag.state_dict()["weight"], before)
    out.backward()
    reference(ids(1, 2)).square().sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)
    assert idle(bag)


def test_frozen_module_may_be_backpropagated_twice(device):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=1).requires_grad_(False)
    before = bag.state_dict()["weight"]
    weights = torch.ones(1, 2, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda w: bag(ids(1, 2), None, w), weights)
    assert_close(jacobian[0, :, 0].T, before[1:3])
    bag(ids(1, 2), None, weights)
    assert idle(bag)


def test_backward_without_an_optimizer_names_the_argument(device):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum")
    before = bag.state_dict()["weight"]
    with pytest.raises(BackwardError, match="optimizer="):
        bag(ids(1, 2)).sum().backward()
    assert equal(bag.state_dict()["weight"], before)
    with pytest.raises(ConfigError, match="optimizer="):
        bag.fused_optimizer  # noqa: B018


def test_frozen_module_leaves_the_dense_part_to_train(device):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum")
    model = nn.Sequential(bag, nn.Linear(WIDTH, 1))
    bag.requires_grad_(False)
    model(ids(1, 2)).sum().backward()
    assert model[1].weight.grad is not None
    assert idle(bag)


def test_a_failed_backward_updates_nothing_and_the_next_one_works(device):
    bag, reference, optimizer = make()
    early = FailsBackward.apply(torch.zeros(1, WIDTH, requires_grad=True))
    out = bag(ids(1, 2)) + bag(ids(4, 5)) * early
    before = bag.state_dict()["weight"]
    with pytest.raises(RuntimeError, match="planted"):
        out.sum().backward()
    assert equal(bag.state_dict()["weight"], before)
    del out
    gc.collect()
    for model in (bag, reference):
        model(ids(7, 8)).sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)
    assert idle(bag)


def test_a_failed_backward_leaves_nothing_in_flight(device):
    bag, _, _ = make()

    early = FailsBackward.apply(torch.zeros(1, WIDTH, requires_grad=True))
    out = bag(ids(1, 2)) + bag(ids(4, 5)) * early
    with pytest.raises(RuntimeError, match="planted"):
        out.sum().backward()
    del out, early
    assert idle(bag)
    copy.deepcopy(bag)


def test_a_backward_started_by_a_callback_of_another_is_a_step_of_its_own(device):
    bag, reference, optimizer = make()

    class Queues(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            torch.autograd.Variable._execution_engine.queue_callback(torch.enable_grad()(another))
            return grad

    batch = ids(2, 5)  # made here: the default device is a thread's own

    def another():
        bag(batch).sum().backward()

    early = Queues.apply(torch.zeros(1, WIDTH, requires_grad=True))
    (bag(ids(1, 2)) + early).sum().backward()
    for batch in (ids(1, 2), ids(2, 5)):
        optimizer.zero_grad()
        reference(batch).sum().backward()
        optimizer.step()
    assert_rows_equal(bag, reference)
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == 2


# --- threads ----------------------------------------------------------------------------------------------------------


def test_backward_passes_on_two_threads_are_two_steps(device):
    bag, reference, optimizer = make()
    reached, go_on = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            reached.set()
            assert go_on.wait(30)
            return grad

    # on the CPU, as a GPU's nodes run on one thread for all passes, which a node that waits would hold up
    early = Waits.apply(torch.zeros(1, WIDTH, requires_grad=True, device="cpu")).to(device)
    out = bag(ids(1, 2)) + early  # the lookup's node runs first: it was made last
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    assert reached.wait(30)
    bag(ids(2, 3)).sum().backward()
    reference(ids(2, 3)).sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)
    go_on.set()
    thread.join()
    optimizer.zero_grad()
    reference(ids(1, 2)).sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == 2
    assert idle(bag)


def test_lookup_and_update_wait_for_the_cache_s_lock(device):
    bag, _, _ = make()
    out, batch = bag(ids(1, 2)), ids(3)
    before = bag.state_dict()["weight"]
    for work in (lambda: out.sum().backward(), lambda: bag(batch)):
        thread = threading.Thread(target=work)
        with bag.tables.locked():
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
            assert equal(bag.state_dict()["weight"], before)
        thread.join()
        before = bag.state_dict()["weight"]


def test_everything_that_touches_hot_rows_holds_the_lock(monkeypatch):
    import tieredemb.step.host_call as call

    bag, _, _ = make(max_norm=1.0)
    (group,) = bag.tables.groups
    seen = []
    for name in ("limit_norms", "pool", "update"):
        original = getattr(call, name)

        def checked(*arguments, name=name, original=original):
            seen.append((name, group.cache.lock._is_owned()))
            return original(*arguments)

        monkeypatch.setattr(call, name, checked)
    bag(ids(1, 2)).sum().backward()
    assert seen == [("limit_norms", True), ("pool", True), ("update", True)]


def test_training_on_several_threads_loses_no_update(device):
    rows, steps = 4, 100
    bag = te.TieredEmbeddingBag(rows, WIDTH, mode="sum", capacity=1, optimizer=te.SGD(lr=1.0))
    bag.load_state_dict({"weight": torch.zeros(rows, WIDTH)})

    def work(batch):
        for _ in range(steps):
            bag(batch).sum().backward()

    threads = [threading.Thread(target=work, args=(ids(row),)) for row in range(rows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(bag.state_dict()["weight"], torch.full((rows, WIDTH), -float(steps)))
    assert bag.fused_optimizer.state_dict()["state"][0]["step"] == rows * steps


def test_max_norm_holds_while_other_threads_grow_the_cache(device):
    bag = te.TieredEmbeddingBag(2000, WIDTH, mode="sum", capacity=1, max_norm=0.5, placement="cached")
    too_long = []

    def work(seed):
        generator = torch.Generator("cpu").manual_seed(seed)
        for step in range(100):
            batch = torch.randint(0, 2000, (1 + step % 50 * 4 * seed, 1), generator=generator, device="cpu")
            with torch.no_grad():
                out = bag(batch.to(device))
            too_long.append((out.norm(dim=1) > 0.5 + 1e-5).sum().item())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(too_long) == 400
    assert sum(too_long) == 0


# --- activation checkpointing -----------------------------------------------------------------------------------------


class TwoCalls(nn.Module):
    """Looks up twice, each time inside a checkpointed block if `reentrant` is not None."""

    def __init__(self, bag, *, nested=False):
        super().__init__()
        self.bag = bag
        self.nested = nested
        self.mix = torch.arange(1.0, 1.0 + WIDTH * WIDTH).reshape(WIDTH, WIDTH) / 10

    def block(self, x, batch):
        return torch.tanh((self.bag(batch) + x) @ self.mix)

    def forward(self, first, second, reentrant):
        x = torch.zeros(1, WIDTH, requires_grad=True)

        def call(x, batch):
            if reentrant is None:
                return self.block(x, batch)
            return checkpoint(self.block, x, batch, use_reentrant=reentrant)

        def both(x, first, second):
            return call(call(x, first), second)

        if self.nested and reentrant is not None:
            return checkpoint(both, x, first, second, use_reentrant=reentrant)
        return both(x, first, second)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("capacity", [1, ROWS])
def test_checkpointing_gives_the_bits_of_plain_training(device, reentrant, nested, capacity):
    runs = []
    for how in (None, reentrant):
        bag, _, _ = make(capacity=capacity)
        model = TwoCalls(bag, nested=nested)
        outputs = []
        for step in range(4):
            out = model(ids(1, 2, step), ids(2, 3, 3 + step), how)
            outputs.append(out.detach().clone())
            out.sum().backward()
        runs.append([*outputs, bag.state_dict()["weight"], bag.fused_optimizer.state_dict()["state"][0]["step"]])
        assert idle(bag)
    for plain, checkpointed in zip(*runs, strict=True):
        assert equal(plain, checkpointed)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_scores_once_and_counts_once(device, reentrant):
    counts, scores = [], []
    for how in (None, reentrant):
        bag, _, _ = make(capacity=ROWS, placement="cached")
        for _ in range(3):
            TwoCalls(bag)(ids(1, 2), ids(2, 3), how).sum().backward()
        counts.append((bag.stats().lookups, bag.stats().batches))
        if device != "cpu":
            continue
        hot = bag.tables.groups[0].cache.hot
        scores.append({int(k): int(s) for k, s in zip(hot.key, hot.score, strict=True) if k >= 0}.keys())
    assert counts[0] == counts[1] == (12, 6)
    assert not scores or scores[0] == scores[1]


# --- copies, processes ------------------------------------------------------------------------------------------------


def test_pickle_takes_rows_and_state_along(device):
    bag, _, _ = make()
    bag(ids(1, 2)).sum().backward()
    again = pickle.loads(pickle.dumps(bag))
    for model in (bag, again):
        model(ids(2, 3)).sum().backward()
    assert equal(bag.state_dict()["weight"], again.state_dict()["weight"])
    assert again.fused_optimizer._tables is again.tables


def test_copies_are_refused_on_storages_with_one_owner_and_in_flight(device, tmp_path):
    bag, _, _ = make(storage=te.File(str(tmp_path / "rows")))
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="save_checkpoint"):
            call(bag)
    bag, _, _ = make()
    out = bag(ids(1))
    with pytest.raises(StorageError, match="in flight"):
        copy.deepcopy(bag)
    out.sum().backward()
    copy.deepcopy(bag)


def test_training_in_a_world_of_two_is_refused(device, monkeypatch):
    bag, _, _ = make()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match="world of 2"):
        bag(ids(1))
    with torch.no_grad():
        bag(ids(1))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    bag(ids(1)).sum().backward()


def test_parameters_hold_nothing_of_the_table(device):
    bag, _, _ = make()
    assert list(bag.parameters()) == []
    assert list(bag.buffers()) == []
    model = nn.Sequential(bag, nn.Linear(WIDTH, 1))
    before = bag.state_dict()["weight"]
    dense = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    dense.step()
    assert equal(bag.state_dict()["weight"], before)


def test_autocast_and_low_precision_gradients_reach_the_rows(device):
    bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=3, optimizer=te.SGD(lr=1.0))
    before = bag.state_dict()["weight"]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = nn.Linear(WIDTH, 2)(bag(ids(1, 2)))
    out.float().sum().backward()
    changed = (bag.state_dict()["weight"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 2]


def test_gradient_that_is_expanded_or_strided_is_read_right(device):
    bag, reference, optimizer = make()
    for model in (bag, reference):
        out = model(torch.tensor([[1, 2], [3, 1], [5, 6]]))
        out.t()[::2].sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_input_that_is_overwritten_after_the_forward_does_not_reach_the_backward(device, mode):
    """As loaders do that reuse their buffers."""
    runs = []
    for overwritten in (False, True):
        tables = [te.TableConfig(name="a", num_embeddings=ROWS, embedding_dim=WIDTH, mode=mode)]
        model = te.TieredEmbeddingBagCollection(tables, capacity=3, optimizer=te.SGD(lr=1.0))
        batch, offsets, weights = (
            torch.tensor([1, 2, 3, 4]),
            torch.tensor([0, 1, 4]),
            torch.tensor([1.0, 2.0, 3.0, 4.0]),
        )
        out = model(batch, offsets, weights if mode == "sum" else None)
        if overwritten:
            batch.zero_()
            offsets[1] = 3
            weights.data.fill_(100)
        out.sum().backward()
        runs.append(model.state_dict()["tables.a.weight"])
    assert equal(*runs)


def test_default_device_and_dtype_of_torch_do_not_reach_the_rows(device):
    bag, _, _ = make()
    expected = bag(ids(1, 2)).detach()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        other = te.TieredEmbeddingBag(
            ROWS, WIDTH, mode="sum", dtype=torch.float32, device=device, optimizer=te.Adagrad(lr=0.5)
        )
        batch = torch.tensor([[1, 2]], device=device)
        out = other(batch)
        out.sum().backward()
        other.to(device)
        state = other.fused_optimizer.state_dict()["state"][0]
        rows = other.state_dict()["weight"]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert equal(out, expected)
    assert state["step"].dtype == rows.dtype == torch.float32
    assert out.device.type == device
    assert {value.device.type for value in (rows, *state.values())} <= {"cpu", device}


def test_module_built_and_fed_in_inference_mode_can_be_trained(device):
    with torch.inference_mode():
        bag, _, _ = make()
        bag.requires_grad_(False)
        bag.requires_grad_()
        batch, weights = ids(1, 2), torch.ones(1, 2)
        assert bag(batch, None, weights).is_inference()
    before = bag.state_dict()["weight"]
    bag(batch, None, weights).sum().backward()
    changed = (bag.state_dict()["weight"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 2]


def test_weighted_and_unweighted_calls_share_one_backward(device):
    bag, reference, optimizer = make()
    weights = torch.tensor([[2.0, -3.0]])
    for model in (bag, reference):
        out = model(ids(1, 2), None, weights) + model(ids(2, 3)) + model(ids(3, 1), None, 2 * weights)
        out.square().sum().backward()
    optimizer.step()
    assert_rows_equal(bag, reference)


def test_an_error_that_is_kept_holds_no_ticket(device):
    tables = [te.TableConfig(name=n, num_embeddings=9, embedding_dim=d) for n, d in (("a", 4), ("b", 5))]
    model = te.TieredEmbeddingBagCollection(tables, capacity=2, optimizer=te.SGD(lr=1.0), check_ids="always")
    with pytest.raises(IndexError) as kept:  # found in the second key space; the first one has planned
        model(torch.tensor([99, 3]), torch.tensor([0, 1, 2]))
    assert idle(model)
    assert kept.value


def test_calls_of_one_backward_are_summed_in_forward_order(device):
    for capacity in (1, ROWS):
        bag = te.TieredEmbeddingBag(ROWS, WIDTH, mode="sum", capacity=capacity, optimizer=te.SGD(lr=1.0))
        bag.load_state_dict({"weight": torch.zeros(ROWS, WIDTH)})
        out = [bag(ids(1)) for _ in range(3)]
        sum(scale * part.sum() for scale, part in zip((1.0, 1e8, -1e8), out, strict=True)).backward()
        assert bag.state_dict()["weight"][1].tolist() == [0.0] * WIDTH  # (1 + 1e8) - 1e8; the other way it is 1


def test_close_in_a_forked_child_leaves_the_parent_its_file(tmp_path):
    bag, _, _ = make(storage=te.File(str(tmp_path / "rows")))
    bag(ids(1, 2)).sum().backward()
    expected = bag.state_dict()["weight"]
    pid = os.fork()
    if pid == 0:
        try:
            bag.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    bag.close()
    again, _, _ = make(storage=te.File(str(tmp_path / "rows")))
    assert equal(again.state_dict()["weight"], expected)
