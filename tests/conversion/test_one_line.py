"""A model that is converted with its torch optimizer goes on as it was; what would not happen is told."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from devices import assert_close, assert_same_bits, randint
from following import steps_on_cpu
from torch import nn

import tieredemb as te
from tieredemb.errors import BackwardError, ConfigError, UnsupportedError
from tieredemb.modules.base import TieredModule
from tieredemb.modules.embedding_bag import TieredEmbeddingBag
from tieredemb.step.table_parameter import TableParameter
from tieredemb.tables.group import slot_bytes

ROWS = {"user": 40, "item": 30, "city": 5}


class Model(nn.Module):
    """Three tables and a dense layer."""

    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleDict({name: nn.EmbeddingBag(rows, 4, mode="sum") for name, rows in ROWS.items()})
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        return self.top(sum(table(ids % ROWS[name]) for name, table in self.emb.items()))


def pair(make=Model):
    """A model and its copy."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def step(model, optimizer, seed):
    optimizer.zero_grad()
    loss = model(randint(0, 40, (6, 3), seed=seed)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach().cpu()


def converted(model, **keywords):
    """The model, converted without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return te.replace_embedding_bags(model, **{"capacity": 0.2, **keywords})


def weights(model):
    return {name: value.cpu() for name, value in model.state_dict().items()}


def assert_trains_alike(model, plain, optimizer, reference, steps=6, first=0):
    for seed in range(first, first + steps):
        assert_close(step(model, optimizer, seed), step(plain, reference, seed))
    ours, theirs = weights(model), weights(plain)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert_close(value, theirs[name])


# --- the optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 0.001, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_a_model_goes_on_as_it_was(device, kind, options, trained):
    model, plain = pair()
    optimizer, reference = (kind(each.parameters(), **options) for each in (model, plain))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (optimizer, reference)]
    for seed in range(trained):
        step(model, optimizer, seed)
        step(plain, reference, seed)
    assert converted(model, optimizer=optimizer) is model
    assert all(type(table) is TieredEmbeddingBag for table in model.emb.values())
    for first in (10, 20):
        assert_trains_alike(model, plain, optimizer, reference, 3, first)
        for scheduler in schedulers:
            scheduler.step()


def test_each_table_has_the_group_and_the_place_of_its_weight(device):
    model, plain = pair()
    optimizers = []
    for each in (model, plain):
        groups = [
            {"params": [each.emb["user"].weight], "lr": 0.5},
            {"params": [each.top.weight, each.emb["city"].weight, each.top.bias, each.emb["item"].weight]},
        ]
        optimizers.append(torch.optim.SGD(groups, lr=0.1))
    converted(model, optimizer=optimizers[0])
    places = [[type(param) is TableParameter for param in group["params"]] for group in optimizers[0].param_groups]
    assert places == [[True], [False, True, False, True]]
    assert_trains_alike(model, plain, *optimizers)


def test_a_resumed_file_of_model_and_optimizer_goes_on(device):
    model, plain = pair()
    optimizer, reference = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain))
    steps_on_cpu(reference)
    converted(model, optimizer=optimizer)
    for seed in range(3):
        step(plain, reference, seed)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert_trains_alike(model, plain, optimizer, reference)


def test_several_optimizers_keep_their_own_tables(device):
    model, plain = pair()

    def optimizers(of):
        rest = [param for name, param in of.named_parameters() if name != "emb.user.weight"]
        return [torch.optim.SGD([of.emb["user"].weight], lr=0.3), torch.optim.Adagrad(rest, lr=0.1)]

    ours, theirs = optimizers(model), optimizers(plain)
    converted(model, optimizer=ours)
    for seed in range(4):
        for net, its in ((model, ours), (plain, theirs)):
            net.zero_grad()
            net(randint(0, 40, (6, 3), seed=seed)).square().mean().backward()
            for optimizer in its:
                optimizer.step()
    for name, value in weights(model).items():
        assert_close(value, weights(plain)[name])


def test_a_frozen_weight_stays_frozen_and_can_be_thawed(device):
    model, plain = pair()
    for each in (model, plain):
        each.emb["item"].weight.requires_grad_(False)
    optimizer, reference = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain))
    converted(model, optimizer=optimizer)
    assert_trains_alike(model, plain, optimizer, reference, 3)
    for each in (model, plain):
        each.emb["item"].requires_grad_(True)
    assert_trains_alike(model, plain, optimizer, reference, 3, first=9)


def test_a_weight_in_no_optimizer_is_not_trained_and_that_is_told(device):
    model, plain = pair()
    params = [param for name, param in model.named_parameters() if "city" not in name]
    optimizer = torch.optim.SGD(params, lr=0.1)
    del params
    with pytest.warns(UserWarning, match=r"not trained, as no optimizer given has their weights: 'emb.city'"):
        te.replace_embedding_bags(model, optimizer=optimizer)
    step(model, optimizer, 1)
    assert_same_bits([weights(model)["emb.city.weight"]], [weights(plain)["emb.city.weight"]])
    assert not torch.equal(weights(model)["emb.user.weight"], weights(plain)["emb.user.weight"])


def state_of(model, optimizer):
    """The modules, and where the optimizer has their params and a state of them."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    return [type(module) for module in model.modules()], params, {names[id(param)] for param in optimizer.state}


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda model: torch.optim.Rprop(model.parameters()), UnsupportedError, "cannot follow Rprop"),
        (lambda model: torch.optim.Adam(model.parameters(), amsgrad=True), UnsupportedError, "amsgrad=True"),
        (lambda model: torch.optim.SGD(model.top.parameters(), lr=0.1), ConfigError, "none of the 3 embeddings"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused_before_anything_changes(make, error, said):
    model, _ = pair()
    optimizer = make(model)
    before = state_of(model, optimizer)
    with pytest.raises(error, match=said):
        te.replace_embedding_bags(model, optimizer=optimizer)
    assert state_of(model, optimizer) == before


class Wrapper(torch.optim.Optimizer):
    """Looks like that of accelerate and of Lightning, which have the `optimizer` take its step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


@pytest.mark.parametrize("library", ["accelerate.optimizer", "lightning.pytorch.core.optimizer", None])
def test_an_optimizer_that_a_library_has_wrapped_is_the_one_inside(device, monkeypatch, library):
    model, plain = pair()
    wrapped, reference = (Wrapper(torch.optim.Adam(each.parameters(), lr=0.01)) for each in (model, plain))
    if library is None:
        with pytest.raises(UnsupportedError, match="cannot follow Wrapper"):
            te.replace_embedding_bags(model, optimizer=wrapped)
        return
    monkeypatch.setattr(Wrapper, "__module__", library)
    converted(model, optimizer=wrapped)
    assert_trains_alike(model, plain, wrapped, steps_on_cpu(reference))
    twin = copy.deepcopy(model)
    for table in twin.emb.values():
        table.follow(other := Wrapper(torch.optim.Adam(table.parameters(), lr=0.1)))
        assert table.engine.optimizer.optimizer is other.optimizer


def test_a_weight_that_two_optimizers_have_is_refused():
    model, _ = pair()
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in "ab"]
    with pytest.raises(ConfigError, match=r"'emb.user' is in 2 param groups"):
        te.replace_embedding_bags(model, optimizer=both)
    with pytest.raises(ConfigError, match="several optimizers must all be"):
        te.replace_embedding_bags(model, optimizer=[both[0], "adam"])
    for given in ("adam", 0.1, te.SGD):
        with pytest.raises(ConfigError, match="optimizer must be one of"):
            te.replace_embedding_bags(model, optimizer=given)


@pytest.mark.parametrize("at", [0, 2])
def test_what_fails_on_the_way_changes_nothing(monkeypatch, at):
    model, plain = pair()
    optimizer, reference = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain))
    step(model, optimizer, 1)
    step(plain, reference, 1)
    before, follow, calls = state_of(model, optimizer), TieredModule.follow, []

    def failing(self, *args, **keywords):
        calls.append(self)
        if len(calls) > at:
            raise MemoryError("no room")
        return follow(self, *args, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(TieredModule, "follow", failing)
        with pytest.raises(MemoryError):
            te.replace_embedding_bags(model, optimizer=optimizer)
    assert state_of(model, optimizer) == before
    assert_trains_alike(model, plain, optimizer, reference)


class Locked(nn.ModuleDict):
    """Takes no table of 5 rows."""

    def __setattr__(self, name, value):
        if isinstance(value, TieredEmbeddingBag) and value.num_embeddings == 5:
            raise RuntimeError("locked")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("holds", [False, True])
def test_a_model_that_refuses_a_table_has_all_embeddings_as_they_were(device, kind, holds):
    model, plain = pair()
    model.emb = Locked(model.emb)
    optimizer, reference = (kind(each.parameters(), lr=0.01) for each in (model, plain))
    for net, its in ((model, optimizer), (plain, reference)):
        step(net, its, 1)
    before, held = state_of(model, optimizer), list(model.parameters()) if holds else []
    with pytest.raises(RuntimeError, match="locked"):
        te.replace_embedding_bags(model, optimizer=optimizer)
    assert state_of(model, optimizer) == before
    assert all(each is mine for each, mine in zip(held, model.parameters(), strict=False))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits([mine, *entry(optimizer, mine)], [other, *entry(reference, other)])
    assert_trains_alike(model, plain, optimizer, reference)


def entry(optimizer, param):
    return [torch.as_tensor(value) for _, value in sorted(optimizer.state[param].items())]


def test_without_an_optimizer_a_model_that_trains_is_warned_of():
    model, plain = pair()
    with pytest.warns(UserWarning, match="will not train"):
        te.replace_embedding_bags(model)
    converted(plain.eval())
    with pytest.raises(te.errors.BackwardError, match="without an optimizer"):
        model(randint(0, 40, (2, 3), seed=0)).sum().backward()


# --- which, and how much ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "replaced"),
    [
        ({"include": "emb.user"}, {"user"}),
        ({"include": ["emb.u*", "*.city"]}, {"user", "city"}),
        ({"exclude": "emb.city"}, {"user", "item"}),
        ({"include": "emb.*", "exclude": ("*.item",)}, {"user", "city"}),
        ({"include": lambda name, module: module.num_embeddings > 5}, {"user", "item"}),
    ],
)
def test_chosen_embeddings_are_replaced(choice, replaced):
    model = converted(Model().eval(), **choice)
    assert {name for name, table in model.emb.items() if isinstance(table, TieredModule)} == replaced


def test_a_choice_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"exclude='cities' matches no embedding.*'emb.city'"):
        te.replace_embedding_bags(Model(), exclude="cities")
    with pytest.raises(ConfigError, match="include takes names"):
        te.replace_embedding_bags(Model(), include=[3])
    with pytest.raises(ConfigError, match=r"torch.nn.Module"):
        te.replace_embedding_bags(None)


def slots(model):
    return [table.tables.groups[0].slots for table in model.emb.values()]


def test_the_capacity_is_of_the_whole_model():
    """Tables of one width share a cache, and the caches the capacity."""

    def several():
        model = Model().eval()
        model.emb["wide"] = nn.EmbeddingBag(60, 8, mode="sum")
        return model.eval()

    rows = sum(len(table.weight) for table in Model().emb.values())
    assert slots(converted(Model().eval(), capacity=15)) == [15, 15, 15]
    assert slots(converted(Model().eval(), capacity=0.1)) == [-(-rows // 10)] * 3
    split = [15 * rows // (rows + 60)] * 3 + [15 * 60 // (rows + 60)]
    assert slots(converted(several(), capacity=15)) == split
    budget = 3000
    model = converted(several(), capacity=f"{budget}B")
    by_one = converted(several(), capacity=f"{2 * budget}B")
    assert all(1 <= few < many for few, many in zip(slots(model), slots(by_one), strict=True))
    caches = {table.tables.groups[0].cache: table.tables.groups[0] for table in model.emb.values()}
    assert len(caches) == 2
    taken = sum(group.slots * slot_bytes(group.cache.cold.layout, torch.device("cpu")) for group in caches.values())
    assert taken <= budget
    with pytest.raises(ConfigError, match="no row of each of 2 caches"):
        te.replace_embedding_bags(several(), capacity="100B")


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


class Begun(nn.Embedding):
    """Begins its weights in a way of its own, and looks up as its base does."""

    def __init__(self, rows, width):
        super().__init__(rows, width)
        nn.init.normal_(self.weight, std=0.01)

    def reset_parameters(self):
        nn.init.zeros_(self.weight)


def hooked():
    embedding = nn.Embedding(9, 4)
    embedding.register_forward_hook(lambda module, inputs, out: out * 2)
    return embedding


def masked():
    embedding = nn.Embedding(9, 4)
    embedding.weight.register_hook(lambda grad: grad * 0)
    return embedding


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Scaled(9, 4), "Scaled, a subclass with its own forward"),
        (hooked, "has hooks"),
        (masked, "has hooks on its weight"),
        (lambda: nn.Embedding(0, 4), r"weight of shape \(0, 4\)"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Embedding(9, 4)), "a subclass with its own"),
    ],
)
def test_what_a_twin_could_not_stand_for_is_left_and_told(make, said):
    model = nn.ModuleDict({"a": make(), "b": nn.Embedding(9, 4)}).eval()
    left = model["a"]
    with pytest.warns(UserWarning, match=rf"left as they are.*'a' .*{said}"):
        te.replace_embedding_bags(model)
    assert model["a"] is left
    assert isinstance(model["b"], TieredModule)
    with pytest.raises(ConfigError, match=said):
        te.replace_embedding_bags(nn.ModuleDict({"a": make()}), include="a")
    converted(nn.ModuleDict({"a": make(), "b": nn.Embedding(9, 4)}).eval(), exclude="a")


def test_tied_weights_are_left_and_told():
    model = nn.ModuleDict({"in": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)}).eval()
    model["out"].weight = model["in"].weight
    with pytest.warns(UserWarning, match="'in' shares its weight with 'out'"):
        te.replace_embedding_bags(model)
    assert type(model["in"]) is nn.Embedding
    linears = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    linears[2].weight = linears[1].weight
    converted(linears)


def test_a_subclass_that_only_begins_otherwise_is_replaced():
    model = nn.Sequential(Begun(9, 4)).eval()
    before = model[0].weight.detach().clone()
    assert_same_bits([converted(model)[0].state_dict()["weight"]], [before])


# --- what lives on ----------------------------------------------------------------------------------------------------


class Feature:
    """A plain object that keeps the module it has made, as torch-rechub's features do."""

    def __init__(self, module):
        self.embed = module


def test_plain_attributes_lists_and_dicts_get_the_twin(device, thawed):
    class Listed(Model):
        def __init__(self):
            super().__init__()
            self.order = [self.emb["item"], self.emb["user"]]
            self.by_name = {"deep": {"city": [self.emb["city"]]}}
            self.both = (self.emb["user"], self.top)
            self.features = [Feature(self.emb["user"])]
            object.__setattr__(self, "alias", self.emb["item"])

        def forward(self, ids):
            return super().forward(ids) + self.top(self.order[0](ids % 30))

    model, plain = pair(Listed)
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain))
    old = weakref.ref(model.emb["user"].weight)
    converted(model, optimizer=optimizer)
    user, item, city = (model.emb[name] for name in ("user", "item", "city"))
    assert model.order == [item, user]
    assert model.by_name["deep"]["city"] == [city]
    assert model.both == (user, model.top)
    assert model.features[0].embed is user
    assert model.alias is item
    gc.collect()
    assert old() is None
    assert_trains_alike(model, plain, optimizer, reference)


