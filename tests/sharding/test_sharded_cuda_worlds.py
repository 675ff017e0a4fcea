"""Several ranks on one GPU, which send each other rows through their hosts: the tests of worlds on CPUs, with the bits
of one process on the GPU. Skips without a GPU; TIEREDEMB_REQUIRE_CUDA=1 fails."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from devices import equal, require_gpu
from sharding import (
    sequences,
    test_sharded_agreement,
    test_sharded_checkpoints,
    test_sharded_failures,
    test_sharded_following,
    test_sharded_memory,
    test_sharded_modules,
    test_sharded_padded,
    test_sharded_prefetch,
    test_sharded_states,
    test_sharded_unique_rows,
    test_sharded_whole_tables,
)
from sharding.ranks import batch_of, calls_of, one_process, seven, sharded_run, step_of, tables_of, uneven
from sharding.test_sharded_padded import sizes_sent
from sharding.test_sharded_training import compare
from sharding.worlds import kept
from training import NAMES, OPTIMIZERS

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.sharding.layout import RowWise
from tieredemb.step.recorded_plans import RecordedPlan

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture(scope="module")
def worlds():
    """Worlds of ranks on the GPU, each started when a test first uses it, and kept."""
    require_gpu()
    yield from kept("cuda")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 3])
def test_cuda_whatever_ranks_do(worlds, size, seed):
    sequences.check(worlds(size), seed, captures=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_cuda_every_optimizer(worlds, optimizer):
    compare(worlds(2), tables_of(), "all kinds", uneven, optimizer=optimizer, capacity=1.0)


@pytest.mark.parametrize("sharding", ["rows", "tables", "copies", "all kinds"])
@pytest.mark.parametrize("modes", [("mean",), ("sum", "mean", "max")], ids="-".join)
def test_cuda_every_mode_and_sharding(worlds, sharding, modes):
    tables = tables_of(modes=modes, widths=(4, 6))
    compare(worlds(3), tables, sharding, uneven, optimizer=te.Adagrad(lr=0.1), capacity=1.0)


@pytest.mark.parametrize("capacity", [1, 5, 0.3])
@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
def test_cuda_any_capacity(worlds, optimizer, capacity):
    compare(worlds(3), tables_of(), "all kinds", uneven, optimizer=optimizer, capacity=capacity, steps=6)


@pytest.mark.parametrize("sharding", ["rows", "tables", "copies"])
def test_cuda_weighted(worlds, sharding):
    keywords = {"optimizer": te.Adagrad(lr=0.1), "capacity": 1.0, "weighted": True}
    compare(worlds(2), tables_of(widths=(4, 8)), sharding, uneven, **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"max_norm": 0.5, "optimizer": te.Adam(lr=0.1)},
        {"scale_grad_by_freq": True, "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.bfloat16, "rounding": "stochastic", "optimizer": te.Adagrad(lr=0.1)},
        {"dtype": torch.float16, "rounding": "stochastic", "optimizer": te.Adam(lr=0.1), "output_dtype": torch.float32},
        {"check_ids": "always", "policy": te.LRU(), "optimizer": te.SGD(lr=0.1)},
        {"storage": te.HostMemory(), "optimizer": te.SGD(lr=0.1)},
    ],
    ids=lambda keywords: "-".join(map(str, keywords)),
)
def test_cuda_every_option(worlds, keywords):
    compare(worlds(3), tables_of(modes=("sum", "mean")), "all kinds", uneven, capacity=0.5, **keywords)


@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("capacity", [1, 0.5])
@pytest.mark.parametrize("max_ids", [12, 1500])
@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_cuda_exchanges_of_one_size(worlds, sharding, max_ids, capacity, optimizer):
    tables = test_sharded_padded.MIXED
    keywords = {"optimizer": optimizer, "capacity": capacity, "shape": "some equal", "max_ids": max_ids}
    compare(worlds(3), tables, sharding, uneven, **keywords)


@pytest.mark.parametrize("weighted", ["constant", True])
@pytest.mark.parametrize("sharding", ["rows", "tables", "every other"])
def test_cuda_exchanges_of_one_size_weighted(worlds, sharding, weighted):
    for options in ({}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}):
        test_sharded_padded.test_weights_of_samples(worlds, options, sharding, weighted)


def test_cuda_exchanges_of_one_size_ahead_and_refused(worlds):
    (fits, warned), (needed, _) = (worlds(2).run(sizes_sent, most, seven, True)[0] for most in (64, None))
    assert not warned
    # four kinds of exchanges, of which that of rows is learned from the first; without max_ids all of them are
    assert len(fits) <= 5
    assert len(needed) == 8
    test_sharded_padded.test_ahead_and_accumulated(worlds, "every other", True)
    test_sharded_padded.test_tables_of_several_features(worlds, "every other")
    test_sharded_padded.test_a_rank_that_fails_is_raised_on_all(worlds, "id", "IdOutOfRangeError")
    test_sharded_padded.test_ranks_do_what_all_can(worlds, 64, (3, 2, 3), 2)
    test_sharded_padded.test_a_wrong_id_is_noticed_before_a_replay_on_all_ranks(worlds)


def replays_of(rank, size, *given):
    """How many plans a run on the ranks replays here."""
    with calls_of(RecordedPlan, "replay") as replays:
        sharded_run(rank, size, *given)
    return len(replays)


def test_cuda_equal_batches_have_their_plans_recorded(worlds):
    """Of table-wise tables, where as many ids are requested from each owner in every step."""
    tables, keywords = tables_of(padding=(None,)), {"optimizer": te.SGD(lr=0.1), "capacity": 0.5}
    compare(worlds(2), tables, "tables", seven, steps=12, shape="ones", **keywords)
    counts = worlds(2).run(replays_of, tables, "tables", 12, seven, False, keywords, "ones")
    assert all(count > 0 for count in counts), counts


@pytest.mark.parametrize("optimizer", [te.Adagrad(lr=0.1), te.Adam(lr=0.05)], ids=["sparse", "dense"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("capacity", [1, 0.5])
def test_cuda_ahead(worlds, depth, optimizer, capacity):
    test_sharded_prefetch.test_ahead_or_not_bits_are_the_same(worlds, 3, depth, optimizer, capacity)


def test_cuda_a_loop_learns_meets_bad_ids_and_is_left(worlds):
    test_sharded_prefetch.test_what_is_looked_up_is_learned_from_the_first_batch(worlds)
    test_sharded_prefetch.test_a_bad_id_that_was_planned_comes_at_its_batch_on_all_ranks(worlds)
    test_sharded_prefetch.test_a_loop_that_is_left_leaves_nothing_behind(worlds)
    test_sharded_agreement.test_a_plan_that_one_rank_cannot_take_is_given_up_on_all(worlds)
    test_sharded_agreement.test_forwards_are_ordered_by_when_they_came(worlds)


def runs_from_host(rank, size, path, steps):
    """Over a file, whose plans a thread may make, of batches in host memory."""
    model = test_sharded_prefetch.model_of(te.Adagrad(lr=0.1), capacity=4, storage=te.File(str(path)))
    tables = test_sharded_prefetch.TABLES
    batches = [tuple(part.cpu() for part in batch_of(tables, step, rank, samples=uneven)) for step in range(steps)]
    outputs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank without samples cannot tell its tensors apart
        for batch in te.prefetch(batches, model, 2, ids_of=lambda batch: batch[:2]):
            outputs.append(step_of(model, batch, weighted=False)[0])
    weights = dict(model.state_dict())
    model.close()
    return outputs, weights


def test_cuda_batches_of_host_memory_over_a_file(worlds, tmp_path):
    tables = test_sharded_prefetch.TABLES
    alone, expected = one_process(3, tables, 8, uneven, False, {"optimizer": te.Adagrad(lr=0.1), "capacity": 1.0})
    answers = worlds(3).run(runs_from_host, tmp_path / "rows", 8)
    for rank, (outputs, _) in enumerate(answers):
        assert all(equal(mine, theirs) for mine, (theirs, _) in zip(outputs, alone[rank], strict=True))
    for name, weight in expected.items():
        assert equal(answers[0][1][name], weight)


@pytest.mark.parametrize("kind", ["id", "offset", "weights", "storage"])
def test_cuda_a_rank_that_fails_is_raised_on_all(worlds, kind):
    expected = {
        "id": ("IdOutOfRangeError", "id 40 at position"),
        "offset": ("InvalidInputError", "offsets"),
        "weights": ("PeerError", "per_sample_weights are given on ranks"),
        "storage": ("StorageFullError", "no space is left"),
    }
    test_sharded_failures.test_a_rank_that_fails_is_raised_on_all(worlds, 1, kind, *expected[kind])


def test_cuda_whole_tables_are_loaded_or_refused(worlds):
    test_sharded_failures.test_whole_tables_are_loaded_on_every_rank(worlds)
    test_sharded_failures.test_what_rank_0_has_of_a_state_dict_is_loaded_by_all(worlds, "rank 0 alone")
    test_sharded_failures.test_tables_that_one_rank_has_no_space_for_none_loads(worlds)


def test_cuda_an_update_that_one_rank_cannot_make_none_makes(worlds):
    test_sharded_agreement.test_an_update_that_one_rank_cannot_make_none_makes(worlds)
    test_sharded_agreement.test_an_accumulation_that_one_rank_leaves_is_dropped_on_all(worlds)


@pytest.mark.parametrize("where", ["rows", "pooled", "gradients"])  # of row-wise tables a GPU sorts no rows
def test_cuda_a_rank_short_of_memory_is_raised_on_all(worlds, where):
    test_sharded_memory.test_a_rank_short_of_memory_is_raised_on_all(worlds, where)


@pytest.mark.parametrize("how", ["plain", "clip", "scale", "late"])
@pytest.mark.parametrize("kind", ["Adagrad", "Adam"])
def test_cuda_following(worlds, kind, how):
    test_sharded_following.test_following_gives_the_bits_of_one_process(worlds, 3, kind, how)


def test_cuda_a_model_is_clipped(worlds):
    for norm_type in (2.0, 1.0, 2.5, float("inf")):
        test_sharded_following.test_a_model_with_sharded_tables_is_clipped(worlds, 3, norm_type)


def test_cuda_scaled_losses_and_several_forwards(worlds):
    test_sharded_modules.test_an_infinite_gradient_of_one_rank_keeps_all_from_the_step(worlds, 2)
    test_sharded_modules.test_several_forwards_are_one_step(worlds)
    test_sharded_modules.test_initial_rows_are_those_of_the_whole_table(worlds, RowWise())


@pytest.mark.parametrize("optimizer", [te.Adam(lr=0.05), te.RowWiseAdagrad(lr=0.1)], ids=["dense", "sparse"])
def test_cuda_saved_by_any_world_loaded_by_any_other(worlds, tmp_path, optimizer):
    test_sharded_checkpoints.test_saved_by_any_world_loaded_by_any_other(worlds, tmp_path, optimizer, (0, 2, 3, 0))


@pytest.mark.parametrize("shape", ["ones", "some equal", "mostly empty"])
def test_cuda_whole_tables_pool_their_bags(worlds, shape):
    test_sharded_whole_tables.test_bags_of_any_lengths(worlds, 3, shape)


@pytest.mark.parametrize("sharding", ["tables", "every other"])
def test_cuda_whole_tables_of_all_kinds(worlds, sharding):
    sparse, dense = te.RowWiseAdagrad(lr=0.1), te.Adam(lr=0.05)
    test_sharded_whole_tables.test_both_kinds_of_tables_of_all_modes_in_two_widths(worlds, sparse, 1.0, sharding)
    test_sharded_whole_tables.test_both_kinds_of_tables_of_all_modes_in_two_widths(worlds, dense, 1, sharding)
    test_sharded_whole_tables.test_tables_of_several_features(worlds, sharding)
    test_sharded_whole_tables.test_several_forwards_are_one_update(worlds, sharding)
    test_sharded_whole_tables.test_gradients_are_divided_by_the_ranks(worlds, sharding)
    test_sharded_whole_tables.test_gradients_that_wait_for_a_step_are_scaled(worlds, sharding)


@pytest.mark.parametrize("weighted", ["constant", True])
@pytest.mark.parametrize("sharding", ["tables", "every other"])
def test_cuda_whole_tables_weighted(worlds, sharding, weighted):
    for options in ({}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}):
        test_sharded_whole_tables.test_weights_of_samples(worlds, options, sharding, weighted)
    test_sharded_whole_tables.test_ahead_or_not_bits_are_the_same(worlds, sharding, 1, True, "some equal")


@pytest.mark.parametrize("shape", ["ones", "long"])
def test_cuda_a_row_comes_back_once(worlds, shape):
    for tables in (tables_of(padding=(None, 2)), test_sharded_unique_rows.SHARED):
        test_sharded_unique_rows.test_a_row_comes_back_once_to_each_rank_that_requests_it(worlds, 3, shape, tables)


@pytest.mark.parametrize("sharding", ["rows", "every other"])
def test_cuda_a_row_of_many_occurrences(worlds, sharding):
    sparse, dense, few = te.Adagrad(lr=0.1), te.Adam(lr=0.05), test_sharded_unique_rows.FEW
    test_sharded_unique_rows.test_long_bags_of_few_rows(worlds, few, sparse, 1.0, sharding)
    test_sharded_unique_rows.test_long_bags_of_few_rows(worlds, few, dense, 1, sharding)
    test_sharded_unique_rows.test_lookups_that_only_read_see_rows_of_a_dense_optimizer_as_they_are(worlds, sharding)


@pytest.mark.parametrize("weighted", ["constant", True])
def test_cuda_weights_of_samples_are_of_occurrences(worlds, weighted):
    for options in ({}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}):
        test_sharded_unique_rows.test_weights_of_samples_are_of_occurrences(worlds, options, weighted)


def test_cuda_whole_tables_weighted_on_one_rank(worlds):
    test_sharded_whole_tables.test_the_gradient_of_weights_may_be_requested_on_one_rank(worlds)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dtype": torch.bfloat16, "output_dtype": torch.float32, "optimizer": te.SGD(lr=0.1)},
        {"dtype": torch.float32, "output_dtype": torch.bfloat16, "optimizer": te.SGD(lr=0.1)},
    ],
    ids=lambda keywords: "-".join(map(str, keywords.values())),
)
def test_cuda_whole_tables_of_other_outputs(worlds, keywords):
    test_sharded_whole_tables.test_every_option(worlds, keywords, "every other")


@pytest.mark.parametrize("kind", ["id", "offset", "memory"])
def test_cuda_whole_tables_on_a_rank_that_fails(worlds, kind):
    expected = {
        "id": ("IdOutOfRangeError", "rank 1: id 40 at position"),
        "offset": ("InvalidInputError", "rank 1: offsets"),
        "memory": ("StorageFullError", "rank 1: no memory is left"),
    }
    test_sharded_whole_tables.test_a_rank_that_fails_is_raised_on_all(worlds, kind, *expected[kind])


def computes_again_beside(rank, size, recomputed):
    """Each step on a stream of its own."""
    stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def beside():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    return test_sharded_agreement.computes_again(rank, size, recomputed, beside)


@pytest.mark.parametrize("recomputed", [False, True])
def test_cuda_forwards_computed_again_and_on_other_streams(worlds, recomputed):
    found = worlds(2).run(computes_again_beside, recomputed)[0]
    test_sharded_agreement.assert_same(found, test_sharded_agreement.trained(range(4)))


def differs_in_device(rank, size):
    return test_sharded_failures.raised(
        ShardedTieredEmbeddingBagCollection, test_sharded_agreement.TABLES, device="cpu" if rank else "cuda"
    )


def test_cuda_ranks_on_other_kinds_of_devices_are_refused(worlds):
    for kind, text in worlds(2).run(differs_in_device):
        assert kind == "ConfigError"
        assert "the kind of device differs between the ranks" in text


@pytest.mark.parametrize("kind", ["SGD momentum", "Adam L2", "fused Adam"])
def test_cuda_state_dicts(worlds, kind):
    test_sharded_states.test_rank_0_has_the_state_dict_of_one_process(worlds, kind, "all kinds")
    test_sharded_states.test_what_any_number_of_processes_saved_any_other_goes_on_with(worlds, kind, (2, 3), "rank 0")
