"""A Haiku model with dropout at ZeRO stage 3, with no change to the model.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/haiku_model.py   (needs `pip install dm-haiku`)
"""

import haiku as hk
import jax
import numpy as np
import optax

import zero_jax as zero


def forward(x, is_training):
    x = hk.Linear(256)(x)
    for _ in range(2):
        h = hk.Linear(256)(jax.nn.gelu(hk.LayerNorm(-1, True, True)(x)))
        x = x + (hk.dropout(hk.next_rng_key(), 0.1, h) if is_training else h)
    return hk.Linear(10)(x)


model = hk.transform(forward)


def init_fn(key):
    return model.init(key, np.zeros((1, 64), np.float32), True)


def loss_fn(params, batch, key):  # the third argument is a new key in each step
    logits = model.apply(params, key, batch["x"], True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def eval_fn(params, batch):
    logits = model.apply(params, None, batch["x"], False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, precision="bf16")
tx = optax.adamw(2e-3)
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
evaluate = zero.make_eval_step(eval_fn, mesh=mesh, config=config)

rng = np.random.default_rng(0)
x = rng.normal(size=(32 * mesh.size, 64)).astype(np.float32)
batch = zero.shard_batch({"x": x, "y": (x @ rng.normal(size=(64, 10))).argmax(-1).astype(np.int32)}, mesh=mesh)
losses = []
for _ in range(30):
    state, metrics = step(state, batch)
    losses.append(float(metrics.loss))

held = zero.memory.measure_arrays(state).device_bytes
whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
accuracy = evaluate(state, batch).aux["accuracy"]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy without dropout {accuracy:.2f}")
print(f"{held / 1e3:.0f} KB a device, where data parallelism has {whole / 1e3:.0f} KB (data={mesh.shape['data']})")
