"""Models of RecBole, whose trainer builds its optimizer itself."""

from __future__ import annotations

import logging
from unittest import mock

import beside
import numpy as np
import pytest
import torch

beside.require("recbole")

from recbole.config import Config  # noqa: E402 - skipped where it is not there
from recbole.data import create_dataset, data_preparation  # noqa: E402
from recbole.utils import get_model, get_trainer, init_seed  # noqa: E402
from scipy.sparse import dok_matrix  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

USERS, ITEMS, EVENTS, EPOCHS = 200, 300, 3000, 2
COMMON = {
    "train_batch_size": 256,
    "embedding_size": 16,
    "show_progress": False,
    "use_gpu": False,
    "seed": 0,
    "load_col": {"inter": ["user_id", "item_id", "rating", "timestamp"]},
    "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"},
}
SEQUENCES = {"hidden_size": 16, "MAX_ITEM_LIST_LENGTH": 10}
OPTIONS = {
    "BPR": {},
    "NeuMF": {},
    "DeepFM": {
        "threshold": {"rating": 3},
        "train_neg_sample_args": None,
        "eval_args": {"split": {"RS": [0.8, 0.1, 0.1]}, "order": "RO", "mode": "labeled", "group_by": None},
        "metrics": ["AUC"],
        "valid_metric": "AUC",
    },
    "SASRec": {"loss_type": "BPR", **SEQUENCES, "n_heads": 2, "inner_size": 32},
    # these use whole tables in their losses: all items are scored, weights regularised, or propagated over a graph
    "SASRec CE": {"loss_type": "CE", "train_neg_sample_args": None, **SEQUENCES, "n_heads": 2, "inner_size": 32},
    "GRU4Rec": {"loss_type": "CE", "train_neg_sample_args": None, **SEQUENCES},
    "LightGCN": {"n_layers": 2},
    "ENMF": {"train_neg_sample_args": None, "train_batch_size": 32},
}
# which RecBole 1.2.1 asks NumPy for, and NumPy 2 has not; as SciPy has no `_update` of a `dok_matrix` any more
OLD_NAMES = {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A directory with a data set in RecBole's format."""
    where, rng = tmp_path_factory.mktemp("recbole"), np.random.default_rng(0)
    users, items = (beside.skewed(rng, count, EVENTS) for count in (USERS, ITEMS))
    (where / "events").mkdir()
    with open(where / "events" / "events.inter", "w") as file:
        file.write("user_id:token\titem_id:token\trating:float\ttimestamp:float\n")
        for n, (user, item) in enumerate(zip(users, items, strict=True)):
            file.write(f"{user}\t{item}\t{rng.integers(1, 6)}\t{n}\n")
    return where


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("when", ["before its optimizer is built", "after"])
def test_recbole_model_trains_as_before(name, when, data, monkeypatch):
    kind = name.partition(" ")[0]
    monkeypatch.chdir(data)  # it logs there
    monkeypatch.setattr("sys.argv", [""])  # which it reads
    logging.disable()

    def run(converted, move):
        with (
            mock.patch.multiple(np, create=True, **OLD_NAMES),
            mock.patch.object(dok_matrix, "_update", lambda self, values: self._dict.update(values), create=True),
        ):
            options = {"data_path": str(data), "checkpoint_dir": str(data / "saved"), **COMMON, **OPTIONS[name]}
            config = Config(model=kind, dataset="events", config_dict=options)
            init_seed(0, True)
            batches, *_ = data_preparation(config, create_dataset(config))
            init_seed(0, True)
            model = get_model(kind)(config, batches._dataset)
            move(model)
            if converted and when != "after":
                beside.convert(model, torch.optim.Adam)
            trainer = get_trainer(config["MODEL_TYPE"], kind)(config, model)
            if converted and when == "after":
                beside.convert(model, trainer.optimizer)
            losses, loss_of = [], model.calculate_loss
            model.calculate_loss = lambda batch: (losses.append(loss := loss_of(batch)), loss)[1]
            init_seed(1, True)
            for epoch in range(EPOCHS):
                trainer._train_epoch(batches, epoch)
            del model.calculate_loss
            model.eval()
            with torch.no_grad():
                batch = next(iter(batches))
                predict = model.predict if "item_id" in batch else model.full_sort_predict
                scores = predict(batch).double().numpy()
        return beside.Trained(model, np.array([loss.item() for loss in losses]), scores)

    try:
        beside.assert_trains_alike(run)
    finally:
        logging.disable(logging.NOTSET)
