"""Models of torch-rechub, each trained by its trainer with the optimizer that this makes by default."""

from __future__ import annotations

import beside
import numpy as np
import pytest
import torch

import tieredemb as te

beside.require("torch_rechub")  # before it is imported
# ruff: noqa: E402
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
from torch_rechub.models import matching, multi_task, ranking
from torch_rechub.trainers import CTRTrainer, MatchTrainer, MTLTrainer
from torch_rechub.utils.data import DataGenerator

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, BATCH, WIDTH, NEGATIVES = 1536, 64, 8, 3
FIELDS = {"user": 500, "item": 300, "genre": 20, "city": 7}
MLP = {"dims": [16, 8], "dropout": 0.2, "activation": "relu"}
TOWER = {"dims": [16, 8], "activation": "relu"}
TASKS = ["classification", "classification"]
L2 = 1e-3
TERMS = {"embedding_l1": 0.0, "embedding_l2": L2, "dense_l1": 0.0, "dense_l2": 0.0}


class Features:
    """Anew for every model: a feature keeps the embedding that was made of it."""

    def __init__(self):
        self.user, self.item, self.genre, self.city = (SparseFeature(*each, embed_dim=WIDTH) for each in FIELDS.items())
        self.sparse = [self.user, self.item, self.genre, self.city]
        self.dense = [DenseFeature("age")]
        self.watched = self._sequence("watched", "mean")
        self.history = self._sequence("history", "concat")
        self.negatives = self._sequence("negatives", "concat")

    def _sequence(self, name, pooling):
        return SequenceFeature(name, FIELDS["item"], embed_dim=WIDTH, pooling=pooling, shared_with="item")


RANKING = {
    "WideDeep": lambda f: ranking.WideDeep(f.dense, f.sparse, mlp_params=MLP),
    "DeepFM": lambda f: ranking.DeepFM([*f.dense, *f.sparse, f.watched], f.sparse, mlp_params=MLP),
    "DCN": lambda f: ranking.DCN([*f.dense, *f.sparse], n_cross_layers=3, mlp_params=MLP),
    "DCNv2": lambda f: ranking.DCNv2([*f.dense, *f.sparse], n_cross_layers=3, mlp_params=MLP),
    "EDCN": lambda f: ranking.EDCN(f.sparse, n_cross_layers=3, mlp_params=MLP),
    "AFM": lambda f: ranking.AFM(f.sparse, embed_dim=WIDTH),
    "AutoInt": lambda f: ranking.AutoInt(f.sparse, f.dense, mlp_params=MLP),
    "FiBiNet": lambda f: ranking.FiBiNet(f.sparse, mlp_params=MLP),
    "DIN": lambda f: ranking.DIN([f.user, f.genre], [f.history], [f.item], {"dims": [16, 8]}, {"dims": [8]}),
    "BST": lambda f: ranking.BST([f.user, f.genre], [f.history], [f.item], {"dims": [16, 8]}),
}
MATCHING = {  # with the mode of the trainer: 0 is one label a sample, 2 the softmax over an item and its negatives
    "DSSM": (0, lambda f: matching.DSSM([f.user, f.city, f.watched], [f.item, f.genre], TOWER, TOWER)),
    "YoutubeDNN": (2, lambda f: matching.YoutubeDNN([f.user, f.watched], [f.item], [f.negatives], TOWER)),
}
MULTI_TASK = {
    "SharedBottom": lambda f: multi_task.SharedBottom([*f.dense, *f.sparse], TASKS, MLP, [{"dims": [8]}] * 2),
    "MMOE": lambda f: multi_task.MMOE([*f.dense, *f.sparse], TASKS, 3, MLP, [{"dims": [8]}] * 2),
    "PLE": lambda f: multi_task.PLE([*f.dense, *f.sparse], TASKS, 1, 2, 1, MLP, [{"dims": [8]}] * 2),
}


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    x = {name: beside.skewed(rng, rows, SAMPLES) for name, rows in FIELDS.items()}
    x["age"] = rng.random(SAMPLES).astype(np.float32)
    x["watched"] = x["history"] = beside.skewed(rng, FIELDS["item"], (SAMPLES, 5))
    x["negatives"] = rng.integers(0, FIELDS["item"], (SAMPLES, NEGATIVES))
    return x, (rng.random((SAMPLES, 2)) < 0.3).astype(np.float32)


