"""Batch norm and dropout at ZeRO stage 3: the running statistics are model state beside the params.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/flax_batch_norm.py
"""

import flax.linen as nn
import jax
import numpy as np
import optax

import zero_jax as zero


class ConvNet(nn.Module):
    """Two convolutions, normalized over the full batch on all devices."""

    @nn.compact
    def __call__(self, x, *, train):
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(4)(x)


model = ConvNet()


def init_fn(key):
    variables = model.init(key, np.zeros((1, 8, 8, 3), np.float32), train=False)
    return zero.Variables(params=variables["params"], model_state={"batch_stats": variables["batch_stats"]})


def loss_fn(params, batch, key, *, model_state):
    logits, model_state = model.apply(
        {"params": params, **model_state}, batch["x"], train=True, mutable=["batch_stats"], rngs={"dropout": key}
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, None, model_state


def eval_fn(params, batch, *, model_state):
    logits = model.apply({"params": params, **model_state}, batch["x"], train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}, model_state


mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3)
tx = optax.adamw(3e-3)
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
evaluate = zero.make_eval_step(eval_fn, mesh=mesh, config=config)

rng = np.random.default_rng(0)
y = rng.integers(0, 4, 16 * mesh.size, dtype=np.int32)
x = rng.normal(size=(len(y), 8, 8, 3)) + 0.7 * rng.normal(size=(4, 8, 8, 3))[y]  # noisy pictures of four kinds
batch = zero.shard_batch({"x": x.astype(np.float32), "y": y}, mesh=mesh)
for i in range(40):
    state, metrics = step(state, batch)
    if i % 20 == 0 or i == 39:
        found = evaluate(state, batch)
        print(f"step {i:>3}  loss {metrics.loss:.4f}  accuracy without dropout {found.aux['accuracy']:.2f}")
print(zero.sharding_report(state, mesh=mesh, config=config))
