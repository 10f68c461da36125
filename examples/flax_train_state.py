"""A loop around `flax.training.train_state.TrainState`, made ZeRO-3 by three changed lines (marked `# zero`).

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/flax_train_state.py
"""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import zero_jax as zero


class Classifier(nn.Module):
    """An MLP with residual blocks."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(256)(x)
        for _ in range(2):
            x = x + nn.Dense(256)(nn.gelu(nn.LayerNorm()(x)))
        return nn.Dense(10)(x)


def create(key):
    model = Classifier()
    params = model.init(key, np.zeros((1, 64), np.float32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(2e-3))


def loss_fn(params, batch):
    logits = Classifier().apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


mesh, config = zero.make_mesh(), zero.ZeroConfig(stage=3)
shardings = zero.state_shardings(jax.eval_shape(create, jax.random.key(0)), mesh=mesh, config=config)  # zero
loss_fn = zero.gather_on_use(loss_fn, shardings.params, mesh=mesh)  # zero


@functools.partial(
    jax.jit, donate_argnums=0, in_shardings=(shardings, zero.batch_sharding(mesh)), out_shardings=(shardings, None)
)  # zero
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
rng = np.random.default_rng(0)
x = rng.normal(size=(32 * mesh.size, 64)).astype(np.float32)
batch = {"x": x, "y": (x @ rng.normal(size=(64, 10))).argmax(-1).astype(np.int32)}
batch = jax.device_put(batch, zero.batch_sharding(mesh))
losses = []
for _ in range(30):
    state, loss = train_step(state, batch)
    losses.append(float(loss))

held = zero.memory.measure_arrays(state).device_bytes
whole = sum(x.nbytes for x in jax.tree.leaves(state))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print(f"{held / 1e3:.0f} KB a device, where data parallelism has {whole / 1e3:.0f} KB (data={mesh.shape['data']})")
