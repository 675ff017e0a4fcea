"""A capacity that caches of several widths share goes where most lookups come of it, and changes no number."""

import copy
import math
import threading

import pytest
import torch
from torch import nn

import tieredemb as te
from tieredemb.tables.use import use_of

STEPS, BATCH = 64, 128
BUSY, IDLE = 3_000, 40_000  # rows: nearly all lookups are of the first, which has few rows, and so a small share


def generator(seed):
    return torch.Generator("cpu").manual_seed(seed)


def ids_of(step, rows):
    drawn = torch.rand(BATCH, generator=generator(step * 2 + (rows == IDLE)), device="cpu")
    return (rows * drawn**3).long()


def collection(device, capacity, **more):
    return te.TieredEmbeddingBagCollection(
        [
            te.TableConfig(name="busy", num_embeddings=BUSY, embedding_dim=16, placement="cached"),
            te.TableConfig(name="idle", num_embeddings=IDLE, embedding_dim=32, placement="cached"),
        ],
        capacity=capacity,
        device=device,
        **{"optimizer": te.Adagrad(lr=0.1)} | more,
    )


def batch_of(step, device):
    busy = torch.cat([ids_of(step * 10 + part, BUSY) for part in range(4)])
    idle = torch.randint(IDLE, (8,), generator=generator(step), device="cpu")
    lengths = torch.tensor([0] + [4] * BATCH + [1] * 8 + [0] * (BATCH - 8), device="cpu")
    offsets = lengths.cumsum(0)
    return torch.cat([busy, idle]).to(device), offsets.to(device)


def cache_bytes(module):
    return {width: sum(report["cache"].values()) for width, report in module.memory_report().items()}


def train(tables, device, steps=STEPS, batches=None):
    outputs = []
    for ids, offsets in batches or (batch_of(step, device) for step in range(steps)):
        out = tables(ids, offsets)
        out.square().sum().backward()
        outputs.append(out.detach().clone())
    return outputs


def assert_same_bits(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def test_a_collection_gives_the_width_that_is_used_its_slots(device):
    tables = collection(device, 0.02)
    before, hits = cache_bytes(tables), tables.stats()
    train(tables, device, 20)
    first = tables.stats()
    train(tables, device, STEPS)
    after, second = cache_bytes(tables), tables.stats()
    assert after["width 16"] > 3 * before["width 16"]
    assert sum(after.values()) <= 1.01 * sum(before.values())
    assert (second - first).hit_rate > (first - hits).hit_rate + 0.2


@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.1), te.RowWiseAdagrad(lr=0.1)], ids=repr)
def test_dividing_changes_no_number(device, optimizer):
    small, whole = collection(device, 0.02, optimizer=optimizer), collection(device, 1.0, optimizer=optimizer)
    before = cache_bytes(small)
    assert_same_bits(train(small, device), train(whole, device))
    assert cache_bytes(small) != before
    ours, theirs = small.state_dict(), whole.state_dict()
    assert_same_bits(list(ours.values()), list(theirs.values()))
    assert (small.stats().lookups, small.stats().batches) == (whole.stats().lookups, whole.stats().batches)


class TwoWidths(nn.Module):
    def __init__(self):
        super().__init__()
        self.busy, self.more = nn.EmbeddingBag(BUSY, 16, mode="sum"), nn.EmbeddingBag(BUSY, 16, mode="sum")
        self.idle = nn.EmbeddingBag(IDLE, 32, mode="sum")

    def forward(self, x):
        return torch.cat([self.busy(x[0]), self.more(x[1]), self.idle(x[2])], 1)


def converted(device, capacity, optimizer_of, **more):
    torch.manual_seed(3)
    model = TwoWidths().to(device)
    optimizer = optimizer_of(model.parameters())
    te.replace_embedding_bags(model, capacity=capacity, optimizer=optimizer, placement="cached", **more)
    return model, optimizer


def inputs_of(step, device):
    busy = [ids_of(step * 10 + part, BUSY).view(-1, 2).to(device) for part in range(2)]
    return [*busy, ids_of(step, IDLE).view(-1, 2).to(device)[:64]]


def steps_of(model, optimizer, batches):
    outputs = []
    for x in batches:
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
        outputs.append(out.detach().clone())
    return outputs


@pytest.mark.parametrize("loop", ["eager", "prefetch"])
@pytest.mark.parametrize(
    "optimizer_of",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01)],
    ids=["SGD", "Adam"],
)
def test_a_converted_model_of_two_widths_is_divided(device, loop, optimizer_of):
    (small, ours), (whole, theirs) = converted(device, 0.02, optimizer_of), converted(device, 1.0, optimizer_of)
    before = cache_bytes(small.busy)["width 16"]
    batches = [inputs_of(step, device) for step in range(STEPS)]
    loader = te.prefetch([list(batch) for batch in batches], small) if loop == "prefetch" else batches
    assert_same_bits(steps_of(small, ours, loader), steps_of(whole, theirs, batches))
    assert cache_bytes(small.busy)["width 16"] > 1.5 * before
    assert_same_bits(list(small.state_dict().values()), list(whole.state_dict().values()))
    copied = copy.deepcopy(small)
    assert cache_bytes(copied.busy) == cache_bytes(small.busy)