KEPT = []


def test_a_weak_proxy_of_the_model_is_left_alone():
    """As a Lightning module has of its trainer's."""
    model, _ = pair()
    gone = nn.Linear(1, 1)
    model.trainer = [weakref.proxy(model), weakref.proxy(model.emb["user"]), weakref.proxy(gone)]
    del gone
    converted(model.eval())
    assert isinstance(model.emb["user"], TieredEmbeddingBag)


def test_who_holds_an_old_weight_is_named(thawed):
    model = Model()
    model.penalised = [("l2", [model.emb["user"].weight])]
    with pytest.warns(UserWarning, match=r"old weights of 'emb.user' live on, held by a Model.*weight_decay=2 \* l2"):
        te.replace_embedding_bags(model.eval())
    model = Model()
    other = torch.optim.SGD([model.emb["item"].weight], lr=0.1)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "item" not in name], lr=0.1)
    with pytest.warns(UserWarning, match=r"'emb.item' live on, held by a SGD.*optimizer=\[one, other\]"):
        te.replace_embedding_bags(model, optimizer=optimizer)
    assert other.param_groups
    model = Model().eval()
    KEPT.append(model.emb["city"].weight)
    with pytest.warns(UserWarning, match=r"'emb.city' live on, held by a variable of .*test_one_line"):
        te.replace_embedding_bags(model)
    KEPT.clear()


