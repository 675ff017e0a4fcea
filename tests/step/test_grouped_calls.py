"""Tables that share a cache, whose batch is known: planned, looked up and updated as one, with the numbers of tables
apart."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from devices import assert_same_bits
from pairs import parametrize_pairs
from torch import nn

import tieredemb as te
from tieredemb.conversion import replace
from tieredemb.errors import IdOutOfRangeError, InvalidInputError
from tieredemb.pipeline.planned_calls import plan_calls
from tieredemb.step import device_update, forwards, host_call
from tieredemb.step.forwards import Forwards

ROWS = (300, 7, 50, 120)
WIDTH, SAMPLES, STEPS = 8, 6, 14
CAPACITIES = [1, 60, 1.0]
SPARSE = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam]


@pytest.fixture(autouse=True)
def calls_plan_nothing(monkeypatch):
    """Here loops and captured steps alone plan as one: what plans apart is the same model without them."""
    monkeypatch.setattr(replace, "plan_calls", lambda model: None)


def here(tensor):
    return tensor.to(torch.get_default_device())


def synchronize():
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


@pytest.fixture
def joined(device, monkeypatch):
    return count_joined(monkeypatch)


@pytest.fixture
def joined_on_gpu(gpu, monkeypatch):
    return count_joined(monkeypatch)


def count_joined(monkeypatch):
    """Counts plans of several tables, by what they were of, and updates that were of all tables of a pool."""
    found = {"plans": [], "updates": 0}
    make, by_call = Forwards.__init__, forwards.by_call

    def made(self, call, contexts):
        first, *others = [numbers for _, numbers in call.context.tables.of_pools]
        found["plans"].append((first, *others) if others else first)
        make(self, call, contexts)

    def looked_for(collected):
        shared, rest = by_call(collected)
        found["updates"] += len(shared)
        return shared, rest

    monkeypatch.setattr(Forwards, "__init__", made)
    for part in (device_update, host_call):
        monkeypatch.setattr(part, "by_call", looked_for)
    return found


class Model(nn.Module):
    """Bags of every form, or single rows."""

    def __init__(self, kind, **keywords):
        super().__init__()
        if kind == "rows":
            self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH, padding_idx=2, **keywords) for rows in ROWS)
        else:
            modes = ("sum", "mean", "sum", "mean") if kind == "modes" else ("sum",) * 4
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(rows, WIDTH, mode=mode, padding_idx=1 if kind == "padding" else None, **keywords)
                for rows, mode in zip(ROWS, modes, strict=True)
            )

    def forward(self, batch):
        return [table(*inputs) for table, inputs in zip(self.tables, batch, strict=True)]


def batch_of(step, kind):
    """What each table is given."""
    random, found = torch.Generator("cpu").manual_seed(step), []
    for number, rows in enumerate(ROWS):
        bags = kind == "offsets" or (kind == "mixed" and number % 2)
        length = 1 + number % 3 if kind in ("lengths", "mixed") and not bags else 2
        skewed = torch.rand((SAMPLES, length), generator=random, device="cpu") ** 4 * rows
        ids = skewed.to(torch.int64)
        if kind == "int32" and number % 2:
            ids = ids.int()
        if kind == "rows":
            ids = ids[:, 0]
        if bags:
            ids = ids.flatten()[: len(ids.flatten()) - step % 3]
            offsets = torch.tensor([0, 2, 2, 3, 4, 6], device="cpu")
            found.append((here(ids), here(offsets.to(ids.dtype))))
        else:
            found.append((here(ids),))
    return tuple(found)


KINDS = ["equal", "lengths", "offsets", "mixed", "int32", "padding", "modes", "rows"]


def converted(kind, capacity, optimizer, **keywords):
    torch.manual_seed(0)
    model = Model(kind, **keywords)
    trained = optimizer(model.parameters(), lr=0.1) if isinstance(optimizer, type) else optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te.replace_embedding_bags(model, capacity=capacity, optimizer=trained)
    return model, trained


def state(model, outputs):
    return [*outputs, *model.state_dict().values()]


def train(model, optimizer, batches, *, use=lambda outputs: outputs, seen=None, of=None):
    """The outputs of all steps, and the tables at the end, those of the model `of` where that is another."""
    found = []

    def step(batch):
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.zero_grad()
        outputs = use(model(batch))
        sum(each.square().sum() for each in outputs).backward()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.step()
        return [each.detach().clone() for each in outputs]

    run = step if seen is None else seen(step)
    for batch in batches(model):
        found += [each.clone() for each in run(batch)]
    return state(of or model, found)


def given(kind, steps=STEPS):
    return [batch_of(step, kind) for step in range(steps)]


def ahead(kind, depth=1, steps=STEPS):
    return lambda model: te.prefetch(given(kind, steps), model, depth)


@parametrize_pairs(capacity=CAPACITIES, kind=KINDS, optimizer=[te.Adagrad(lr=0.1), torch.optim.SparseAdam])
def test_training_has_the_bits_of_tables_planned_apart(joined, capacity, kind, optimizer):
    sparse = {"sparse": True} if isinstance(optimizer, type) else {}
    apart = train(*converted(kind, capacity, optimizer, **sparse), lambda _: given(kind))
    assert not joined["plans"]
    together = train(*converted(kind, capacity, optimizer, **sparse), ahead(kind))
    assert joined["plans"] == [(0, 1, 2, 3)] * (STEPS - 1)  # the first batch shows who looks up what
    assert joined["updates"] == STEPS - 1
    assert_same_bits(together, apart)


@pytest.mark.parametrize("optimizer", SPARSE)
def test_optimizers_of_torch(joined, optimizer):
    sparse = {"sparse": True}
    apart = train(*converted("offsets", 60, optimizer, **sparse), lambda _: given("offsets"))
    together = train(*converted("offsets", 60, optimizer, **sparse), ahead("offsets", 3))
    assert joined["updates"] == STEPS - 1
    assert_same_bits(together, apart)


DENSE = {
    "Adam, weight_decay": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.05, "capturable": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "capturable": True}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad, weight_decay": (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.05}),
}


def converted_dense(kind, capacity, optimizer, model=Model):
    torch.manual_seed(0)
    model = model(kind)
    made, options = DENSE[optimizer]
    trained = made(model.parameters(), **options)
    te.replace_embedding_bags(model, capacity=capacity, optimizer=trained)
    return model, trained


@parametrize_pairs(optimizer=[*DENSE], kind=KINDS, capacity=CAPACITIES)
def test_dense_optimizers_have_the_bits_of_tables_planned_apart(joined, optimizer, kind, capacity):
    apart = train(*converted_dense(kind, capacity, optimizer), lambda _: given(kind))
    assert not joined["plans"]
    assert_same_bits(train(*converted_dense(kind, capacity, optimizer), ahead(kind)), apart)
    assert joined["plans"] == [(0, 1, 2, 3)] * (STEPS - 1)
    assert joined["updates"] == STEPS - 1


@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.AdamW])
def test_dense_tables_whose_rates_part_have_the_bits_of_tables_planned_apart(joined, made):
    """Rows that miss a step move by the rate of their own table."""

    def run(batches):
        torch.manual_seed(0)
        model = Model("equal")
        parameters = list(model.parameters())
        options = {"weight_decay": 0.05, "capturable": True}
        trained = made([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.02, **options)
        te.replace_embedding_bags(model, capacity=60, optimizer=trained)
        for seen, batch in enumerate(batches(model)):
            trained.param_groups[1]["lr"] = 0.02 if seen < 4 else 0.001
            trained.zero_grad()
            sum(each.square().sum() for each in model(batch)).backward()
            trained.step()
        return list(model.state_dict().values())

    apart = run(lambda _: given("equal", 3 * STEPS))
    assert_same_bits(run(ahead("equal", 1, 3 * STEPS)), apart)
    assert joined["updates"] > 0


def passes_alive():
    """How many passes over rows somebody has, or the garbage collector."""
    return sum(issubclass(type(each), host_call.RowPass) for each in gc.get_objects())


def test_a_step_leaves_nothing_to_be_collected():
    """What holds gradients and caches goes with the step, and no collection of garbage later."""
    # the first optimizer of a process has torch import its compiler, which may keep the frames that asked for it
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.disable()
    try:
        before = passes_alive()  # an interrupted deepcopy of another test may have left some
        model, optimizer = converted_dense("equal", 60, "AdamW")
        cache = weakref.ref(model.tables[0].tables.groups[0].cache)
        train(model, optimizer, ahead("equal"))
        assert passes_alive() == before
        del model, optimizer
        assert cache() is None
    finally:
        gc.enable()


class Choosy(Model):
    """Looks some tables up in some steps, others' rows in none of their own."""

    def __init__(self, kind):
        super().__init__(kind)
        self.seen = 0

    def forward(self, batch):
        self.seen += 1
        if self.seen % 4 == 0:
            with torch.no_grad():
                self.tables[2](*batch[2])
        left = self.seen % 5 if self.seen > 3 else -1  # the first batch shows all
        order = range(4) if self.seen % 2 else reversed(range(4))
        return [self.tables[table](*batch[table]) for table in order if table != left]


