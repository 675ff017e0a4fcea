"""Every public constructor and function, given what it cannot take: an error of the library's own that says what was
given."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from devices import equal
from torch import nn

import tieredemb as te
from tieredemb.errors import ConfigError, InvalidInputError, TieredEmbError, UnsupportedError
from tieredemb.ops import pooled_lookup

JUNK = {
    "None": None,
    "text": "x",
    "no text": "",
    "negative": -1,
    "fraction": 1.5,
    "huge": 10**400,
    "nan": math.nan,
    "complex": 1j,
    "true": True,
    "list": [],
    "names": ["a", "b"],
    "dict": {},
    "set": {1},
    "tuple": (0.9,),
    "bytes": b"x",
    "object": object(),
    "class": int,
    "array": np.ones(3),
    "tensor": torch.tensor([1.0, 2.0]),
    "meta": torch.empty(3, device="meta"),
    "dtype": torch.float16,
    "config": te.Adam(),
    "class of configs": te.Adagrad,
}
TABLE = {"name": "t", "num_embeddings": 10, "embedding_dim": 4}
MODULE = ("capacity", "policy", "storage", "optimizer", "seed", "dtype", "device", "max_norm", "norm_type",
          "scale_grad_by_freq", "check_ids", "rounding", "output_dtype")  # fmt: skip
OF_TABLE = (*MODULE, "num_embeddings", "embedding_dim", "sparse", "_weight", "padding_idx", "placement")


def bag(**keywords):
    return te.TieredEmbeddingBag(10, 4, mode="sum", capacity=3, **keywords)


def converted(**keywords):
    model = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum").eval(), nn.Linear(4, 1))
    return te.replace_embedding_bags(**{"model": model} | keywords)


def followed(**keywords):
    bag().follow(**{"optimizer": torch.optim.Adam([nn.Parameter(torch.ones(1))])} | keywords)


def clipped(**keywords):
    te.clip_grad_norm_(**{"parameters": bag(optimizer=torch.optim.SGD), "max_norm": 1.0} | keywords)


def stepped(optimizer, **options):
    """A backward of tables whose param group has other options."""
    module = bag(optimizer=optimizer)
    module.fused_optimizer.param_groups[0].update(options)
    module(torch.tensor([[1, 2]])).sum().backward()


def stepped_by_torch(optimizer, **options):
    module = bag(optimizer=optimizer)
    followed = optimizer(module.parameters(), lr=0.1)
    module.follow(followed)
    followed.param_groups[0].update(options)
    module(torch.tensor([[1, 2]])).sum().backward()
    followed.step()


def pooled(**keywords):
    ids = {"homes": torch.tensor([0], dtype=torch.int32), "offsets": torch.tensor([0, 1])}
    pooled_lookup(**{"weight": torch.ones(4, 2), **ids} | keywords)


CALLS = {
    "Normal": (te.Normal, ("mean", "std")),
    "Uniform": (lambda **given: te.Uniform(**{"low": 0, "high": 1} | given), ("low", "high")),
    "LFU": (te.LFU, ("half_life_batches", "remember_evicted")),
    "SGD": (lambda **given: te.SGD(**{"lr": 0.1} | given), ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "Adagrad": (te.Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
    "Adam": (te.Adam, ("lr", "betas", "eps", "weight_decay", "weight_decay_on_use")),
    "AdamW": (te.AdamW, ("lr", "betas", "eps", "weight_decay")),
    "Adamax": (te.Adamax, ("lr", "betas", "eps", "weight_decay")),
    "NAdam": (te.NAdam, ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay")),
    "RMSprop": (te.RMSprop, ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")),
    "RowMeanAdagrad": (te.RowMeanAdagrad, ("lr", "lr_decay", "initial_accumulator_value", "eps")),
    "RowWiseAdagrad": (te.RowWiseAdagrad, ("lr", "initial_accumulator_value", "eps")),
    "SparseAdam": (te.SparseAdam, ("lr", "betas", "eps")),
    "SparseLion": (lambda **given: te.SparseLion(**{"lr": 0.1} | given), ("lr", "betas", "weight_decay")),
    "TableConfig": (
        lambda **given: te.TableConfig(**TABLE | given),
        (*TABLE, "mode", "padding_idx", "placement", "feature_names"),
    ),
    "File": (lambda **given: te.File(**{"path": "rows"} | given), ("path", "recover", "fresh", "keep")),
    "Pmem": (lambda **given: te.Pmem(**{"directory": "rows"} | given), ("directory", "max_bytes")),
    "TableWise": (te.TableWise, ("rank",)),
    "TieredEmbeddingBag": (
        lambda **given: te.TieredEmbeddingBag(**{"num_embeddings": 10, "embedding_dim": 4} | given),
        (*OF_TABLE, "mode", "include_last_offset"),
    ),
    "TieredEmbedding": (
        lambda **given: te.TieredEmbedding(**{"num_embeddings": 10, "embedding_dim": 4} | given),
        (*OF_TABLE, "_freeze"),
    ),
    "TieredEmbeddingBagCollection": (
        lambda **given: te.TieredEmbeddingBagCollection(**{"tables": [te.TableConfig(**TABLE)]} | given),
        (*MODULE, "tables", "is_weighted"),
    ),
    "TieredEmbeddingCollection": (
        lambda **given: te.TieredEmbeddingCollection(**{"tables": [te.TableConfig(**TABLE)]} | given),
        (*MODULE, "tables", "need_indices"),
    ),
    "from_pretrained": (
        lambda **given: te.TieredEmbedding.from_pretrained(**{"embeddings": torch.ones(5, 3)} | given),
        ("embeddings", "freeze"),
    ),
    "replace_embedding_bags": (
        converted,
        ("model", "capacity", "optimizer", "include", "exclude", "policy", "storage", "seed", "device", "dtype",
         "placement", "check_ids", "rounding", "output_dtype"),
    ),
    "follow": (followed, ("optimizer", "group", "instead_of", "in_state_dict")),
    "requires_grad_": (lambda **given: bag().requires_grad_(**given), ("requires_grad",)),
    "attach_grad_scaler": (
        lambda **given: bag(optimizer=te.SGD(lr=0.1)).fused_optimizer.attach_grad_scaler(**given),
        ("scaler",),
    ),
    "forward": (lambda **given: bag()(torch.tensor([1]), **given), ("offsets",)),
    "describe": (te.describe, ("model",)),
    "scores": (
        lambda **given: te.scores(**{"module": bag(), "x": torch.ones(2, 4)} | given),
        ("module", "x", "table"),
    ),
    "clip_grad_norm_": (clipped, ("parameters", "max_norm", "norm_type", "error_if_nonfinite", "foreach")),
    "prefetch": (
        lambda **given: te.prefetch(**{"loader": [], "model": bag()} | given),
        ("loader", "model", "depth", "ids_of"),
    ),
    "graph_step": (lambda **given: te.graph_step(**{"step": bag()} | given), ("step", "max_ids")),
    "pooled_lookup": (pooled, ("weight", "homes", "offsets", "per_sample_weights", "mode")),
    "step of SGD": (lambda **given: stepped(te.SGD(lr=0.1), **given), ("lr", "momentum", "nesterov")),
    "step of Adam": (lambda **given: stepped(te.Adam(), **given), ("lr", "betas", "eps", "weight_decay")),
    "step of torch's Adam": (
        lambda **given: stepped_by_torch(torch.optim.Adam, **given),
        ("lr", "betas", "eps", "weight_decay"),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS)
def test_junk_raises_errors_of_the_library_or_is_taken(call, capsys):
    run, names = CALLS[call]
    for name in names:
        taken = []
        for kind, junk in JUNK.items():
            with contextlib.suppress(TieredEmbError):
                run(**{name: junk})
                taken.append(kind)
        assert len(taken) < len(JUNK), name


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (lambda: te.Adagrad(0.1), r"Adagrad\(lr=0.1\)"),
        (lambda: te.Adam(nn.Linear(1, 1).parameters(), lr=0.1), r"Adam\(lr=…\).* no params"),
        (lambda: te.LFU(300), r"LFU\(half_life_batches=300\)"),
        (lambda: te.Uniform(-1, 1), r"Uniform\(low=-1, high=1\)"),
        (lambda: te.TableConfig("user", 10, 4), r"TableConfig\(name='user', num_embeddings=10, embedding_dim=4\)"),
        (lambda: te.TableWise(0), r"TableWise\(rank=0\)"),
        (lambda: te.Replicated(0), r"Replicated\(\); it has none"),
    ],
)
def test_config_that_is_given_arguments_by_position_says_how_to_write_it(make, example):
    with pytest.raises(TypeError, match=f"by name, as in {example}") as caught:
        make()
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"optimizer": te.Adagrad}, r"optimizer must be one of .* pass an instance, as Adagrad\(lr=0.01\)"),
        ({"policy": te.LFU}, r"policy must be LFU\(…\) or LRU\(\).* pass an instance"),
        ({"storage": te.HostMemory}, r"HostMemory\(\).* pass an instance"),
        ({"storage": "rows"}, r"got 'rows'; pass an instance, as File of that path"),
        ({"device": "gpu"}, r"device must be 'cpu', 'cuda'.* got 'gpu'"),
        ({"dtype": "float32"}, r"dtype of table 'weight' must be one of torch.float32.* got 'float32'"),
    ],
)
def test_classes_and_words_in_place_of_instances_are_refused_with_what_to_pass(keywords, message):
    with pytest.raises(ConfigError, match=message):
        bag(**keywords)


@pytest.mark.parametrize("lr", [None, "x", True, 1j, math.nan, torch.tensor([0.1, 0.2]), torch.empty(1, device="meta")])
def test_learning_rate_that_is_none_updates_nothing_and_is_named(lr):
    module = bag(optimizer=te.Adagrad(lr=0.1))
    before = module.state_dict()["weight"]
    module.fused_optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ConfigError, match=r"learning rate|lr"):
        module(torch.tensor([[1, 2]])).sum().backward()
    assert equal(module.state_dict()["weight"], before)
    module.fused_optimizer.param_groups[0]["lr"] = np.float32(0.1)
    module(torch.tensor([[1, 2]])).sum().backward()
    assert not equal(module.state_dict()["weight"], before)


def test_what_users_keep_in_the_param_group_is_left_alone():
    module = bag(optimizer=te.Adagrad(lr=0.1))
    module.fused_optimizer.param_groups[0]["mine"] = torch.ones(2)
    module(torch.tensor([[1, 2]])).sum().backward()
    assert module.fused_optimizer.state_dict()["param_groups"][0]["mine"].tolist() == [1, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("move", [lambda model: model.to("cuda"), lambda model: model.cuda()], ids=["to", "cuda"])
def test_move_to_a_gpu_that_torch_does_not_have_says_what_to_install(move):
    module = bag(optimizer=te.SGD(lr=0.1))
    before = module.state_dict()["weight"]
    with pytest.raises(UnsupportedError, match=r"torch .* finds no GPU; install a CUDA build of torch"):
        move(nn.Sequential(module))
    assert equal(module.state_dict()["weight"], before)
    module(torch.tensor([[1, 2]])).sum().backward()


@pytest.mark.parametrize("rows", [torch.ones(10, 4).to_sparse(), torch.ones(10, 4, dtype=torch.complex64), "x"])
def test_given_rows_that_cannot_be_read_are_refused(rows):
    with pytest.raises(ConfigError, match="_weight must be a"):
        bag(_weight=rows)
    with pytest.raises(ConfigError, match="embeddings must be a"):
        te.TieredEmbedding.from_pretrained(rows)


def test_norm_in_words_is_that_of_torch():
    module = bag(optimizer=torch.optim.SGD)
    assert te.clip_grad_norm_(module, "1.0", "inf") == 0
    with pytest.raises(InvalidInputError, match=r"max_norm must be a number, or math\.inf, got 'x'"):
        te.clip_grad_norm_(module, "x")
