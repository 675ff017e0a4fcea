"""FuxiCTR's DeepFM, trained by its own `train_step`, with its `embedding_regularizer`: norms of whole tables, which it
looks for by their type."""

from __future__ import annotations

from collections import OrderedDict

import beside
import numpy as np
import pytest
import torch

beside.require("fuxictr")
# ruff: noqa: E402
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, BATCH, WIDTH = 1024, 64, 4
FIELDS = {"user": 500, "item": 300, "genre": 20, "city": 7}


class DeepFM(BaseModel):
    """As FuxiCTR's model zoo has it, which is no part of the package."""

    def __init__(self, feature_map, **options):
        super().__init__(
            feature_map, verbose=0, model_root="unused", metrics=["AUC"], reduce_lr_on_plateau=False, **options
        )
        self.embedding_layer = FeatureEmbedding(
            feature_map, WIDTH, embedding_initializer="partial(nn.init.normal_, std=0.1)"
        )
        self.fm = FactorizationMachine(feature_map)
        self.mlp = MLP_Block(
            input_dim=feature_map.sum_emb_out_dim(), output_dim=1, hidden_units=[16, 16], hidden_activations="ReLU"
        )
        self.compile("adam", "binary_crossentropy", 1e-2)
        self.reset_parameters()

    def forward(self, inputs):
        inputs = self.get_inputs(inputs)
        embedded = self.embedding_layer(inputs)
        predicted = self.fm(inputs, embedded) + self.mlp(embedded.flatten(start_dim=1))
        return {"y_pred": self.output_activation(predicted)}


def features():
    found = FeatureMap("events", "unused")
    found.features = OrderedDict(
        (name, {"source": "", "type": "categorical", "vocab_size": rows, "padding_idx": 0, "embedding_dim": WIDTH})
        for name, rows in FIELDS.items()
    )
    found.labels, found.num_fields, found.default_emb_dim = ["clicked"], len(FIELDS), WIDTH
    found.total_features = sum(FIELDS.values())
    found.set_column_index()
    return found


def samples():
    rng = np.random.default_rng(0)
    columns = [beside.skewed(rng, rows - 1, SAMPLES) + 1 for rows in FIELDS.values()]
    clicked = rng.random(SAMPLES) < 0.2 + 0.6 * (columns[0] % 3 == 0)
    return torch.from_numpy(np.stack([*columns, clicked], 1).astype(np.float64))


@pytest.mark.parametrize("regularizer", ["l2(1e-3)", "l1(1e-4)", "l1_l2(1e-4, 1e-3)", None])
def test_fuxictr_model_trains_as_before(regularizer):
    given = samples()

    def run(converted, move):
        torch.manual_seed(0)
        model = DeepFM(features(), embedding_regularizer=regularizer)
        move(model)
        if converted:
            beside.convert(model, model.optimizer)
        model._max_gradient_norm = 10.0
        model.train()
        losses = [model.train_step(batch).item() for batch in given.split(BATCH)]
        model.eval()
        with torch.no_grad():
            predictions = model(given)["y_pred"].double().numpy()
        return beside.Trained(model, np.array(losses), predictions)

    beside.assert_trains_alike(run)


def test_the_regulariser_counts():
    given, ends = samples(), []
    for regularizer in ("l2(1e-1)", None):
        torch.manual_seed(0)
        model = DeepFM(features(), embedding_regularizer=regularizer)
        beside.convert(model, model.optimizer)
        model._max_gradient_norm = 10.0
        for batch in given.split(BATCH):
            model.train_step(batch)
        ends.append(sum(table.weight.detach().norm() for table in beside.tables_of(model)))
    assert ends[0] < 0.9 * ends[1]