@pytest.mark.parametrize("optimizer", DENSE)
def test_rows_that_no_forward_asked_for_are_left_behind(joined, optimizer):
    apart = train(*converted_dense("offsets", 60, optimizer, Choosy), lambda _: given("offsets", 3 * STEPS))
    together = train(*converted_dense("offsets", 60, optimizer, Choosy), ahead("offsets", 2, 3 * STEPS))
    assert_same_bits(together, apart)
    assert set(joined["plans"]) == {(0, 1, 2, 3)}
    assert 1 <= joined["updates"] < len(joined["plans"])


class Idle(Model):
    """Looks up rows that get no gradient: those of a table in most steps, while other rows of it do, looked up by
    themselves; sometimes a forward that was planned with them never comes."""

    def __init__(self, kind):
        super().__init__(kind)
        self.seen = 0

    def forward(self, batch):
        self.seen += 1
        (first,), (second,), (third,), (fourth,) = batch
        found = [self.tables[0](first)]
        idle = self.tables[3](fourth)
        if self.seen % 2 or self.seen < 3:
            found.append(self.tables[1](second))
        if self.seen % 5 or self.seen < 3:
            found.append(self.tables[2](third))
        return [*found, idle if self.seen % 7 == 0 else self.tables[3]((fourth + 40) % ROWS[3])]


