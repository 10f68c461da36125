"""A Flax NNX model with batch norm and dropout at ZeRO stage 3, with no change to the model.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/flax_nnx.py
"""

import jax
import numpy as np
import optax
from flax import nnx

import zero_jax as zero


class Classifier(nnx.Module):
    """An MLP with residual blocks, batch norm and dropout."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(nnx.gelu(x))
        return self.last(self.dropout(self.norm(x)))


def loss(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


model = zero.from_nnx(Classifier, loss)
mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0)
tx = optax.adamw(1e-3)
state = zero.init_state(model.init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(model.loss_fn, tx, mesh=mesh, config=config)

rng = np.random.default_rng(0)
x = rng.normal(size=(32 * mesh.size, 64)).astype(np.float32)
batch = zero.shard_batch({"x": x, "y": (x @ rng.normal(size=(64, 10))).argmax(-1).astype(np.int32)}, mesh=mesh)
for i in range(60):
    state, metrics = step(state, batch)
    if i % 20 == 0 or i == 59:
        print(f"step {i:>3}  loss {metrics.loss:.4f}  accuracy {metrics.aux['accuracy']:.2f}")
evaluate = zero.make_eval_step(model.eval_fn, mesh=mesh, config=config)
print(f"accuracy without dropout {evaluate(state, batch).aux['accuracy']:.2f}")
print(zero.sharding_report(state, mesh=mesh, config=config))
