"""PPO (Schulman et al. 2017) at ZeRO stage 2: the batch is what the sharded policy has just played.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/ppo.py
"""

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero

NUM_STEPS, SIZE = 16, 2.0  # of a game: a point on a plane, pushed left, right, up or down, is to stay at the origin
PUSHES = 0.25 * jnp.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])


def init_fn(key):
    sizes = [2, 128, 128, 5]  # four logits and a value
    shapes = zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], strict=True)
    return [{"w": jax.random.normal(k, (n, m)) * n**-0.5, "b": jnp.zeros(m)} for k, n, m in shapes]


def policy(params, places):
    x = places
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    x = x @ params[-1]["w"] + params[-1]["b"]
    return jax.nn.log_softmax(x[..., :4]), x[..., 4]


def play(params, key):
    """Plays a game in each environment, and returns a batch `[environments, steps, ...]`."""

    def move(places, key):
        log_probs, values = policy(params, places)
        actions = jax.random.categorical(key, log_probs)
        moved = jnp.clip(places + PUSHES[actions], -SIZE, SIZE)
        taken = jnp.take_along_axis(log_probs, actions[:, None], 1)[:, 0]
        game = {"places": places, "actions": actions, "log_probs": taken, "values": values}
        return moved, game | {"rewards": -jnp.linalg.norm(moved, axis=1)}

    start, *keys = jax.random.split(key, NUM_STEPS + 1)
    places = jax.random.uniform(start, (num_environments, 2), minval=-SIZE, maxval=SIZE)
    _, games = jax.lax.scan(move, places, jnp.stack(keys))
    back = lambda total, reward: (reward + 0.9 * total,) * 2  # noqa: E731
    returns = jax.lax.scan(back, jnp.zeros(num_environments), games["rewards"], reverse=True)[1]
    advantages = returns - games["values"]
    games["advantages"] = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), games | {"returns": returns})


def loss_fn(params, batch):
    log_probs, values = policy(params, batch["places"])
    taken = jnp.take_along_axis(log_probs, batch["actions"][..., None], -1)[..., 0]
    ratio = jnp.exp(taken - batch["log_probs"])
    gains = jnp.minimum(ratio * batch["advantages"], jnp.clip(ratio, 0.8, 1.2) * batch["advantages"])
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return (-gains + 0.05 * jnp.square(values - batch["returns"]) - 0.01 * entropy).mean()


mesh, config, tx = zero.make_mesh(), zero.ZeroConfig(stage=2, clip_norm=0.5), optax.adam(3e-3)
num_environments = 16 * mesh.size
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
play = jax.jit(play, out_shardings=zero.batch_sharding(mesh))
rewards = []
for key in jax.random.split(jax.random.key(1), 25):
    batch = play(state.params, key)
    rewards.append(float(batch["rewards"].mean()))
    for _ in range(4):
        state, metrics = step(state, batch)
        metrics.loss.block_until_ready()  # devices simulated on a CPU may not run ahead of one another

held = zero.memory.measure_arrays(state.opt_state).device_bytes
whole = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
print(f"mean reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")
print(f"{held / 1e3:.0f} KB a device of {whole / 1e3:.0f} KB of optimizer state (data={mesh.shape['data']})")