def test_a_function_that_penalises_an_old_weight_is_named(thawed):
    model = Model().eval()
    weight = model.emb["user"].weight

    def penalty():
        return weight.square().sum()

    with pytest.warns(UserWarning, match=r"held by the function .*penalty"):
        te.replace_embedding_bags(model)
    assert penalty() > 0


def test_initialisers_that_look_for_embeddings_are_warned_of():
    model = converted(Model().eval())

    def begin(module):
        if isinstance(module, nn.Embedding):
            nn.init.zeros_(module.weight)

    with pytest.warns(UserWarning, match=r"apply\(begin\) looks for embeddings"):
        model.apply(begin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.apply(lambda module: module.train())
    assert all(table.training for table in model.emb.values())


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_a_converted_model_trains_in_ddp_of_one_process(tmp_path, options):
    losses = []
    for is_wrapped in (False, True):
        model, _ = pair()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        converted(model, optimizer=optimizer)
        if is_wrapped:
            dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        try:
            net = nn.Sequential(model, nn.Identity())
            if is_wrapped:
                net = nn.parallel.DistributedDataParallel(net, **options)
                with pytest.raises(RuntimeError, match="not needed for a module whose only parameters"):
                    nn.parallel.DistributedDataParallel(model.emb)
            for seed in range(3):
                optimizer.zero_grad()
                loss = net(randint(0, 40, (6, 3), seed=seed)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        finally:
            if is_wrapped:
                dist.destroy_process_group()
    assert_same_bits(losses[:3], losses[3:])


def test_a_penalty_is_over_all_parameters(device):
    model, plain = pair()
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain))
    converted(model, optimizer=optimizer)
    for seed in range(3):
        for net, its in ((model, optimizer), (plain, reference)):
            its.zero_grad()
            loss = net(randint(0, 40, (6, 3), seed=seed)).square().mean()
            (loss + 0.1 * sum(param.square().sum() for param in net.parameters())).backward()
            its.step()
    for name, value in weights(model).items():
        assert_close(value, weights(plain)[name])