@pytest.mark.parametrize("optimizer", DENSE)
def test_rows_without_a_gradient_are_brought_forward_when_they_are_looked_up(joined, optimizer):
    apart = train(*converted_dense("equal", 1.0, optimizer, Idle), lambda _: given("equal", 5 * STEPS))
    together = train(*converted_dense("equal", 1.0, optimizer, Idle), ahead("equal", 2, 5 * STEPS))
    assert set(joined["plans"]) == {(0, 1, 2, 3)}
    assert_same_bits(together, apart)


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("optimizer", DENSE)
def test_captured_steps_of_dense_optimizers(joined_on_gpu, optimizer, fetched):
    apart = train(*converted_dense("equal", 60, optimizer), lambda _: given("equal", 2 * STEPS))
    many = ahead("equal", 1, 2 * STEPS) if fetched else lambda _: given("equal", 2 * STEPS)
    assert_same_bits(train(*converted_dense("equal", 60, optimizer), many, seen=te.graph_step), apart)
    assert set(joined_on_gpu["plans"]) == {(0, 1, 2, 3)}
    assert joined_on_gpu["updates"] > 0


@parametrize_pairs(capacity=CAPACITIES, kind=["equal", "offsets", "rows"], fetched=[False, True])
def test_captured_steps(joined_on_gpu, capacity, kind, fetched):
    sizes = "equal" if kind == "offsets" else kind

    def batches(_):  # of one shape
        found = given(sizes, 2 * STEPS)
        edges = torch.arange(0, 2 * SAMPLES, 2)
        return [tuple((ids.flatten(), edges) for (ids,) in b) for b in found] if kind == "offsets" else found

    optimizer = te.Adagrad(lr=0.1)
    apart = train(*converted(kind, capacity, optimizer), batches)
    assert not joined_on_gpu["plans"]
    model, _ = converted(kind, capacity, optimizer)
    many = (lambda model: te.prefetch(batches(model), model)) if fetched else batches
    assert_same_bits(train(model, optimizer, many, seen=te.graph_step), apart)
    assert set(joined_on_gpu["plans"]) == {(0, 1, 2, 3)}
    assert joined_on_gpu["updates"] > 0


