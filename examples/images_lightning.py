"""Classify images in a swarm: a LightningModule, its Trainer, and a validation loop.

The first peer: `python examples/images_lightning.py ~/first`. It prints an invite. Others:
`python examples/images_lightning.py ~/second INVITE`. Three lines are for the swarm; they are marked. The images are drawn by the script:
noisy copies of ten patterns. Each peer has a thousand of its own. It needs `pip install lightning`.
"""

import sys
import zlib

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gossamer.lightning  # swarm

STEPS = 300


def images(number, seed):
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(7))
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (number,), generator=draws)
    return patterns[labels] + 3.5 * torch.randn(number, 1, 16, 16, generator=draws), labels


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
        )

    def training_step(self, batch, number):
        return functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch, number):
        self.log("held_out_loss", functional.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)


def main(home, invite=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Classifier()
    data = TensorDataset(*images(1024, seed=zlib.crc32(home.encode())))
    held_out = images(1000, seed=1)

    def evaluate():
        inputs, labels = (tensor.to(module.device) for tensor in held_out)
        return functional.cross_entropy(module.network(inputs), labels, reduction="none")

    run = gossamer.Run("images-lightning", STEPS, unit="images")
    callback = gossamer.lightning.SwarmCallback(invite or run, evaluate=evaluate, home=home, settings={"wait_for_peers": 1})  # swarm
    trainer = Trainer(
        max_epochs=-1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[callback],  # swarm
    )
    trainer.fit(
        module,
        DataLoader(data, batch_size=32, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(*held_out), batch_size=500),
    )

    weights = torch.cat([tensor.cpu().flatten() for tensor in module.state_dict().values() if tensor.is_floating_point()])
    loss = trainer.callback_metrics["held_out_loss"]
    print(f"held-out loss {loss:.3f}, weights {zlib.crc32(weights.numpy().tobytes()):08x}, {callback.swarm.clock.steps} steps of the run")


if __name__ == "__main__":
    main(*sys.argv[1:])
