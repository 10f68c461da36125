"""A whole train step of each random model beside plain JAX on one device, in float64, by a random config.

`scripts/fuzz_losses.py --mode model` goes through as many seeds as asked for; `fuzzing.py` has programs of primitives,
for single transformations.
"""

import dataclasses
import math
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import reference
from fuzzing import Comparison
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves_with_path
from model_programs import STACKED, program

import zero_jax as zero

TOLERANCE = 1e-7  # float64, of the largest number of all gradients; `dot_product_attention` has float32 in it
LOOSE = 0.15  # where numbers are rounded to a few bits: a factor or a term that is missing is seen, no more

MESHES = [{"data": 8}, {"data": 4}, {"data": 2}, {"data": 4, "replica": 2}, {"data": 4, "model": 2}]
LAYERED_MESHES = [
    *MESHES,
    {"data": 2, "model": 4},
    {"data": 8, "data_layout": (2, 4)},
    {"data": 2, "pipe": 4},
    {"data": 4, "pipe": 2},
    {"data": 2, "pipe": 2},
    {"data": 2, "pipe": 2, "model": 2},
    {"data": 2, "pipe": 2, "replica": 2},
    {"data": 1, "pipe": 4},
]


def some_specs(rng, params, size):
    """Shards some params over `model` along a dim that divides."""

    def spec(shape):
        dims = [i for i, n in enumerate(shape) if n % size == 0 and n > 1]
        dim = rng.choice(dims) if dims and rng.random() < 0.6 else None
        return PartitionSpec(*("model" if i == dim else None for i in range(len(shape))))

    return jax.tree.map(lambda x: spec(x.shape), params)


def some_config(rng, program):
    """Returns the sizes of a mesh, and fields of a config that may differ from each other in anything."""
    meshes = LAYERED_MESHES if program.num_layers else MESHES
    mesh = rng.choice([sizes for sizes in meshes if sizes.get("pipe", 0) <= program.num_layers])
    stage = rng.choice([0, 1, 2, 3, 3])
    fields = {"stage": stage, "num_microbatches": rng.choice([1, 2, 2, 4])}
    if "pipe" in mesh:
        two = ["circular:2", "1f1b:2"] if 2 * mesh["pipe"] <= program.num_layers else []
        fields["num_microbatches"] = rng.choice([mesh["pipe"], 4, 8])
        fields["pipeline"] = rng.choice(["gpipe", "gpipe", "1f1b", *two])
    if program.num_layers:
        fields["remat"] = rng.choice(["own"] * 6 + ["none", "full", "dots", "attention", "full_offloaded"])
        if "pipe" not in mesh:
            fields["remat"] = rng.choice([fields["remat"]] * 3 + ["auto:8"])
    if "model" in mesh and rng.random() < 0.7:
        fields["param_specs"] = some_specs(rng, program.params, mesh["model"])
    may = {
        "attention": ("fused", 0.2),
        "keep_gathered": (True, 0.1),
        "min_shard_size": (rng.choice([1, 100]), 0.3),
        "overlap": (False, 0.1),
        "clip_norm": (0.1, 0.2 * (fields["num_microbatches"] == 1)),
        "skip_nonfinite": (False, 0.5),
        "offload": (rng.choice(["optimizer", "state"] + ["all"] * (stage == 3 and "pipe" not in mesh)), 0.08),
        "noise_scale": (True, 0.08 * ("pipe" not in mesh)),
        "layer_shards": (True, 0.05),
        "quantize_grads": ("int8", 0.08 * ("pipe" not in mesh and stage > 0)),
        "quantize_gathers": ("int8", 0.08 * ("pipe" not in mesh and stage == 3)),
        "precision": (rng.choice(["bf16"] + ["fp16"] * ("pipe" not in mesh)), 0.06),
        "secondary": (("data_0",), 0.5 * ("data_layout" in mesh and stage == 3)),
    }
    fields |= {name: value for name, (value, share) in may.items() if rng.random() < share}
    return mesh, fields | ({"quantize_block_size": 4} if any("quantize" in name for name in fields) else {})