USES = {
    "a part": lambda outputs: outputs[1:3],
    "some twice": lambda outputs: [*outputs, outputs[0] * 2],
    "in another order": lambda outputs: outputs[::-1],
    "changed in place": lambda outputs: [each.mul_(2).clamp_(-0.5, 0.5) for each in outputs],
    "as views": lambda outputs: [torch.cat([each.view(-1) for each in outputs])],
}


class TwoWidths(nn.Module):
    """Tables of two widths, each of which has a cache of its own."""

    widths = (8, 4, 8, 4)

    def __init__(self, kind="equal"):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", padding_idx=1 if kind == "padding" else None)
            for rows, width in zip(ROWS, self.widths, strict=True)
        )

    def forward(self, batch):
        return [table(*inputs) for table, inputs in zip(self.tables, batch, strict=True)]


class LoneWidths(TwoWidths):
    """A table alone of each of two widths, beside two of another one."""

    widths = (8, 4, 8, 16)


OF_TWO_WIDTHS = ((0, 1), (0, 1))  # two tables of each
OF_LONE_WIDTHS = ((0, 1), (0,), (0,))
OPTIMIZERS = {
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, capturable=True),
    "Adagrad in backward": lambda _: te.Adagrad(lr=0.1),
}


def of_two_widths(kind, optimizer, capacity=0.5, model=TwoWidths):
    torch.manual_seed(0)
    model = model(kind)
    trained = OPTIMIZERS[optimizer](list(model.parameters()))
    te.replace_embedding_bags(model, capacity=capacity, optimizer=trained)
    return model, trained


@parametrize_pairs(
    optimizer=[*OPTIMIZERS],
    kind=["equal", "lengths", "offsets", "mixed", "int32", "padding"],
    capacity=CAPACITIES,
)
def test_tables_of_several_widths_are_planned_as_one_and_updated_by_width(joined, optimizer, kind, capacity):
    apart = train(*of_two_widths(kind, optimizer, capacity), lambda _: given(kind))
    assert not joined["plans"]
    assert_same_bits(train(*of_two_widths(kind, optimizer, capacity), ahead(kind)), apart)
    assert joined["plans"] == [OF_TWO_WIDTHS] * (STEPS - 1)
    assert joined["updates"] == 2 * (STEPS - 1)


@parametrize_pairs(optimizer=[*OPTIMIZERS], kind=["equal", "mixed"], capacity=CAPACITIES)
def test_a_width_of_one_table_is_planned_with_the_others(joined, optimizer, kind, capacity):
    apart = train(*of_two_widths(kind, optimizer, capacity, LoneWidths), lambda _: given(kind))
    assert not joined["plans"]
    assert_same_bits(train(*of_two_widths(kind, optimizer, capacity, LoneWidths), ahead(kind)), apart)
    assert joined["plans"] == [OF_LONE_WIDTHS] * (STEPS - 1)
    assert joined["updates"] == 3 * (STEPS - 1)


@pytest.mark.parametrize("fetched", [False, True])
@parametrize_pairs(
    optimizer=[*OPTIMIZERS], of=[(TwoWidths, OF_TWO_WIDTHS), (LoneWidths, OF_LONE_WIDTHS)], capacity=[1, 60, 0.5]
)
def test_captured_steps_of_several_widths(joined_on_gpu, optimizer, of, capacity, fetched):
    model, plans = of
    apart = train(*of_two_widths("equal", optimizer, capacity, model), lambda _: given("equal", 2 * STEPS))
    many = ahead("equal", 1, 2 * STEPS) if fetched else lambda _: given("equal", 2 * STEPS)
    captured = train(*of_two_widths("equal", optimizer, capacity, model), many, seen=te.graph_step)
    assert_same_bits(captured, apart)
    assert set(joined_on_gpu["plans"]) == {plans}
    assert joined_on_gpu["updates"] > 0


def test_recorded_steps_of_several_widths(joined_on_gpu):
    """Calls of the model are planned as one from the third one on, and recorded when they come again."""
    batches = given("offsets", 1) * 4 * STEPS
    apart = train(*of_two_widths("offsets", "Adagrad"), lambda _: batches)
    assert not joined_on_gpu["plans"]
    model, optimizer = of_two_widths("offsets", "Adagrad")
    plan_calls(model)
    assert_same_bits(train(model, optimizer, lambda _: batches), apart)
    assert joined_on_gpu["plans"] == [OF_TWO_WIDTHS] * (4 * STEPS - 2)


