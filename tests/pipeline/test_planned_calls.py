"""Calls of a converted model are planned as one from their arguments, with the numbers of tables that plan apart."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import threading
import weakref

import pytest
import torch
from devices import assert_same_bits, idle, randint
from pairs import parametrize_pairs
from torch import nn
from torch.utils.checkpoint import checkpoint

import tieredemb as te
from tieredemb.errors import BackwardError, IdOutOfRangeError
from tieredemb.modules.forwards import LISTENERS
from tieredemb.pipeline import planned_calls
from tieredemb.step.forwards import Forwards
from tieredemb.step.planned_forwards import PlannedForwards

TABLES, ROWS, WIDTH = 5, 40, 4
OPTIMIZERS = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam]


class Columns(nn.Module):
    """Tables for the columns of a matrix. `count`: how many are looked up."""

    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(ROWS, WIDTH) for _ in range(TABLES)])
        self.top = nn.Linear(WIDTH, 1)
        self.count = TABLES
        self.fails = None

    def forward(self, x, *, shift=0):
        tables = list(self.emb)[: self.count]
        rows = [table(x[:, field] + shift if shift else x[:, field]) for field, table in enumerate(tables)]
        if self.fails is not None:
            raise self.fails
        return self.top(torch.stack(rows).tanh().sum(0))


class Lists(Columns):
    """Tables for lists of ids and offsets, as that of DLRM."""

    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList([nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES)])

    def forward(self, dense, offsets, ids):
        pooled = [table(*each) for table, *each in zip(self.emb, ids, offsets, strict=True)]
        return self.top(torch.stack(pooled).sum(0) * dense)


def lists_of(x, step):
    """The arguments of `Lists` for a matrix."""
    dense = torch.full((len(x), 1), 1 / (1.0 + step))
    return dense, [torch.arange(len(x)) for _ in range(TABLES)], list(x.t().contiguous())


class Found:
    """Counts the forwards that found a plan."""

    def __init__(self, monkeypatch):
        self.planned = 0
        take = PlannedForwards.take

        def taken(*args):
            found = take(*args)
            self.planned += found is not None
            return found

        monkeypatch.setattr(PlannedForwards, "take", taken)


def converted(kind=Columns, optimizer=torch.optim.Adagrad, capacity=0.2, planned=True):
    torch.manual_seed(0)
    model = kind()
    made = optimizer(model.parameters(), lr=0.1)
    te.replace_embedding_bags(model, capacity=capacity, optimizer=made)
    if not planned:
        model._forward_pre_hooks.clear()
        model._forward_hooks.clear()
    return model, made


def train(model, optimizer, calls):
    """Trains on the arguments `calls`; the losses, and all rows at the end."""
    losses = []
    for arguments in calls:
        optimizer.zero_grad()
        loss = model(*arguments).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *rows_of(model)]


def rows_of(model):
    return list(model.state_dict().values())


def matrices(steps, size=7):
    return [(randint(0, ROWS, (size, TABLES), seed=step),) for step in range(steps)]


def calls_of(model):
    hook, _ = model._forward_hooks.values()
    return hook.__self__


@parametrize_pairs(kind=[Columns, Lists], optimizer=OPTIMIZERS, capacity=[0.03, 0.2, 1.0])
def test_calls_are_planned_with_the_numbers_of_tables_apart(device, monkeypatch, kind, optimizer, capacity):
    calls = matrices(12)
    if kind is Lists:
        calls = [lists_of(x, step) for step, (x,) in enumerate(calls)]
    expected = train(*converted(kind, optimizer, capacity, planned=False), calls)
    found = Found(monkeypatch)
    model, made = converted(kind, optimizer, capacity)
    assert_same_bits(train(model, made, calls), expected)
    assert found.planned == 10 * TABLES  # two calls show what they look up
    assert all(idle(table) for table in model.emb)


def test_batches_of_any_size_are_planned(device, monkeypatch):
    calls = [(randint(0, ROWS, (size, TABLES), seed=size),) for size in (7, 7, 3, 1, 11, 7, 2)]
    expected = train(*converted(planned=False), calls)
    found = Found(monkeypatch)
    assert_same_bits(train(*converted(), calls), expected)
    assert found.planned == 5 * TABLES


def test_evaluation_is_planned_by_its_own_calls(device, monkeypatch):
    def run(model, optimizer):
        outputs = []
        for step, (x,) in enumerate(matrices(9)):
            outputs += train(model, optimizer, [(x,)])
            model.eval()
            with torch.inference_mode() if step % 2 else torch.no_grad():
                outputs.append(model(x).clone())
            model.train()
        return outputs

    expected = run(*converted(planned=False))
    found = Found(monkeypatch)
    assert_same_bits(run(*converted()), expected)
    kinds = 2 if device == "cuda" else 1  # a CPU reads rows in memory where they lie, without a plan
    assert found.planned == kinds * 7 * TABLES


def test_a_model_that_computes_its_ids_plans_nothing(device, monkeypatch):
    def run(model, optimizer):
        for (x,) in matrices(5):
            optimizer.zero_grad()
            model(x // 2, shift=1).square().mean().backward()
            optimizer.step()
        return rows_of(model)

    expected = run(*converted(planned=False))
    found, (model, optimizer) = Found(monkeypatch), converted()
    assert_same_bits(run(model, optimizer), expected)
    assert found.planned == 0
    assert [each.is_over for each in calls_of(model)._patterns.values()] == [True]


def test_calls_that_look_up_something_else_are_right_and_end_it(device, monkeypatch):
    def run(model, optimizer):
        outputs = train(model, optimizer, matrices(3))
        for (x,) in matrices(planned_calls.MOST_MISPREDICTIONS + 2):
            optimizer.zero_grad()
            loss = model(x // 2, shift=1).square().mean()  # not the tensors that were planned
            loss.backward()
            optimizer.step()
            outputs.append(loss.detach())
        return outputs + train(model, optimizer, matrices(3))

    expected = run(*converted(planned=False))
    found, (model, optimizer) = Found(monkeypatch), converted()
    assert_same_bits(run(model, optimizer), expected)
    assert found.planned == TABLES
    assert [each.is_over for each in calls_of(model)._patterns.values()] == [True]
    assert all(idle(table) for table in model.emb)


def test_a_model_that_loses_a_table_is_learned_anew_and_keeps_it_no_longer(device, monkeypatch):
    def run(model, optimizer):
        losses = train(model, optimizer, matrices(6))[:6]
        gone = weakref.ref(model.emb[2])
        del model.emb[2]
        losses += train(model, optimizer, matrices(6))[:6]
        assert gone() is None
        return losses + rows_of(model)

    expected = run(*converted(planned=False))
    found, (model, optimizer) = Found(monkeypatch), converted()
    assert_same_bits(run(model, optimizer), expected)
    # two calls are learned from; the first one after finds some of what was planned for it, and two are learned from
    assert 4 * TABLES + 3 * (TABLES - 1) <= found.planned < 4 * TABLES + 4 * (TABLES - 1)
    assert [(each.mispredictions, each.is_over) for each in calls_of(model)._patterns.values()] == [(0, False)]


def test_where_nothing_is_planned_as_one_calls_are_learned_from_once(device):
    class Limited(Columns):
        """Rows are scaled before they are looked up, so each table plans by itself."""

        def __init__(self):
            super().__init__()
            self.emb = nn.ModuleList([nn.Embedding(ROWS, WIDTH, max_norm=1.0) for _ in range(TABLES)])

    model, optimizer = converted(Limited)
    train(model, optimizer, matrices(1))
    assert [each.is_over for each in calls_of(model)._patterns.values()] == [True]


def test_outputs_that_nobody_uses_lock_nothing(device):
    def run(model, optimizer):
        outputs = train(model, optimizer, matrices(3))
        model.count = 2
        return outputs + train(model, optimizer, matrices(4))

    model, optimizer = converted()
    assert_same_bits(run(model, optimizer), run(*converted(planned=False)))
    assert all(idle(table) for table in model.emb)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_call_that_fails_leaves_nothing(device, monkeypatch, error):
    def run(model, optimizer):
        outputs = train(model, optimizer, matrices(3))
        model.fails = error
        for (x,) in matrices(2):
            with pytest.raises(type(error)):
                model(x)
        model.fails = error.__traceback__ = None  # whose frames keep the outputs
        return outputs + train(model, optimizer, matrices(3))

    expected = run(*converted(planned=False))
    found, (model, optimizer) = Found(monkeypatch), converted()
    assert_same_bits(run(model, optimizer), expected)
    assert found.planned == 6 * TABLES
    assert all(idle(table) for table in model.emb)


def test_an_interrupted_call_is_over_with_the_next_one(device):
    model, optimizer = converted()
    train(model, optimizer, matrices(3))
    begun = calls_of(model)
    begun.before(model, matrices(1)[0], {})  # and nothing comes behind it
    assert model.emb[0].planned.waiting
    train(model, optimizer, matrices(2))
    assert not model.emb[0].planned.waiting
    begun.before(model, matrices(1)[0], {})
    model.emb[0].engine.drop_planned()  # as saving and copying do
    assert all(idle(table) for table in model.emb)


def test_a_wrong_id_is_refused_as_ever(device):
    model, optimizer = converted()
    train(model, optimizer, matrices(3))
    before = rows_of(model)
    x = matrices(1)[0][0].clone()
    x[3, 2] = ROWS

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        model.emb[2].stats()  # which waits for the GPU, if no forward has heard of it before

    with pytest.raises(IdOutOfRangeError, match=rf"id {ROWS} at position 3 is out of range for table 'emb\.2'"):
        step()
    optimizer.zero_grad()
    for table, rows in enumerate(before[:TABLES]):
        assert torch.equal(model.emb[table].state_dict()["weight"], rows)
    assert torch.isfinite(torch.stack(train(model, optimizer, matrices(3))[:3])).all()
    assert all(idle(table) for table in model.emb)


USES = {
    "a part": lambda rows: rows[1:3],
    "some twice": lambda rows: [*rows, rows[0] * 2],
    "in another order": lambda rows: rows[::-1],
    "changed in place": lambda rows: [each.mul_(2).clamp_(-0.5, 0.5) for each in rows],
    "as slices of one": lambda rows: [torch.cat(rows, 1)],
    "of 16 bits": lambda rows: [each.bfloat16() for each in rows],
    "expanded": lambda rows: [each.sum().expand(3) for each in rows],
}


class Bare(Columns):
    """Gives its rows to whoever trains it."""

    def forward(self, x):
        return [table(x[:, field]) for field, table in enumerate(self.emb)]


@pytest.mark.parametrize(
    ("use", "optimizer"), [*zip(USES.values(), itertools.cycle(OPTIMIZERS), strict=False)], ids=USES
)
def test_whatever_comes_of_the_outputs(device, use, optimizer):
    def run(model, optimizer):
        losses = []
        for (x,) in matrices(8):
            optimizer.zero_grad()
            loss = sum(each.float().square().sum() for each in use(model(x)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *rows_of(model)]

    expected = run(*converted(Bare, optimizer, planned=False))
    model, made = converted(Bare, optimizer)
    assert_same_bits(run(model, made), expected)
    assert all(idle(table) for table in model.emb)


def test_a_backward_of_each_output_by_itself(device):
    def run(model, optimizer):
        for (x,) in matrices(6):
            optimizer.zero_grad()
            rows = model(x)
            for each in rows[::-1]:
                each.square().sum().backward()
            with pytest.raises(BackwardError, match="backpropagated already"):
                rows[0].sum().backward()
            optimizer.step()
        return rows_of(model)

    assert_same_bits(run(*converted(Bare)), run(*converted(Bare, planned=False)))


def test_gradients_of_something_else_update_nothing(device):
    """As `autograd.grad` asks for them."""

    def run(model, optimizer):
        for (x,) in matrices(6):
            optimizer.zero_grad()
            rows, scale = model(x), torch.ones(1, requires_grad=True)
            loss = sum((each * scale).square().sum() for each in rows)
            (found,) = torch.autograd.grad(loss, [scale], retain_graph=True)
            assert found.item() > 0
            optimizer.step()
            loss.backward()
            optimizer.step()
        return rows_of(model)

    assert_same_bits(run(*converted(Bare)), run(*converted(Bare, planned=False)))


def test_some_lookups_without_gradients(device, monkeypatch):
    class Some(Columns):
        def forward(self, x):
            with torch.no_grad():
                first = self.emb[0](x[:, 0])
                second = self.emb[3](x[:, 3])
            rows = [self.emb[1](x[:, 1]), self.emb[2](x[:, 2])]
            assert not first.requires_grad
            assert all(each.requires_grad for each in rows)
            with torch.no_grad():
                last = self.emb[4](x[:, 4])
            assert not last.requires_grad
            return self.top(first + second + last + sum(rows))

    expected = train(*converted(Some, planned=False), matrices(8))
    found, (model, optimizer) = Found(monkeypatch), converted(Some)
    assert_same_bits(train(model, optimizer, matrices(8)), expected)
    assert found.planned == 6 * TABLES
    assert all(idle(table) for table in model.emb)


def test_outputs_that_are_gone_are_collected_at_once(device):
    """Without Python's collector: what a call leaves is no circle."""
    model, optimizer = converted(Bare)
    train_it = [model(x) for (x,) in matrices(4)]
    del train_it
    gc.collect()
    gc.disable()
    try:
        for count in (0, 1, TABLES):
            rows = model(matrices(1)[0][0])[:count]
            assert len(model.emb[0].tables.whole.groups[0].cache._tickets.live) == min(count, 1)
            del rows
            assert not model.emb[0].tables.whole.groups[0].cache._tickets.live
        optimizer.zero_grad()
    finally:
        gc.enable()