def is_loose(fields):
    return bool({"quantize_grads", "quantize_gathers", "precision"} & fields.keys())


def with_adapters(this, rng):
    """Returns the loss of adapters with zero_jax and by hand, and adapters of some matrices with their frozen base."""
    is_stack = lambda name, x: name.startswith("L/") and this.layers in STACKED and x.ndim == 3  # noqa: E731
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in tree_leaves_with_path(this.params)
    }
    dims = {
        name: "sio" if is_stack(name, x) else "io" for name, x in leaves.items() if is_stack(name, x) or x.ndim == 2
    }
    rules = {name: dims[name] for name in rng.sample(sorted(dims), min(3, len(dims)))}
    rest = sorted(leaves.keys() - rules)
    lora = zero.Lora(rules=rules, rank=2, alpha=2, base="own", train=rng.sample(rest, min(1, len(rest))))
    variables = lora.init(this.params, jax.random.key(0))
    random_b = lambda path, x: np.cos(np.arange(x.size)).reshape(x.shape) if path[-1].key == "b" else x  # noqa: E731
    adapters = jax.tree_util.tree_map_with_path(random_b, variables.params)

    def by_hand(adapters, batch):
        def merged(path, w):
            adapter = adapters.get(jax.tree_util.keystr(path, simple=True, separator="/"), jnp.asarray(w))
            return w + adapter["a"] @ adapter["b"] if isinstance(adapter, dict) else adapter

        return this.loss_fn(jax.tree_util.tree_map_with_path(merged, this.params), batch)

    return lora.loss_fn(this.loss_fn), by_hand, dataclasses.replace(variables, params=adapters)


def with_key(this):
    """Returns a loss whose examples have keys made of that of the step, with zero_jax and by hand."""

    def loss_fn(params, batch, key):
        keys = jax.random.split(key, len(batch["keys"]))
        return this.loss_fn(params, batch | {"keys": jax.random.key_data(keys)})

    return loss_fn, lambda params, batch: loss_fn(params, batch, jax.random.fold_in(jax.random.PRNGKey(0), 0)), None


def parts_of(batch, num_microbatches, num_devices):
    """Returns the microbatches of a batch: each device has a part of each."""

    def cut(leaf, n):
        cut = leaf.reshape(num_devices, num_microbatches, -1, *leaf.shape[1:])[:, n]
        return cut.reshape(-1, *leaf.shape[1:])

    return [jax.tree.map(lambda leaf: cut(leaf, n), batch) for n in range(num_microbatches)]  # noqa: B023


def plainly(loss_fn, params, batch):
    """Returns loss, gradients and aux of a batch on one device."""
    (loss, aux), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch)
    return loss, grads, aux


def off_the_mean(got, parts, weighted):
    """Returns how far loss and gradients are from the mean of those of parts, of any weights if it is `weighted`."""
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    each, scale = np.stack([flat(part) for part in parts], 1), max(np.abs(flat(got)).max(), 1e-6)
    weights = np.linalg.lstsq(each, flat(got), rcond=None)[0] if weighted else np.full(len(parts), 1 / len(parts))
    return max(np.abs(each @ weights - flat(got)).max() / scale, abs(weights.sum() - 1))


def clipped(grads, limit):
    scale = min(1, limit / reference.norm(grads)) if limit else 1
    return jax.tree.map(lambda g: np.asarray(g) * scale, grads)