def test_ids_of_one_width_that_are_wrong_are_those_of_its_table(joined):
    model, optimizer = of_two_widths("equal", "Adagrad")
    train(model, optimizer, ahead("equal"))
    batches = given("equal")
    batches[5] = (*batches[5][:1], (torch.full_like(batches[5][1][0], ROWS[1]),), *batches[5][2:])
    with pytest.raises(IdOutOfRangeError, match=r"table 'tables\.1'"):
        train(model, optimizer, lambda model: te.prefetch(batches, model))
    optimizer.zero_grad()
    made = len(joined["plans"])
    train(model, optimizer, ahead("equal"))
    assert len(joined["plans"]) > made


def test_a_copy_of_several_widths_is_planned_as_one_too(joined):
    model, optimizer = of_two_widths("equal", "Adagrad in backward")
    train(model, optimizer, ahead("equal"))
    copied, made = copy.deepcopy(model), len(joined["plans"])
    assert_same_bits(train(copied, optimizer, ahead("equal")), train(model, optimizer, ahead("equal")))
    assert set(joined["plans"][made:]) == {OF_TWO_WIDTHS}


def test_copies_of_several_widths_leave_nothing_behind(joined):
    model, optimizer = of_two_widths("equal", "Adagrad in backward")
    train(model, optimizer, ahead("equal"))
    caches = []
    for _ in range(3):
        copied = copy.deepcopy(model)
        train(copied, optimizer, ahead("equal", 1, 3))
        caches.append(weakref.ref(copied.tables[0].tables.groups[0].cache))
        del copied
    gc.collect()
    assert [cache() for cache in caches] == [None] * 3


class OneTwice(TwoWidths):
    """Looks up twice in a table of the second width, by ids that are not those that were planned."""

    def forward(self, batch):
        outputs = super().forward(batch)
        outputs[1] = outputs[1] * self.tables[1]((batch[1][0] + 1) % ROWS[1])
        return outputs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_of_the_second_width_is_updated_once_where_it_is_looked_up_twice(joined, optimizer):
    def run(batches, *, many):
        torch.manual_seed(0)
        model = OneTwice()
        trained = OPTIMIZERS[optimizer](list(model.parameters()))
        te.replace_embedding_bags(model, capacity=0.5, optimizer=trained)
        if many:
            plan_calls(model)
        return [*train(model, trained, batches), *[torch.tensor(table.stats().batches) for table in model.tables]]

    apart = run(lambda _: given("equal"), many=False)
    assert not joined["plans"]
    assert_same_bits(run(lambda _: given("equal"), many=True), apart)
    assert set(joined["plans"]) == {OF_TWO_WIDTHS}


def test_widths_of_other_batches_are_planned_each_as_one(joined):
    """Where the samples of one width are others than those of the other, as with sequences beside single ids."""

    def batches(_):
        found = []
        for each in given("equal"):
            found.append([(ids[:3] if number % 2 else ids,) for number, (ids,) in enumerate(each)])
        return found

    apart = train(*of_two_widths("equal", "Adagrad"), batches)
    model, optimizer = of_two_widths("equal", "Adagrad")
    plan_calls(model)
    assert_same_bits(train(model, optimizer, batches), apart)
    assert joined["plans"] == [(0, 1)] * 2 * (STEPS - 3)  # the first try of both has failed


def test_a_width_that_is_gone_frees_its_cache(joined):
    model, optimizer = of_two_widths("equal", "Adagrad in backward")
    train(model, optimizer, ahead("equal"))
    cache = weakref.ref(model.tables[1].tables.groups[0].cache)
    model.tables = nn.ModuleList([model.tables[0], model.tables[2]])
    gc.collect()
    assert cache() is None
    train(model, optimizer, lambda model: te.prefetch([(each[0], each[2]) for each in given("equal")], model))
    assert joined["plans"][-1] == (0, 1)


