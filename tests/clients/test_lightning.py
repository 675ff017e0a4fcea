"""A model that Lightning fits, with averages of its weights by Lightning's callbacks: those write to all parameters."""

from __future__ import annotations

import logging
import warnings

import beside
import numpy as np
import pytest
import torch
from torch import nn

beside.require("pytorch_lightning")

import pytorch_lightning as pl  # noqa: E402 - skipped where it is not there
from pytorch_lightning import callbacks  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, IDS, SAMPLES, BATCH, EPOCHS = 400, 8, 3, 320, 32, 3
AVERAGES = {
    "none": lambda: [],
    "stochastic": lambda: [callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)],
    "exponential": lambda: [callbacks.EMAWeightAveraging(decay=0.9)],
}


class Clicks(pl.LightningModule):
    """Bags of ids, and whether they were clicked."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.losses = []

    def training_step(self, batch, _):
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(batch[0]).squeeze(1), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.optimizer


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(beside.skewed(rng, ROWS, SAMPLES * IDS)).view(SAMPLES, IDS)
    return torch.utils.data.TensorDataset(ids, torch.from_numpy(rng.integers(0, 2, SAMPLES)).float())


def fit(model, samples, average):
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=AVERAGES[average](),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders without workers
        trainer.fit(model, torch.utils.data.DataLoader(samples, batch_size=BATCH))
    return trainer


@pytest.mark.parametrize("average", AVERAGES)
def test_lightning_trains_and_averages_as_before(average, samples):
    def run(converted, move):
        torch.manual_seed(0)
        model = Clicks()
        move(model.net)
        if converted:
            beside.convert(model.net, model.optimizer)
        fit(model, samples, average)
        with torch.no_grad():
            return beside.Trained(model.net, np.array(model.losses), model.net(samples.tensors[0]).double().numpy())

    plain, ours = beside.assert_trains_alike(run)
    torch.testing.assert_close(ours.state_dict()["0.weight"], plain.state_dict()["0.weight"], rtol=1e-4, atol=1e-5)


def test_the_summary_counts_the_numbers_of_tables(samples):
    model = Clicks()
    expected = pl.utilities.model_summary.ModelSummary(model).total_parameters
    beside.convert(model.net, model.optimizer)
    assert pl.utilities.model_summary.ModelSummary(model).total_parameters == expected
