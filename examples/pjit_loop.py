"""An existing `jax.jit` training loop, made ZeRO-3 by three changed lines (marked `# zero`).

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/pjit_loop.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero

WIDTH, DEPTH = 512, 4


def init(key):
    keys = jax.random.split(key, DEPTH)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for k in keys]
    return {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}


def loss_fn(params, batch):
    x = batch["x"]
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x - batch["y"]) ** 2)


tx = optax.adamw(3e-3)
mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3)
shardings = zero.state_shardings(jax.eval_shape(init, jax.random.key(0)), mesh=mesh, config=config)  # zero
loss_fn = zero.gather_on_use(loss_fn, shardings["params"], mesh=mesh)  # zero


@functools.partial(
    jax.jit, donate_argnums=0, in_shardings=(shardings, zero.batch_sharding(mesh)), out_shardings=(shardings, None)
)  # zero
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
rng = np.random.default_rng(0)
x = rng.normal(size=(8 * mesh.size, WIDTH)).astype(np.float32)
batch = jax.device_put({"x": x, "y": np.tanh(x[:, ::-1])}, zero.batch_sharding(mesh))
for step in range(30):
    state, loss = train_step(state, batch)
    if step % 10 == 0 or step == 29:
        print(f"step {step:>3}  loss {loss:.4f}")
weight = state["params"][0]
shard = weight.addressable_shards[0].data
print(f"a weight of {weight.shape} is sharded as {weight.sharding.spec}, {shard.shape} a device")