@pytest.mark.parametrize("name", USES)
def test_what_a_model_does_with_its_outputs(joined, name):
    apart = train(*converted("equal", 60, te.Adagrad(lr=0.1)), lambda _: given("equal"), use=USES[name])
    together = train(*converted("equal", 60, te.Adagrad(lr=0.1)), ahead("equal"), use=USES[name])
    assert len(joined["plans"]) == STEPS - 1
    assert joined["updates"] == (0 if name == "a part" else STEPS - 1)
    assert_same_bits(together, apart)


def test_tables_with_options_of_their_own_are_updated_apart(joined):
    def optimizer(parameters, lr):
        parameters = list(parameters)
        return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.3}], lr=lr)

    def run(batches):
        torch.manual_seed(0)
        model = Model("equal", sparse=True)
        trained = optimizer(model.parameters(), 0.1)
        te.replace_embedding_bags(model, capacity=60, optimizer=trained)
        return train(model, trained, batches)

    apart = run(lambda _: given("equal"))
    together = run(ahead("equal"))
    assert len(joined["plans"]) == STEPS - 1
    assert_same_bits(together, apart)


class Uneven(Model):
    """Looks a table up twice, one not at all, and updates between two forwards."""

    def forward(self, batch):
        (first,), (second,), _, (last,) = batch
        one = self.tables[0](first) + self.tables[1](second)
        one.square().sum().backward()
        return [self.tables[0](first), self.tables[3](last)]


def test_a_table_that_is_looked_up_twice_and_an_update_between(joined):
    def run(batches):
        torch.manual_seed(0)
        model = Uneven("equal")
        te.replace_embedding_bags(model, capacity=60, optimizer=te.Adagrad(lr=0.1))
        return train(model, None, batches)

    apart = run(lambda _: given("equal"))
    together = run(ahead("equal"))
    assert set(joined["plans"]) == {(0, 1, 3)}
    assert_same_bits(together, apart)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_evaluation_and_forwards_without_a_backward(joined, kept, dense):
    def run(batches):
        optimizer = te.Adam(lr=0.02, weight_decay=0.05) if dense else te.Adagrad(lr=0.1)
        model, _ = converted("mixed", 60, optimizer)
        found, held = [], []
        for number, batch in enumerate(batches(model)):
            with torch.set_grad_enabled(number % 3 != 1):
                outputs = model(batch)
            if number % 3 == 2:
                sum(each.sum() for each in outputs).backward()
            found += [each.detach().clone() for each in outputs]
            held.append(outputs if kept and number % 5 == 0 else None)
        return state(model, found)

    apart = run(lambda _: given("mixed", 2 * STEPS))
    together = run(ahead("mixed", 2, 2 * STEPS))
    assert len(joined["plans"]) == 2 * STEPS - 1
    assert_same_bits(together, apart)


def test_weights_of_samples(joined):
    def run(batches):
        model, _ = converted("equal", 60, te.Adagrad(lr=0.1))
        found = []
        for batch in batches(model):
            weights = torch.full((SAMPLES, 2), 0.5, requires_grad=True)
            outputs = [
                table(ids, per_sample_weights=weights) for table, (ids,) in zip(model.tables, batch, strict=True)
            ]
            sum(each.square().sum() for each in outputs).backward()
            found += [*(each.detach() for each in outputs), weights.grad]
        return state(model, found)

    apart = run(lambda _: given("equal"))
    assert_same_bits(run(ahead("equal")), apart)
    assert len(joined["plans"]) == STEPS - 1


def test_a_wrong_id_is_told_where_every_forward_has_weights(joined):
    model, _ = converted("equal", 60, te.Adagrad(lr=0.1))
    batches = given("equal", 8)
    batches[5][1][0][0, 1] = ROWS[1]

    def run():
        for batch in te.prefetch(batches, model):
            weights = torch.full((SAMPLES, 2), 0.5)
            for table, (ids,) in zip(model.tables, batch, strict=True):
                table(ids, per_sample_weights=weights).sum().backward()
            synchronize()

    with pytest.raises(IdOutOfRangeError, match=r"id 7 at position 1 is out of range for table 'tables\.1'"):
        run()
    assert len(joined["plans"]) in (6, 7)  # the host hears of it in this batch or the next


