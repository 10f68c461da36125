"""A vision transformer on scikit-learn's digits by `zero.Trainer`: checkpoints, resume, validation, metrics, a plot.

Run it anywhere, stop it with Ctrl-C, and run it again: JAX_NUM_CPU_DEVICES=8 python examples/vit_digits.py
The same by the command line: zero-jax train --loss examples/vit_digits.py:loss_fn --init examples/vit_digits.py:init_fn
  --batches examples/vit_digits.py:batches --validation examples/vit_digits.py:validation --steps 150
"""

import flax.linen as nn
import numpy as np
import optax
from sklearn.datasets import load_digits

import zero_jax as zero

pictures, labels = load_digits(return_X_y=True)  # 1,797 pictures of 8 x 8 pixels
order = np.random.default_rng(0).permutation(len(labels))
pictures, labels = (pictures[order] / 16 - 0.5).astype(np.float32), labels[order].astype(np.int32)
NUM_TRAIN, BATCH_SIZE, WIDTH, STEPS = 1536, 64, 64, 150


class ViT(nn.Module):
    """Patches of 2 x 2 pixels, two blocks, the mean over patches."""

    @nn.compact
    def __call__(self, x):
        patches = x.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = nn.Dense(WIDTH)(patches) + self.param("position", nn.initializers.normal(0.02), (16, WIDTH))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=1))


def init_fn(key):
    return ViT().init(key, pictures[:1])


def loss_fn(params, batch):
    logits = ViT().apply(params, batch["pictures"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["labels"]).mean()}  # recorded beside the loss


def batches(step):  # a pure function of the step: a run resumes exactly where it was
    rows = np.random.default_rng(step).integers(0, NUM_TRAIN, BATCH_SIZE)
    return {"pictures": pictures[rows], "labels": labels[rows]}


validation = [
    {"pictures": pictures[rows], "labels": labels[rows]}
    for rows in np.arange(NUM_TRAIN, NUM_TRAIN + 4 * BATCH_SIZE).reshape(4, BATCH_SIZE)
]


def main():
    config = zero.TrainConfig(
        steps=STEPS,
        zero=zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0),
        name="vit-digits",
        resume="auto",
    )
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 10, STEPS))
    trainer = zero.Trainer(loss_fn, init_fn, batches, validation=validation, tx=tx, config=config)
    print(trainer.train())
    print(zero.memory.measure_arrays(trainer.state))


if __name__ == "__main__":
    main()