@pytest.mark.parametrize("policy", [te.LRU(), te.LFU(remember_evicted=False)], ids=repr)
def test_scores_that_count_no_uses_divide_nothing(device, policy):
    tables = collection(device, 0.02, policy=policy)
    before = cache_bytes(tables)
    train(tables, device)
    assert cache_bytes(tables) == before


def test_caches_far_smaller_than_a_batch_stay(device):
    tables = collection(device, 8)
    before = cache_bytes(tables)
    train(tables, device)
    assert cache_bytes(tables) == before


def test_tables_of_calls_of_their_own_keep_their_capacity(device):
    torch.manual_seed(3)
    model = TwoWidths().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    te.replace_embedding_bags(model, capacity=0.02, optimizer=optimizer, include=["idle"], placement="cached")
    te.replace_embedding_bags(model, capacity=0.05, optimizer=optimizer, placement="cached")
    before = cache_bytes(model.busy), cache_bytes(model.idle)
    steps_of(model, optimizer, [inputs_of(step, device) for step in range(STEPS)])
    assert (cache_bytes(model.busy), cache_bytes(model.idle)) == before


def test_a_batch_in_flight_puts_it_off(device):
    tables = collection(device, 0.02)
    before, held = cache_bytes(tables), tables(*batch_of(0, device))
    train(tables, device, 24)
    assert cache_bytes(tables) == before
    held.sum().backward()
    train(tables, device, 3 * STEPS)
    assert cache_bytes(tables)["width 16"] > before["width 16"]


def test_threads_that_serve_meanwhile_find_the_caches(device):
    """One of them divides, and the others are on their way to the caches from before."""
    for _ in range(4):
        small, whole = collection(device, 0.02), collection(device, 1.0)
        errors = []

        def serve(first, tables=small, errors=errors):
            try:
                with torch.no_grad():
                    for step in range(first, first + 24):
                        tables(*batch_of(step, device))
                        tables.stats()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(100 * number,)) for number in range(1, 4)]
        for thread in threads:
            thread.start()
        found = train(small, device, 24)
        for thread in threads:
            thread.join()
        assert not errors
        assert_same_bits(found, train(whole, device, 24))
        assert_same_bits(list(small.state_dict().values()), list(whole.state_dict().values()))


def test_accumulated_gradients_are_of_rows_that_stay(device):
    small, whole = collection(device, 0.02), collection(device, 1.0)
    for tables in (small, whole):
        for first in range(0, STEPS, 4):
            with tables.accumulate():
                train(tables, device, batches=[batch_of(step, device) for step in range(first, first + 4)])
    assert_same_bits(list(small.state_dict().values()), list(whole.state_dict().values()))


@pytest.mark.usefixtures("gpu")
def test_a_captured_step_is_captured_anew():
    small, whole = collection("cuda", 0.02), collection("cuda", 1.0)
    before = cache_bytes(small)

    def step_of(tables):
        def step(batch):
            out = tables(*batch)
            out.square().sum().backward()
            return out

        return step

    captured, eager = te.graph_step(step_of(small)), step_of(whole)
    for step in range(3 * STEPS):
        batch = batch_of(step % STEPS, "cuda")
        assert torch.equal(captured(batch), eager(batch))
    assert cache_bytes(small)["width 16"] > 3 * before["width 16"]


@pytest.mark.usefixtures("gpu")
def test_a_captured_step_of_a_prefetch_loop_is_captured_anew():
    small, whole = collection("cuda", 0.02), collection("cuda", 1.0)
    before, found = cache_bytes(small), []

    def step(batch):
        out = small(*batch)
        out.square().sum().backward()
        return out

    captured, batches = te.graph_step(step), [batch_of(step % STEPS, "cuda") for step in range(3 * STEPS)]
    for batch in te.prefetch(batches, small):
        found.append(captured(batch).clone())
    assert_same_bits(found, train(whole, "cuda", batches=batches))
    assert cache_bytes(small)["width 16"] > 3 * before["width 16"]


@pytest.mark.usefixtures("gpu")
def test_caches_that_a_graph_of_the_users_knows_stay():
    small, whole = collection("cuda", 0.02), collection("cuda", 1.0)
    buffers = [each.clone() for each in batch_of(0, "cuda")]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            small(*buffers)
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), cache_bytes(small)
    with torch.no_grad(), torch.cuda.graph(graph):
        out = small(*buffers)
    train(small, "cuda"), train(whole, "cuda")
    assert cache_bytes(small) == before
    for step in range(5):
        for buffer, values in zip(buffers, batch_of(step, "cuda"), strict=True):
            buffer.copy_(values)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, whole(*batch_of(step, "cuda")))


def few_rows(device):
    """A batch of few rows, whose caches have room for all of them."""
    lengths = torch.tensor([1] * 8 + [0] * (BATCH - 8) + [1] * 8 + [0] * (BATCH - 8), device="cpu")
    ids = torch.arange(16, device="cpu") % 8
    return ids.to(device), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)