# --- describe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "slots", "percent"),
    [
        (2000, 2000, "100 %"),
        (2000, 1996, "99.8 %"),
        (2000, 210, "10.5 %"),
        (2000, 1, "0.05 %"),
        (900_000, 9, "0.001 %"),
    ],
)
def test_describe_writes_a_share_without_an_exponent(rows, slots, percent, capsys):
    model = nn.Sequential(nn.EmbeddingBag(rows, 1, mode="sum")).eval()
    te.describe(te.replace_embedding_bags(model, capacity=slots))
    assert f"{slots} rows of {rows} ({percent})" in capsys.readouterr().out


def test_describe_tells_what_a_model_is(capsys):
    model = nn.ModuleDict({"a": nn.EmbeddingBag(2000, 8), "b": Scaled(9, 4), "top": nn.Linear(8, 1)})
    optimizer = torch.optim.Adam(
        [{"params": [model["b"].weight, *model["top"].parameters()]}, {"params": [model["a"].weight]}]
    )
    with pytest.warns(UserWarning, match="left as they are"):
        te.replace_embedding_bags(model, capacity=0.05, optimizer=optimizer)
    te.describe(model)
    said = capsys.readouterr().out
    assert "a.weight  2000      8  62.5 KiB  100 rows of 2000 (5 %)" in said
    assert "torch.optim.Adam, param group 1" in said
    assert "1 table, 2,000 rows, 16,000 numbers (62.5 KiB), among the 16,045 that parameters() counts" in said
    assert "'b' is a Scaled, a subclass with its own forward" in said
    several = nn.ModuleDict({"a": nn.Embedding(50, 4), "b": nn.Embedding(50, 4), "c": nn.Embedding(50, 2)}).eval()
    te.describe(te.replace_embedding_bags(several, capacity=0.1))
    said = capsys.readouterr().out.splitlines()[1:4]
    caches = ["1: 10 rows of 100 (10 %), CPU", "1: 10 rows of 100 (10 %), CPU", "2: 5 rows of 50 (10 %), CPU"]
    assert all(cache in line for cache, line in zip(caches, said, strict=True))
    te.describe(nn.Linear(2, 2))
    assert capsys.readouterr().out == "no tiered tables\n"
    for optimizer, trainer in (
        (te.SGD(lr=0.1), "SGD, in backward"),
        (torch.optim.SGD, "nothing yet: tieredemb.follow"),
    ):
        te.describe(te.TieredEmbedding(5, 2, optimizer=optimizer))
        assert trainer in capsys.readouterr().out
    te.describe(te.TieredEmbedding(5, 2, optimizer=te.SGD(lr=0.1)).requires_grad_(False))
    assert "nothing: frozen" in capsys.readouterr().out
    mixed = nn.ModuleList([te.TieredEmbedding(5, 2, optimizer=each) for each in (torch.optim.SGD, te.SGD(lr=0.1))])
    te.describe(mixed)
    assert "10 rows, 20 numbers (80 B), 10 of them among the 10 that parameters() counts" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"torch.nn.Module"):
        te.describe("model")