def test_forwards_on_several_streams(joined_on_gpu):
    def run(batches):
        model, _ = converted("offsets", 60, te.Adagrad(lr=0.1))
        beside, found = torch.cuda.Stream(), []
        for batch in batches(model):
            outputs = []
            for number, (table, inputs) in enumerate(zip(model.tables, batch, strict=True)):
                if number % 2:
                    beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(beside if number % 2 else torch.cuda.current_stream()):
                    outputs.append(table(*inputs))
            torch.cuda.current_stream().wait_stream(beside)
            sum(each.square().sum() for each in outputs).backward()
            found += [each.detach().clone() for each in outputs]
        return state(model, found)

    apart = run(lambda _: given("offsets"))
    assert_same_bits(run(ahead("offsets")), apart)
    assert len(joined_on_gpu["plans"]) == STEPS - 1


def test_one_forward_in_inference_mode_leaves_the_next_as_it_is(joined):
    model, _ = converted("equal", 60, None)
    for table in model.tables:
        table.requires_grad_(False)
    dense = torch.ones(WIDTH, 1, requires_grad=True)
    for batch in te.prefetch(given("equal", 4), model):
        with torch.inference_mode():
            model.tables[0](*batch[0])
        (model.tables[1](*batch[1]) @ dense).sum().backward()
    assert len(joined["plans"]) == 3
    assert dense.grad is not None


def test_a_captured_step_that_changes_its_ids_plans_them_once(joined_on_gpu):
    """The ids of the batch are others than those looked up, and no row's."""

    def run(seen):
        model, _ = converted("equal", 60, te.Adagrad(lr=0.1))

        def hashed(batch):
            for (ids,), rows in zip(batch, ROWS, strict=True):
                ids.remainder_(rows)
            return model(batch)

        batches = [tuple((ids + 1000 * rows,) for (ids,), rows in zip(b, ROWS, strict=True)) for b in given("equal")]
        found = train(lambda batch: hashed(batch), te.Adagrad(lr=0.1), lambda _: batches, seen=seen, of=model)
        return found, [table.stats().lookups for table in model.tables]

    apart, lookups = run(None)
    captured, counted = run(te.graph_step)
    assert_same_bits(captured, apart)
    assert len(joined_on_gpu["plans"]) <= 1
    assert all(one <= other for one, other in zip(lookups, counted, strict=True))


def test_a_plan_is_not_of_a_tensor_that_shows_its_memory_otherwise_since(device):
    model, _ = converted("equal", 60, te.Adagrad(lr=0.1))
    batches = given("equal", 3)
    for number, batch in enumerate(te.prefetch(batches, model)):
        if number == 2:
            batch[0][0].data = batch[0][0].data.view(2 * SAMPLES, 1)
        outputs = model(batch)
    assert [len(each) for each in outputs] == [2 * SAMPLES, SAMPLES, SAMPLES, SAMPLES]


@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.02, weight_decay=0.05)])
def test_counters_are_those_of_the_tables(device, optimizer):
    def run(batches):
        model, _ = converted("lengths", 1.0, optimizer)
        train(model, None, batches)
        return [table.stats() for table in model.tables]

    for apart, together in zip(run(lambda _: given("lengths")), run(ahead("lengths")), strict=True):
        assert together == apart


def test_counters_of_a_small_cache_add_up(device):
    model, _ = converted("lengths", 30, te.Adagrad(lr=0.1))
    train(model, None, ahead("lengths"))
    found = [table.stats() for table in model.tables]
    whole = model.tables[0].tables.whole.stats()
    for name in ("lookups", "hits", "unique", "rows_filled", "evictions", "rows_written_back", "rows_overflow"):
        assert sum(getattr(each, name) for each in found) == getattr(whole, name), name
    lengths = [1, 2, 3, 1]
    assert [each.lookups for each in found] == [STEPS * SAMPLES * length for length in lengths]
    assert [each.batches for each in found] == [STEPS] * 4


