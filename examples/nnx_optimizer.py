"""A Flax NNX loop with `nnx.Optimizer`, made ZeRO-3 by three changed lines (marked `# zero`).

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/nnx_optimizer.py
"""

import functools

import jax
import numpy as np
import optax
from flax import nnx

import zero_jax as zero


class Classifier(nnx.Module):
    """An MLP with a residual block."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.block = nnx.Linear(256, 256, rngs=rngs)
        self.last = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return self.last(x + self.block(nnx.gelu(x)))


def create(seed):
    model = Classifier(rngs=nnx.Rngs(seed))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)}


def loss_fn(params, batch):
    logits = nnx.merge(model_def, params)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


mesh, config = zero.make_mesh(), zero.ZeroConfig(stage=3)
abstract = nnx.eval_shape(lambda: create(0))
model_def, (graphdef, shapes) = nnx.graphdef(abstract["model"]), nnx.split(abstract)
shardings = zero.state_shardings(shapes, mesh=mesh, config=config, params="model")  # zero
loss_fn = zero.gather_on_use(loss_fn, shardings["model"], mesh=mesh)  # zero


@functools.partial(
    jax.jit, donate_argnums=0, in_shardings=(shardings, zero.batch_sharding(mesh)), out_shardings=(shardings, None)
)  # zero
def train_step(state, batch):
    nodes = nnx.merge(graphdef, state)
    loss, grads = jax.value_and_grad(loss_fn)(nnx.state(nodes["model"], nnx.Param), batch)
    nodes["optimizer"].update(nodes["model"], grads)
    return nnx.state(nodes), loss


state = jax.jit(lambda: nnx.state(create(0)), out_shardings=shardings)()
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