# --- libraries that build their optimizers themselves -----------------------------------------------------------------


class Trainer:
    """Builds its optimizer in `fit`, as libraries do."""

    def __init__(self, kind, **options):
        self._kind, self._options = kind, options

    def fit(self, model, *, first=0):
        head = [each for name, each in model.named_parameters() if name.startswith("top")]
        rest = [each for name, each in model.named_parameters() if not name.startswith("top")]
        optimizers = [self._kind(rest, lr=0.05, **self._options), torch.optim.SGD(head, lr=0.1)]
        for seed in range(first, first + 3):
            loss = model(randint(0, 40, (6, 3), seed=seed)).square().mean()
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            for each in optimizers:
                each.step()
        return optimizers


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_that_a_library_builds_is_found(device, kind):
    model, plain = pair()
    converted(model, optimizer=kind)
    copied = copy.deepcopy(model)
    trainer = Trainer(kind)
    for each in (model, plain, copied):  # the last is of another that has not followed any
        trainer.fit(each)
    ours, theirs, others = map(weights, (model, plain, copied))
    for name, value in theirs.items():
        assert_close(ours[name], value)
        assert_close(others[name], value)


def test_where_no_optimizer_has_the_tables_or_several_have_training_is_refused(device):
    model, _ = pair()
    converted(model, optimizer=torch.optim.Adam)
    loss = model(randint(0, 40, (6, 3), seed=0)).square().mean()
    dense = torch.optim.Adam([each for name, each in model.named_parameters() if name.startswith("top")])
    with pytest.raises(BackwardError, match=r"tieredemb\.follow"):
        loss.backward(retain_graph=True)
    both = [torch.optim.Adam(model.parameters()) for _ in "ab"]
    with pytest.raises(BackwardError, match=r"tieredemb\.follow"):
        loss.backward(retain_graph=True)
    del both, dense
    other = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ConfigError, match=r"have no room for what the Adagrad"):
        loss.backward()
    del other