def loaders(samples, *, labels):
    """Of training and of validation, as the library makes them."""
    x, y = samples[0], {"none": np.zeros(SAMPLES), "one": samples[1][:, 0], "all": samples[1]}[labels]
    train, held_out = (slice(0, SAMPLES * 2 // 3), slice(SAMPLES * 2 // 3, SAMPLES))
    parts = [({name: each[part] for name, each in x.items()}, y[part]) for part in (train, held_out)]
    return DataGenerator(*parts[0]).generate_dataloader(*parts[1], *parts[1], batch_size=BATCH)[:2]


def check(make, make_trainer, train, validation, **options):
    """`make_trainer` is given the model, and whether it is to be converted; `options` go to the trainer's `fit`."""
    trainers = {}
    held_out = [x for x, _ in validation] if make in MULTI_TASK.values() else validation

    def run(converted, move):
        torch.manual_seed(0)
        model = make(Features())
        move(model)
        trainers[model] = trainer = make_trainer(model, converted)
        if converted:
            beside.convert(model, trainer.optimizer)
        several = hasattr(trainer, "loss_fns")
        recorders = [beside.Recorder(each) for each in (trainer.loss_fns if several else [trainer.criterion])]
        trainer.loss_fns, trainer.criterion = recorders, recorders[0]
        torch.manual_seed(1)  # of the order of the samples, and of dropout
        trainer.fit(train, **options)
        losses = np.stack([recorder.losses for recorder in recorders], 1).ravel()
        return beside.Trained(model, losses, np.array(trainer.predict(model, held_out)))

    plain, ours = beside.assert_trains_alike(run)
    beside.assert_state_dict_moves(
        plain,
        ours,
        lambda model: np.array(trainers[model].predict(model, held_out)),
        lambda model: trainers[model].train_one_epoch(train),
    )


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch's, of BST's transformer
@pytest.mark.parametrize("name", RANKING)
def test_rechub_ranking_model_trains_as_before(name, samples, tmp_path):
    train, validation = loaders(samples, labels="one")
    check(
        RANKING[name],
        lambda model, converted: CTRTrainer(model, n_epoch=1, model_path=str(tmp_path)),
        train, validation, val_dataloader=validation,
    )  # fmt: skip


def test_rechub_scheduler_counts_for_tables(samples, tmp_path):
    train, validation = loaders(samples, labels="one")
    check(
        RANKING["DeepFM"],
        lambda model, converted: CTRTrainer(
            model, n_epoch=2, model_path=str(tmp_path),
            scheduler_fn=torch.optim.lr_scheduler.StepLR, scheduler_params={"step_size": 1, "gamma": 0.1},
        ),
        train, validation, val_dataloader=validation,
    )  # fmt: skip


@pytest.mark.parametrize("name", MATCHING)
def test_rechub_matching_model_trains_as_before(name, samples, tmp_path):
    mode, make = MATCHING[name]
    train, validation = loaders(samples, labels="none" if mode == 2 else "one")
    check(
        make,
        lambda model, converted: MatchTrainer(model, mode=mode, n_epoch=1, model_path=str(tmp_path)),
        train, validation,
    )  # fmt: skip


@pytest.mark.parametrize("name", MULTI_TASK)
def test_rechub_multi_task_model_trains_as_before(name, samples, tmp_path):
    train, validation = loaders(samples, labels="all")
    check(
        MULTI_TASK[name],
        lambda model, converted: MTLTrainer(model, TASKS, n_epoch=1, model_path=str(tmp_path)),
        train, validation, val_dataloader=validation,
    )  # fmt: skip


def test_rechub_early_stopper_brings_the_best_weights_back(samples, tmp_path):
    train, validation = loaders(samples, labels="one")
    torch.manual_seed(0)
    model = RANKING["DeepFM"](Features())
    trainer = CTRTrainer(model, n_epoch=40, earlystop_patience=3, model_path=str(tmp_path))
    beside.convert(model, trainer.optimizer)
    trainer.criterion = recorder = beside.Recorder(trainer.criterion)
    trainer.fit(train, validation)
    stopper = trainer.early_stopper
    assert len(recorder.losses) < 40 * len(train), "the labels are noise: it must get worse"
    assert trainer.evaluate(model, validation) == stopper.best_auc > 0
    assert beside.equal(model.state_dict(), stopper.best_weights)
    assert beside.equal(model.state_dict(), torch.load(tmp_path / "model.pth"))


# --- regularisers -----------------------------------------------------------------------------------------------------


def adam_with_decay_of_embeddings(model):
    """The trainer's default, and what an L2 term of the embeddings adds to it."""
    named, decay = list(model.named_parameters()), 1e-5
    return torch.optim.Adam(
        [
            {"params": [param for name, param in named if ".embed_dict." in name], "weight_decay": decay + 2 * L2},
            {"params": [param for name, param in named if ".embed_dict." not in name]},
        ],
        lr=1e-3,
        weight_decay=decay,
    )


def test_rechub_regulariser_of_embeddings_becomes_weight_decay(samples, tmp_path):
    """No warning either: the loss with the term is one of another trainer."""
    train, validation = loaders(samples, labels="one")

    def make_trainer(model, converted):
        if not converted:
            return CTRTrainer(model, n_epoch=1, model_path=str(tmp_path), regularization_params=TERMS)
        return CTRTrainer(
            model, n_epoch=1, model_path=str(tmp_path), regularization_params={**TERMS, "embedding_l2": 0.0},
            optimizer_fn=lambda params, **options: adam_with_decay_of_embeddings(model),
        )  # fmt: skip

    check(RANKING["DeepFM"], make_trainer, train, validation)


@pytest.mark.parametrize("factor", ["embedding_l1", "embedding_l2"])
def test_rechub_regulariser_of_embeddings_is_told(factor):
    model = RANKING["DeepFM"](Features())
    trainer = CTRTrainer(model, regularization_params={**TERMS, "embedding_l2": 0.0, factor: L2})
    beside.convert(model, trainer.optimizer, told=[f"a RegularizationLoss has {factor[-2:]}=0.001 of embeddings"])


def test_rechub_metabalance_is_told():
    """It scales gradients of the weights that it was given, of which tables have none."""
    model = MULTI_TASK["MMOE"](Features())
    trainer = MTLTrainer(model, TASKS, adaptive_params={"method": "metabalance"})
    with pytest.warns(UserWarning, match="live on, held by a MetaBalance"):
        te.replace_embedding_bags(model, capacity=0.1, optimizer=[trainer.share_optimizer, trainer.task_optimizer])