def test_a_look_that_changes_nothing_is_followed_by_one_after_eight_times_as_many_plans(device):
    tables = collection(device, 0.02)
    train(tables, device, batches=21 * [few_rows(device)])  # the first look is that of the batch after 20
    before = cache_bytes(tables)
    for step in range(21, 20 + 8 * 20):
        train(tables, device, batches=[batch_of(step, device)])
        assert cache_bytes(tables) == before
    train(tables, device, 1)
    assert cache_bytes(tables) != before


def content_of(directory):
    """What is in all files there, and when each was changed last."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("tier", ["memory", "file"])
def test_a_look_writes_nothing(device, tmp_path, tier):
    tables = collection(device, 0.02, storage=te.File(tmp_path / "rows") if tier == "file" else None)
    train(tables, device, batches=19 * [few_rows(device)])
    before, cached = content_of(tmp_path), cache_bytes(tables)
    train(tables, device, batches=3 * [few_rows(device)])
    assert cache_bytes(tables) == cached
    assert (tables.stats().rows_written_back, tables.stats().bytes_written_back) == (0, 0)
    assert content_of(tmp_path) == before
    tables.close()


def rows_of(batches, table):
    """The rows of a table that each of the batches uses, each once."""
    return [ids[offsets[table * BATCH] : offsets[(table + 1) * BATCH]].unique() for ids, offsets in batches]


def in_batch(rows):
    return sum(map(len, rows)) / len(rows)


@pytest.mark.parametrize("tier", ["memory", "file"])
def test_use_is_that_of_all_rows_wherever_they_are(device, tmp_path, tier):
    """Scores that do not age count uses exactly."""
    storage = te.File(tmp_path / "rows") if tier == "file" else None
    tables = collection(device, 0.2, policy=te.LFU(half_life_batches=math.inf), storage=storage)
    batches = [batch_of(step, device) for step in range(15)]
    train(tables, device, batches=batches)
    before = tables.stats()
    assert before.evictions > 0
    assert before.rows_overflow == 0
    for _ in range(2):  # to look changes nothing
        for table, group in enumerate(tables.tables.groups):
            use, rows = use_of(group, len(batches)), rows_of(batches, table)
            assert use.in_batch == pytest.approx(in_batch(rows))
            assert use.stands_for.sum() == len(torch.cat(rows).unique())
    assert tables.stats() == before
    tables.close()


def test_use_leaves_resident_tables_out(device):
    """They have slots that nobody else may get."""
    tables = te.TieredEmbeddingBagCollection(
        [
            te.TableConfig(name=name, num_embeddings=BUSY, embedding_dim=16, placement=placement)
            for name, placement in (("always", "resident"), ("busy", "cached"))
        ],
        capacity=BUSY + 600,
        device=device,
        optimizer=te.Adagrad(lr=0.1),
        policy=te.LFU(half_life_batches=math.inf),
    )
    batches = []
    for step in range(15):
        ids = torch.cat([ids_of(step * 10 + part, BUSY) for part in range(2)])
        batches.append((ids.to(device), torch.arange(2 * BATCH + 1, device="cpu").to(device)))
    train(tables, device, batches=batches)
    (group,) = tables.tables.groups
    use, rows = use_of(group, len(batches)), rows_of(batches, 1)
    assert use.in_batch == pytest.approx(in_batch(rows))
    assert use.stands_for.sum() == len(torch.cat(rows).unique())
    assert use.least == BUSY + 1


def test_use_is_estimated_from_few_slots_and_few_cold_rows(device, monkeypatch):
    monkeypatch.setattr("tieredemb.tables.use.MEMORY_SAMPLE", 300)
    monkeypatch.setattr("tieredemb.tables.use.TABLE_SAMPLE", 300)
    tables = collection(device, 0.3, policy=te.LFU(half_life_batches=math.inf))
    batches = [batch_of(step, device) for step in range(15)]
    train(tables, device, batches=batches)
    assert tables.stats().evictions > 0
    busy, rows = use_of(tables.tables.groups[0], len(batches)), rows_of(batches, 0)
    assert busy.in_batch == pytest.approx(in_batch(rows), rel=0.15)
    assert busy.stands_for.sum() == pytest.approx(len(torch.cat(rows).unique()), rel=0.15)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("storage", [None, te.HostMemory()], ids=["default", "host"])
def test_use_counts_the_batches_of_replays(storage):
    tables = collection("cuda", 0.2, policy=te.LFU(half_life_batches=math.inf), storage=storage)
    batches = [batch_of(step, "cuda") for step in range(15)]

    def step(batch):
        tables(*batch).square().sum().backward()

    captured = te.graph_step(step)
    for batch in batches:
        captured(batch)
    for table, group in enumerate(tables.tables.groups):
        use, rows = use_of(group, len(batches)), rows_of(batches, table)
        assert use.in_batch == pytest.approx(in_batch(rows))
        assert use.stands_for.sum() == len(torch.cat(rows).unique())