def test_a_wrong_id_is_told_by_table_and_position_and_nothing_is_updated(joined):
    model, _ = converted("lengths", 60, te.Adagrad(lr=0.1))
    batches = given("lengths", 4)
    batches[2][2][0][4, 1] = ROWS[2]
    before = []

    def run():
        for number, batch in enumerate(te.prefetch(batches, model)):
            sum(each.sum() for each in model(batch)).backward()
            synchronize()
            if number == 1:
                before.extend(each.clone() for each in model.state_dict().values())

    with pytest.raises(IdOutOfRangeError, match=r"id 50 at position 13 is out of range for table 'tables\.2' \(0 … 49"):
        run()
    assert_same_bits(list(model.state_dict().values()), before)
    assert len(joined["plans"]) == 3


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([1, 2, 2, 3, 4, 6], r"offsets\[0\] must be 0, got 1"),
        ([-3, 2, 2, 3, 4, 6], r"offsets\[0\] must be 0, got -3"),
        ([0, 2, 1, 3, 4, 6], r"offsets must not fall, but offsets\[2\] = 1 after offsets\[1\] = 2"),
        ([0, 2, 2, 3, 4, 99], r"offsets\[5\] = 99 lies beyond the 12 ids given"),
        ([0, 2, 2, 3, 4, 2**62], r"offsets\[5\] = 4611686018427387904 lies beyond the 12 ids given"),
    ],
)
@pytest.mark.parametrize("table", [0, 2, 3])
def test_wrong_offsets_are_told_as_those_of_one_table(joined, wrong, told, table):
    model, _ = converted("offsets", 60, te.Adagrad(lr=0.1))
    batches = [batch_of(3 * step, "offsets") for step in range(4)]
    batches[2][table][1].copy_(torch.tensor(wrong))

    def run():
        for batch in te.prefetch(batches, model):
            sum(each.sum() for each in model(batch)).backward()
            synchronize()

    with pytest.raises(InvalidInputError, match=told):
        run()
    assert len(joined["plans"]) == 3


class Histories(nn.Module):
    """Tables of three widths, of which two are looked up by one id a sample, and two by a sequence of them."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows, width in zip(ROWS, (8, 8, 4, 16), strict=True))

    def forward(self, batch):
        inputs = [ids if number % 2 else ids[:, 0] for number, (ids,) in enumerate(batch)]
        return [table(ids) for table, ids in zip(self.tables, inputs, strict=True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_single_ids_and_sequences_are_planned_as_one_each(joined, optimizer):
    """Whatever widths they have: once their batches have not fitted each other, those that do are planned as one."""

    def run(batches):
        torch.manual_seed(0)
        model = Histories()
        trained = OPTIMIZERS[optimizer](list(model.parameters()))
        te.replace_embedding_bags(model, capacity=60, optimizer=trained)
        return train(model, trained, batches)

    apart = run(lambda _: given("equal"))
    assert not joined["plans"]
    assert_same_bits(run(ahead("equal")), apart)
    pairs = len(joined["plans"]) // 2
    assert pairs >= STEPS // 2
    assert joined["plans"] == [((0,), (0,)), ((1,), (0,))] * pairs  # the second batch does not fit
    assert joined["updates"] >= 3 * pairs


def test_a_batch_without_ids_parts_nobody(joined):
    model, _ = of_two_widths("equal", "Adagrad in backward")
    empty = tuple((torch.empty((0, 2), dtype=torch.int64),) for _ in ROWS)
    for batch in te.prefetch([*given("equal", 3), empty, *given("equal", 3)], model):
        model(batch)
    assert joined["plans"] == [OF_TWO_WIDTHS] * 5


def test_what_does_not_fit_together_is_planned_apart(joined):
    """Samples that differ in number, no ids at all, and bags whose end is named."""
    model, _ = converted("equal", 60, te.Adagrad(lr=0.1))
    some = [(torch.arange(4).view(number + 1, -1)[:, :1],) for number in (0, 1, 0, 1)]
    empty = [(torch.empty((0, 2), dtype=torch.int64),)] * 4
    for batch in te.prefetch([given("equal")[0], tuple(some), tuple(empty)], model):
        assert [len(each) for each in model(batch)] == [len(ids) for (ids,) in batch]
    assert not joined["plans"]


def test_a_loop_that_is_left_keeps_nothing_locked(joined):
    model, _ = converted("equal", 1, te.Adagrad(lr=0.1))
    for batch in te.prefetch(given("equal"), model, 3):
        outputs = model(batch)
        if len(joined["plans"]) > 4:
            break
    del outputs
    cache = model.tables[0].tables.groups[0].cache
    assert not cache._tickets.live
    model.tables[0].flush()