def apart(got, want):
    """Returns how far two trees are apart at most, of the largest number in them."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    scale = max((np.abs(np.asarray(b, np.float64)).max(initial=0) for _, b in pairs), default=0)
    off = [np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0) for a, b in pairs]
    return float(np.max(off, initial=0) / max(scale, 1e-6)) if np.all(np.isfinite(off)) else np.inf


def stepped(loss_fn, params, batch, mesh_sizes, fields):
    """Returns loss, gradients and aux of a step with zero_jax."""
    count = int(np.prod([n for name, n in mesh_sizes.items() if name != "data_layout"]))
    mesh = zero.make_mesh(devices=jax.devices()[:count], **mesh_sizes)
    options = {"precision": "fp32", "clip_norm": None} | fields
    state, step = reference.make_trainer(loss_fn, reference.keep_grads(), mesh=mesh, params=params, **options)
    state, metrics = step(state, batch)
    return metrics.loss, state.opt_state, metrics.aux


def aux_faults(got, want, warned, tolerance):
    """Returns what is wrong with an aux: entries that are another value, or absent without a warning."""
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in tree_leaves_with_path(got)}
    faults = []
    for path, value in tree_leaves_with_path(want):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in found:
            if not any(f"'{name}'" in text for text in warned):
                faults.append(f"aux {name} is absent without a warning")
        elif np.shape(found[name]) != np.shape(value) or apart(found[name], value) > tolerance:
            faults.append(f"aux {name}: {found[name]} is not {value}")
    return faults


def compare(seed):
    """Compares a step of the program of a seed, with a config of that seed, with one device."""
    with jax.enable_x64(True):
        this, rng = program(seed), random.Random(f"config {seed}")
        mesh_sizes, fields = some_config(rng, this)
        wrapped, kind = (this.loss_fn, this.loss_fn, None), rng.random()
        if kind < 0.15:
            wrapped = with_adapters(this, rng)
            fields = {name: value for name, value in fields.items() if name != "param_specs"}
        elif kind < 0.3 and fields["num_microbatches"] == 1:
            wrapped = with_key(this)
        return compared(this, mesh_sizes, fields, *wrapped)


def compared(this, mesh_sizes, fields, loss_fn, by_hand, variables=None):
    """Compares a step of a loss with zero_jax with the same loss by hand, of some variables or the program's params."""
    params = this.params if variables is None else variables
    trained = params.params if isinstance(params, zero.Variables) else params
    setting = f"{this.layers} {type(params).__name__} {mesh_sizes} {fields}"
    tolerance = LOOSE if is_loose(fields) else TOLERANCE
    tolerance = max(tolerance, 1e-4) if fields.get("attention") == "fused" else tolerance
    *want, aux = plainly(by_hand, trained, this.batch)
    if not np.all([np.isfinite(x).all() for x in jax.tree.leaves(want)]):
        return Comparison(this, setting, "not finite")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            *got, got_aux = stepped(loss_fn, params, this.batch, mesh_sizes, fields)
        except ValueError as error:
            return Comparison(this, setting, "refused", text=str(error))
        except jax.errors.JaxRuntimeError as error:  # in the partitioner, or of an FFT
            return Comparison(this, setting, "XLA", math.inf, text=str(error))
    warned = [str(warning.message) for warning in caught]
    limit = lambda loss, grads: (loss, clipped(grads, fields.get("clip_norm")))  # noqa: E731
    difference, outcome = max(map(apart, got, limit(*want))), "same"
    text = [f"whole: {difference:.1e}", *warned]
    if difference > tolerance:
        outcome = "differs"
        about = [text for text in warned if "the loss on microbatches may be another one" in text]
        if about:
            parts = parts_of(this.batch, fields["num_microbatches"], mesh_sizes["data"] * mesh_sizes.get("replica", 1))
            each = [plainly(by_hand, trained, part)[:2] for part in parts]
            difference = off_the_mean(got, each, "weighted by" in about[0])
            outcome = "mean" if difference <= tolerance else "differs"
    faults = [] if is_loose(fields) else aux_faults(got_aux, aux, warned, max(tolerance, 1e-6))
    return Comparison(this, setting, "differs" if faults else outcome, difference, "\n".join(faults + text))
