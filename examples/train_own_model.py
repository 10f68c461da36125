"""The trainer of `zero-jax train` with your own model and optimizer: checkpoints, resume, metrics and a loss plot.

Run it anywhere, stop it with Ctrl-C, and run it again: JAX_NUM_CPU_DEVICES=8 python examples/train_own_model.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from zero_jax.checkpoint import CheckpointConfig
from zero_jax.trainer import Model, TrainConfig, train


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model that predicts each byte from the previous byte and a running mean of the earlier ones."""

    width: int = 128


def init_fn(key):
    keys = jax.random.split(key, 3)
    shapes = [(256, Shape.width), (Shape.width, 4 * Shape.width), (4 * Shape.width, 256)]
    names = ["embed", "up", "down"]
    return {name: 0.05 * jax.random.normal(k, s) for name, k, s in zip(names, keys, shapes, strict=True)}


def loss_fn(params, batch):
    x = params["embed"][batch["inputs"]]
    places = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    x = x + jnp.cumsum(x, axis=1) / places
    logits = jax.nn.gelu(x @ params["up"]) @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


# Weight decay comes before the learning rate, which sets the sign of the update.
tx = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2), optax.scale_by_learning_rate(3e-3))


def main():
    config = TrainConfig(
        steps=60,
        batch_size=16,
        eval_every=20,
        eval_batches=2,
        checkpoint=CheckpointConfig(save_every=20),
        name="own-model",
        resume="auto",
    )
    model = Model(name="running-mean", config=Shape(), vocab_size=256, seq_len=64, init_fn=init_fn, loss_fn=loss_fn)
    print(train(config, model=model, tx=tx))


if __name__ == "__main__":
    main()