def test_a_loop_that_fetches_ahead_plans_for_itself(device, monkeypatch):
    expected = train(*converted(planned=False), matrices(9))
    found, (model, optimizer) = Found(monkeypatch), converted()
    loop = te.prefetch(matrices(9), model)
    loop.autotuner = None
    assert_same_bits(train(model, optimizer, loop), expected)
    assert found.planned == 8 * TABLES
    assert [each.mispredictions for each in calls_of(model)._patterns.values()] == [0]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_captured_step_plans_for_itself(device, ahead):
    batches = matrices(12)

    def run(model, optimizer, captured):
        def step(batch):
            optimizer.zero_grad()
            loss = model(*batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        one = te.graph_step(step) if captured else step
        losses = [one(batch).clone() for batch in (te.prefetch(batches, model) if ahead else batches)]
        return [*losses, *rows_of(model)]

    def sgd(params, lr):
        return torch.optim.SGD(params, lr=lr, foreach=True)

    expected = run(*converted(optimizer=sgd, planned=False), captured=False)
    assert_same_bits(run(*converted(optimizer=sgd), captured=True), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_calls_are_right(device, use_reentrant):
    def run(model, optimizer):
        for (x,) in matrices(5):
            optimizer.zero_grad()
            weight = torch.ones((), requires_grad=True)  # reentrant checkpoints want an input with a gradient
            out = checkpoint(lambda x, weight: model(x) * weight, x, weight, use_reentrant=use_reentrant)
            out.square().mean().backward()
            optimizer.step()
        return rows_of(model)

    assert_same_bits(run(*converted()), run(*converted(planned=False)))


def test_micro_batches_of_a_step(device):
    def run(model, optimizer):
        for (x,) in matrices(5, size=8):
            optimizer.zero_grad()
            for part in x.chunk(2):
                (model(part).square().mean() / 2).backward()
            optimizer.step()
        return rows_of(model)

    assert_same_bits(run(*converted()), run(*converted(planned=False)))


def test_threads_take_their_own_plans(device):
    model, _ = converted()
    model.eval()
    wanted = []
    with torch.no_grad():
        for (x,) in matrices(40):
            wanted.append(model(x).clone())
    outputs = [[], []]

    def look_up(to):
        with torch.no_grad(), torch.device(device):
            for (x,) in matrices(40):
                to.append(model(x).clone())

    threads = [threading.Thread(target=look_up, args=(to,)) for to in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in outputs:
        assert_same_bits(found, wanted)
    assert all(idle(table) for table in model.emb)


def test_copies_learn_their_own_calls(device):
    model, optimizer = converted()
    train(model, optimizer, matrices(3))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert calls_of(other) is not calls_of(model)
        assert not calls_of(other)._patterns
        with pytest.MonkeyPatch.context() as patched:
            found = Found(patched)
            outputs = [other(*each).detach() for each in matrices(4)]
            assert found.planned == 2 * TABLES
            assert_same_bits(outputs, [model(*each).detach() for each in matrices(4)])


def test_hooks_are_put_once_and_hold_no_model():
    model, optimizer = converted()
    assert [len(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)] == [1, 2]
    planned_calls.plan_calls(model)
    assert [len(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)] == [1, 2]
    train(model, optimizer, matrices(2))
    assert LISTENERS == []
    kept = weakref.ref(calls_of(model))
    del model, optimizer
    assert kept() is None


def test_the_innermost_holder_of_all_tables_has_them_too():
    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.ModuleDict({name: nn.Embedding(ROWS, WIDTH) for name in "abc"})

        def forward(self, x):
            return sum(table(x[:, field]) for field, table in enumerate(self.emb.values()))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = Embeddings()

        def forward(self, x):
            return self.embeddings(x.long())

    model = Model()
    te.replace_embedding_bags(model.eval(), capacity=0.5)
    assert [len(part._forward_hooks) for part in (model, model.embeddings, model.embeddings.emb)] == [2, 2, 0]
    assert model(torch.zeros(3, 3)).shape == (3, WIDTH)


class Offsets(Columns):
    """Tables of bags whose offsets the model has, or computes."""

    def __init__(self, computes=False):
        super().__init__()
        self.emb = nn.ModuleList([nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES)])
        self.register_buffer("starts", 2 * torch.arange(7))
        self.computes = computes

    def forward(self, ids, lengths):
        starts = lengths.cumsum(0) - lengths if self.computes else self.starts[: len(lengths)]
        return self.top(sum(table(each, starts) for table, each in zip(self.emb, ids, strict=True)).tanh())


@pytest.mark.parametrize("computes", [False, True])
def test_offsets_of_the_model(device, monkeypatch, computes):
    """Those of a smaller batch are others, and so may those be that it computes."""

    def kind():
        return Offsets(computes)

    calls = []
    for step, size in enumerate((7, 7, 7, 7, 4, 7, 2, 7)):
        lengths = torch.full((size,), 2)
        if computes and step % 2:
            lengths[:2] += torch.tensor([1, -1])
        calls.append((list(randint(0, ROWS, (TABLES, 2 * size), seed=step)), lengths))
    expected = train(*converted(kind, planned=False), calls)
    found, (model, optimizer) = Found(monkeypatch), converted(kind)
    assert_same_bits(train(model, optimizer, calls), expected)
    assert found.planned == (0 if computes else 4 * TABLES)


def test_ids_that_change_unnoticed_before_they_are_looked_up(device, monkeypatch):
    """Tensors that were made in inference mode do not count their versions."""

    class Clamps(Bare):
        def forward(self, x):
            return super().forward(x.clamp_(max=9))

    def run(model):
        model.eval()
        with torch.inference_mode():
            return [each.clone() for (x,) in matrices(6) for each in model(x + 0)]

    found, (model, _) = Found(monkeypatch), converted(Clamps)
    assert_same_bits(run(model), run(converted(Clamps, planned=False)[0]))
    assert found.planned == 0


@pytest.mark.parametrize("changed", ["ids", "offsets"])
def test_numpy_changes_what_is_to_be_looked_up(monkeypatch, changed):
    """Through an array over a tensor's memory, on a CPU, of which torch does not know."""

    class Changes(Lists):
        def forward(self, dense, offsets, ids):
            array = (ids if changed == "ids" else offsets)[2].numpy()
            array[-2:] = array[-3]
            return super().forward(dense, offsets, ids)

    def calls():
        return [lists_of(x, step) for step, (x,) in enumerate(matrices(6))]

    expected = train(*converted(Changes, planned=False), calls())
    found, (model, optimizer) = Found(monkeypatch), converted(Changes)
    assert_same_bits(train(model, optimizer, calls()), expected)
    assert found.planned == 4 * (TABLES - 1)
    assert all(idle(table) for table in model.emb)


class Unreadable:
    @property
    def values(self):
        raise RuntimeError("no")


def test_arguments_that_nothing_can_be_learned_of(device):
    class With(Columns):
        def forward(self, x, other):
            return super().forward(x)

    lazy = type("Lazy", (dict,), {"items": lambda self: 1 / 0})()
    for other in (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), Unreadable(), lazy, [object(), None]):
        calls = [(x, other) for (x,) in matrices(5)]
        assert_same_bits(train(*converted(With), calls), train(*converted(With, planned=False), calls))


def test_lookups_that_lose_their_gradients_leave_no_circle(device):
    class Freezes(Bare):
        frozen = 0

        def forward(self, x):
            rows = []
            for field, table in enumerate(self.emb):
                with torch.set_grad_enabled(field >= self.frozen):
                    rows.append(table(x[:, field]))
            return rows

    model, optimizer = converted(Freezes)

    def step(x):
        optimizer.zero_grad()
        sum(each.square().sum() for each in model(x)).backward()
        optimizer.step()

    for (x,) in matrices(4):
        step(x)
    model.frozen = 3
    gc.collect()
    gc.disable()
    try:
        for (x,) in matrices(4):
            step(x)
            assert not model.emb[0].tables.whole.groups[0].cache._tickets.live
    finally:
        gc.enable()
    assert not [each for each in gc.get_objects() if issubclass(type(each), Forwards)]  # others' may be dead proxies


def test_a_model_that_calls_itself_is_planned_no_more(device):
    class Twice(Columns):
        def forward(self, x, again=True):
            inside = self(x.flip(0), again=False) if again else 0
            return super().forward(x) + inside

    model, optimizer = converted(Twice)
    assert_same_bits(train(model, optimizer, matrices(9)), train(*converted(Twice, planned=False), matrices(9)))
    assert all(idle(table) for table in model.emb)
    assert any(each.is_over for each in calls_of(model)._patterns.values())


def test_who_listens_hears_of_the_models_own_lookups_alone():
    model, _ = converted()
    begun, other = calls_of(model), te.TieredEmbedding(ROWS, WIDTH)
    begun.before(model, matrices(1)[0], {})  # and is interrupted
    (listener,) = LISTENERS
    other(torch.arange(3))
    call = begun._now.call
    assert call.observed == []
    model.emb[1](torch.arange(3))
    assert len(call.observed) == 1
    del call
    begun._now.call = None  # as one that nobody has
    other(torch.arange(3))
    assert LISTENERS == []
    listener.leave()  # a second time


class SomeBags(nn.Module):
    """Bags of several tables, of which a batch need not have all."""

    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList([nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(3)])

    def forward(self, ids, offsets):
        given = zip(self.emb, ids, offsets, strict=True)
        return torch.cat([table(each, starts) for table, each, starts in given if each is not None], 1)


@pytest.mark.parametrize("missing", [None, [1, 2, 3]])
def test_an_argument_that_is_no_tensor_this_time(device, missing):
    model, _ = converted(SomeBags, torch.optim.SGD)
    ids, offsets = [randint(0, ROWS, (6,), seed=at) for at in range(3)], [torch.tensor([0, 2, 4]) for _ in range(3)]
    for _ in range(4):
        model([each.clone() for each in ids], offsets)
    ids[1] = missing
    if missing is None:
        assert model(ids, offsets).shape == (3, 2 * WIDTH)
    else:
        with pytest.raises(TypeError, match="must be a tensor"):
            model(ids, offsets)
    ids[1] = ids[0]
    assert model(ids, offsets).shape == (3, 3 * WIDTH)


INPUTS = {  # of one table, int64 (6,): ids that are not where one behind the other would be, or of another dtype
    "strided": lambda ids: torch.stack([ids, ids + 1], 1)[:, 0],
    "every other one": lambda ids: ids.repeat_interleave(2)[::2],
    "expanded": lambda ids: ids[3:4].expand(6),
    "int32": lambda ids: ids.int(),
}
OFFSETS = {
    "plain": lambda offsets: offsets,
    "strided": lambda offsets: offsets.repeat_interleave(2)[::2],
    "uint8": lambda offsets: offsets.to(torch.uint8),
    "int32": lambda offsets: offsets.int(),
}


# of int32 both are, as torch asks for
PAIRS = [(ids, offsets) for ids in INPUTS for offsets in OFFSETS if (ids == "int32") == (offsets == "int32")]


@pytest.mark.parametrize(("ids", "offsets"), PAIRS)
def test_inputs_in_any_memory(device, ids, offsets):
    def run(model, optimizer):
        found = []
        for step in range(8):
            every = [INPUTS[ids](randint(0, ROWS, (6,), seed=3 * step + at)) for at in range(3)]
            starts = [OFFSETS[offsets](torch.tensor([0, 1 + step % 2, 4])) for _ in range(3)]
            optimizer.zero_grad()
            out = model(every, starts)
            out.square().sum().backward()
            optimizer.step()
            found.append(out.detach())
        return [*found, *rows_of(model)]

    expected = run(*converted(SomeBags, torch.optim.SGD, planned=False))
    assert_same_bits(run(*converted(SomeBags, torch.optim.SGD)), expected)