# --- gradients and hooks ----------------------------------------------------------------------------------------------


def test_a_gradient_that_is_there_is_taken_over(device):
    model, plain = pair()
    optimizer, reference = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, plain))
    for each in (model, plain):
        each(randint(0, 40, (6, 3), seed=1)).square().mean().backward()
    converted(model, optimizer=optimizer)
    optimizer.step()
    reference.step()
    assert_trains_alike(model, plain, optimizer, reference, steps=2)


def zeroed(p):
    p.grad.zero_()


def test_hooks_of_parameters_go_back(device):
    model, _ = pair()
    converted(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model.emb["user"].weight.register_hook(lambda grad: grad * 0)
    model.emb["item"].weight.register_post_accumulate_grad_hook(zeroed)
    te.restore_embedding_bags(model)
    model(randint(0, 40, (6, 3), seed=1)).square().mean().backward()
    assert [bool(table.weight.grad.any()) for table in model.emb.values()] == [False, False, True]


def test_a_model_inside_ddp_is_converted_before(tmp_path):
    model, _ = pair()
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="convert the model before DistributedDataParallel wraps it"):
            te.replace_embedding_bags(ddp, capacity=0.2, optimizer=optimizer)
    finally:
        dist.destroy_process_group()
    assert type(model.emb["user"]) is nn.EmbeddingBag
