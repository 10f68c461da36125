"""A Flax NNX model at ZeRO stage 3: the params are its `nnx.State`, with no change to the model.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/flax_nnx.py
"""

import jax
import numpy as np
import optax
from flax import nnx

import zero_jax as zero


class Classifier(nnx.Module):
    """An MLP with residual blocks."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(nnx.gelu(x))
        return self.last(x)


graphdef = nnx.graphdef(nnx.eval_shape(lambda: Classifier(rngs=nnx.Rngs(0))))


def init_fn(key):
    return nnx.state(Classifier(rngs=nnx.Rngs(key)), nnx.Param)


def loss_fn(params, batch):
    logits = nnx.merge(graphdef, params)(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0)
tx = optax.adamw(1e-3)
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)

rng = np.random.default_rng(0)
x = rng.normal(size=(32 * mesh.size, 64)).astype(np.float32)
batch = zero.shard_batch({"x": x, "y": (x @ rng.normal(size=(64, 10))).argmax(-1).astype(np.int32)}, mesh=mesh)
for i in range(60):
    state, metrics = step(state, batch)
    if i % 20 == 0 or i == 59:
        print(f"step {i:>3}  loss {metrics.loss:.4f}  accuracy {metrics.aux['accuracy']:.2f}")
print(zero.sharding_report(state, mesh=mesh, config=config))
