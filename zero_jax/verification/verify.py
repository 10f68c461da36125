"""Compares the numbers of a train step that was compiled for hardware that is not there with one device."""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.core.tree import PyTree, leaf_names, leaves_by_name, shard_bytes
from zero_jax.interpreter import NotInterpretable
from zero_jax.planning import Job, call_for, split_settings
from zero_jax.sharding.precision import resolve_precision
from zero_jax.sharding.quantized import CODES
from zero_jax.training import MeshLoss, TrainState, ZeroConfig, key_parameter, make_train_step
from zero_jax.verification.execution import Execution, Sharded, host_array
from zero_jax.verification.reference import Reference, Updated

# What is left of a relative difference when nothing is wrong, by what rounds most. Of float32 it is sums in another
# order; of less, each product. Others have four times their rounding, as bfloat16.
_TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
# A program of more is for a cluster, not for this machine.
_MAX_BYTES = 8 * 2**30
_SHOWN_LEAVES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafDifference:
    """How far a leaf of a compiled step is from one device.

    Attributes:
      step: the step, from 0.
      path: the leaf's path: `loss`, `grad_norm`, or of the new state.
      difference: the norm of the difference, over the norm of what the step changes in the leaf.
      allowed: what rounding explains of it, in the same unit.

    Example:
      >>> zero.LeafDifference(step=1, path="params/up", difference=1e-7, allowed=1e-5).ok
      True
    """

    step: int
    path: str
    difference: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.allowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification(Report):
    """The numbers of a compiled train step beside those of one device; prints as a table.

    Attributes:
      topology: name of the hardware that the step was compiled for.
      device_kind: what JAX calls a device of it.
      mesh: sizes of the mesh axes.
      stage: the ZeRO stage.
      leaves: the difference of each leaf, those that rounding explains the least first.
      left_out: what is not in the program that was run, and why.
      warned: what the step warned of: a loss that is another one on microbatches differs from that of one device.
      compile_seconds: what compiling took.
      run_seconds: what executing the program took on this machine.

    Example:
      >>> quiet = {"num_steps": 1, "log": lambda _: None}
      >>> verified = zero.verify(loss_fn, init_fn, tx, batch, topology="v5e:2x2", config=config, **quiet)
      >>> verified.ok, verified.wrong
      (True, ())
    """

    topology: str
    device_kind: str
    mesh: Mapping[str, int]
    stage: int
    leaves: tuple[LeafDifference, ...]
    left_out: tuple[str, ...]
    warned: tuple[str, ...]
    compile_seconds: float
    run_seconds: float

    @property
    def ok(self) -> bool:
        """Whether rounding explains all differences."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def wrong(self) -> tuple[LeafDifference, ...]:
        """The leaves whose difference rounding does not explain."""
        return tuple(leaf for leaf in self.leaves if not leaf.ok)

    @property
    def untested(self) -> tuple[LeafDifference, ...]:
        """The leaves that rounding may change by as much as the step does, such as those whose gradient is zero."""
        return tuple(leaf for leaf in self.leaves if leaf.ok and leaf.allowed >= 1)

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items() if size > 1) or "one device"
        right = "equals one device" if self.ok else f"DIFFERS from one device in {len(self.wrong)} leaves"
        title = f"stage {self.stage} on {self.topology} ({self.device_kind}, {mesh}): the compiled step {right}"
        tested = [leaf for leaf in self.leaves if leaf not in self.untested]
        shown = tested[: max(_SHOWN_LEAVES, len(self.wrong))]
        rows = [("step", "leaf", "difference", "allowed", "")]
        for leaf in shown:
            mark = "" if leaf.ok else "WRONG"
            rows.append((str(leaf.step), leaf.path, f"{leaf.difference:.1e}", f"{leaf.allowed:.1e}", mark))
        more = len(tested) - len(shown)
        lines = [title, "", aligned(rows, right={0, 2, 3})]
        lines += [f"and {more} leaves that differ less"] if more else []
        if paths := list(dict.fromkeys(leaf.path for leaf in self.untested)):
            names = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
            lines.append(f"not tested: rounding may change {names} by as much as the step: begin from other params")
        lines += [f"left out: {text}" for text in self.left_out]
        lines += [f"warned: {text}" for text in self.warned]
        return "\n".join([*lines, f"compiled in {self.compile_seconds:.1f} s, run in {self.run_seconds:.1f} s"])


def verify(
    loss_fn: Callable[..., Any] | MeshLoss,
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    batch: PyTree,
    *,
    topology: str,
    config: ZeroConfig,
    replica: int = 1,
    model: int = 1,
    pipe: int = 1,
    data_layout: Sequence[int] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    num_steps: int = 2,
    seed: int = 0,
    tolerance: float | None = None,
    **compiling: Any,
) -> Verification:
    """Compiles the train step for a topology, runs the program on this machine, and compares it with one device.

    No accelerator is needed: the compiler's program is executed operation by operation, all devices in lockstep. So the
    faults of a compiler are found where the program is made. The model should be small: each device's arrays are held
    here. The reference is the loss of the whole batch, `jax.value_and_grad` and the optimizer on one device.

    Float32 products are compiled in full precision (`jax.default_matmul_precision("highest")`), so that they can be
    compared. Each step begins with the reference's state. Fused attention is left out: its kernels are no operations of
    XLA.

    Arguments are as for `plan` (of `**compiling` all but `cache`), for a topology of a few devices such as `v5p:2x2x2`,
    and with a `batch` of arrays `[examples, ...]` with values that the model takes. `num_steps` steps are compared;
    `seed` is of the key for `init_fn` and the steps. `tolerance` is the relative difference that is put down to
    rounding, before what the optimizer makes of it; None takes 1e-4 for float32, and more for smaller dtypes and
    quantized collectives.

    Raises:
      ValueError: what `plan` refuses; a batch without values; a step that draws other numbers than one device (a key
        with microbatches); a program that is too large, or that has what cannot be run here, such as a Pallas kernel.
      ModelError: a function of the model raised.
      CompilerCrash: the compiler's process ended without a result.

    Example:
      >>> quiet = {"num_steps": 1, "log": lambda _: None}
      >>> zero.verify(loss_fn, init_fn, tx, batch, topology="v5e:2x2", config=config, **quiet).ok
      True
    """
    arguments = {"num_steps": num_steps, "seed": seed, "tolerance": tolerance}
    check_arguments(**arguments)
    for name, leaf in leaves_by_name(batch).items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"verify: batch leaf {name!r} is a ShapeDtypeStruct, give an array of values")
    job, options = split_settings(
        loss_fn=loss_fn, init_fn=init_fn, tx=tx, batch=batch, topology=topology, config=config, replica=replica,
        model=model, pipe=pipe, data_layout=data_layout, compiler_options=compiler_options, **compiling,
    )  # fmt: skip
    return call_for(verify_job, job, {"batch": jax.tree.map(host_array, batch), **arguments}, options)


def verify_job(
    job: Job, *, batch: PyTree, num_steps: int, seed: int, tolerance: float | None, on_phase: Callable[[str], None]
) -> Verification:
    """Returns the verification of a job, made in this process; as `verify`."""
    left_out = []
    if job.config.attention != "own":
        left_out.append(
            "fused attention, whose kernels are no operations of XLA: attention is as the model computes it"
        )
        job = dataclasses.replace(job, config=dataclasses.replace(job.config, attention="own"))
    mesh = job.mesh()
    # Compiled for the topology and run as the reference: else float32 products of TPUs are rounded to bfloat16.
    with jax.default_matmul_precision("highest"):
        abstract = job.state(mesh)
        _check_size(abstract, mesh.size)
        _check_same_keys(job, mesh)
        on_phase("lowering")
        with warnings.catch_warnings(record=True) as warned:
            # Also a warning that this process has shown before.
            warnings.simplefilter("always")
            lowered = make_train_step(job.loss_fn, job.tx, mesh=mesh, config=job.config).lower(abstract, job.batch)
        on_phase("compiling")
        started = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(job.compiler_options or {}))
        compile_seconds = time.perf_counter() - started
        reference = Reference(loss_fn=job.loss_fn, init_fn=job.init_fn, tx=job.tx, config=job.config)
        tolerance = tolerance or _tolerance(job.config, abstract.masters)
        execution, comparison = Execution(compiled, mesh), _Comparison(reference, tolerance)
        state, leaves, run_seconds = reference.state(jax.random.key(seed), abstract), [], 0.0
        for step in range(num_steps):
            on_phase(f"running step {step + 1} of {num_steps}")
            started = time.perf_counter()
            try:
                result = execution(state, batch)
            except NotInterpretable as error:
                raise ValueError(f"this program cannot be run here, it has {error}") from error
            run_seconds += time.perf_counter() - started
            state, differences = comparison.compare(state, batch, result, like=abstract, step=step)
            leaves += differences
    return Verification(
        topology=job.topology,
        device_kind=mesh.devices.flat[0].device_kind,
        mesh=dict(mesh.shape),
        stage=job.config.stage,
        # Integers are allowed nothing: any difference of theirs comes first.
        leaves=tuple(sorted(leaves, key=lambda leaf: -leaf.difference / max(leaf.allowed, 1e-30))),
        left_out=tuple(left_out),
        warned=tuple(dict.fromkeys(str(x.message) for x in warned)),
        compile_seconds=compile_seconds,
        run_seconds=run_seconds,
    )


def _check_size(state: TrainState, num_devices: int) -> None:
    """Raises `ValueError` if the devices' shards of a state do not fit into this machine's memory."""
    if (needed := sum(map(shard_bytes, jax.tree.leaves(state))) * num_devices) > _MAX_BYTES:
        raise ValueError(
            f"the {num_devices} devices hold {format_bytes(needed)} of train state, and all of them are run here: "
            "verify a smaller model, or fewer devices of the same hardware"
        )


def _check_same_keys(job: Job, mesh: Any) -> None:
    """Raises `ValueError` if a loss function with a key is called on parts of the batch: each has a key of its own."""
    loss_fn = job.loss_fn.make(mesh) if isinstance(job.loss_fn, MeshLoss) else job.loss_fn
    parts = job.config.num_microbatches * job.replica
    quantize = job.config.resolved_quantize()
    if key_parameter(loss_fn) is not None and (parts > 1 or (quantize is not None and quantize.grads)):
        raise ValueError(
            "the loss function takes a key, and is called on parts of the batch, each with a key of its own: no step "
            "on one device draws the same numbers. Verify it with num_microbatches=1 and replica=1, or without dropout"
        )


def _tolerance(config: ZeroConfig, params: PyTree) -> float:
    """Returns the relative difference that a step's dtypes and formats explain."""
    precision, quantize = resolve_precision(config.precision), config.resolved_quantize()
    dtypes = {precision.compute, precision.reduce, precision.param} - {None}
    if precision.compute is None:  # each product is in the dtypes of the params themselves
        dtypes |= {x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)}
    tolerances = [_TOLERANCES.get(str(dtype)) or 4 * float(jnp.finfo(dtype).eps) for dtype in dtypes]
    for formats in () if quantize is None else (quantize.gathers, quantize.grads):
        names = formats.values() if isinstance(formats, Mapping) else [formats]
        tolerances += [CODES[name].error for name in names if name]
    return max([_TOLERANCES["float32"], *tolerances])


# By identity (`eq=False`) it has a hash, as `jit` needs of a static argument.
@dataclasses.dataclass(frozen=True, eq=False)
class _Comparison:
    """Compares what compiled steps return with a reference, within a relative tolerance."""

    reference: Reference
    tolerance: float

    def compare(
        self, state: TrainState, batch: PyTree, result: tuple[Any, Any], *, like: TrainState, step: int
    ) -> tuple[TrainState, list[LeafDifference]]:
        """Returns the reference's next state, and each leaf's difference to a step's `Sharded` state and metrics."""
        new, metrics = result
        loss, grads, updated, noise = self._expected(state, batch)
        # The next step begins with the reference's state, so that differences do not add up over steps.
        next_state = dataclasses.replace(self.reference.next_state(state, updated, like=like), step=state.step + 1)
        differences = [
            self._scalar("loss", metrics.loss, host_array(loss), step),
            self._scalar("grad_norm", metrics.grad_norm, host_array(optax.tree.norm(grads)), step),
        ]
        groups = {"params": noise.master, "opt_state": noise.opt_state, "model_state": noise.model_state}
        groups |= {} if state.master is None else {"master": noise.master}
        for group, noises in groups.items():
            trees = [getattr(x, group) for x in (state, next_state, new)]
            names = [f"{group}/{name}" for name in leaf_names(trees[0])]
            leaves = zip(names, *map(_leaves, (*trees, noises)), strict=True)
            differences += [self._leaf(*leaf, step=step) for leaf in leaves]
        return next_state, differences

    @functools.partial(jax.jit, static_argnums=0)
    def _expected(self, state: TrainState, batch: PyTree) -> tuple[jax.Array, PyTree, Updated, Updated]:
        """Returns the loss, gradients and update of one device, and how far rounding may move the update.

        What the optimizer makes of rounding is allowed, too: Adam's first step is the sign of a gradient, and that of
        a gradient that is zero but for rounding can be either one. So the update is made again from gradients that
        differ by as much as rounding may, some times.
        """
        loss, grads, model_state = self.reference.loss_and_grads(state, batch)
        update = functools.partial(self.reference.update, state, loss=loss, batch=batch)
        params, opt_state = update(grads)
        # One after another, because `vmap` would hold all of these updates at once.
        noisy = jax.lax.map(lambda key: update(self._with_noise(grads, key)), jax.random.split(jax.random.key(1), 8))
        of_params, of_opt_state = jax.tree.map(_largest_move, (params, opt_state), noisy)
        no_noise = jax.tree.map(lambda x: jnp.zeros(x.shape), model_state)  # it is made of no gradient
        updated = Updated(master=params, opt_state=opt_state, model_state=model_state)
        noise = Updated(master=of_params, opt_state=of_opt_state, model_state=no_noise)
        return loss, grads, updated, noise

    def _with_noise(self, grads: PyTree, key: jax.Array) -> PyTree:
        """Returns gradients that differ by what rounding may: of the leaf's size, and a little of that of all."""
        leaves, tree = jax.tree.flatten(grads)
        sizes = [jnp.sqrt(jnp.mean(jnp.square(jnp.abs(g)))) if g.size else jnp.float32(0) for g in leaves]
        # A gradient that is zero but for rounding has the rounding of larger numbers, which cancel.
        largest = jnp.stack(sizes).max() if sizes else 0.0
        keys = jax.random.split(key, max(len(leaves), 1))
        noise = [
            jax.random.normal(key, g.shape, jnp.float32) * self.tolerance * (size + 1e-2 * largest)
            for key, g, size in zip(keys, leaves, sizes, strict=True)
        ]
        return tree.unflatten([g + x.astype(g.dtype) for g, x in zip(leaves, noise, strict=True)])

    def _scalar(self, path: str, got: Sharded, want: np.ndarray, step: int) -> LeafDifference:
        difference, size = float(got.differences(want).max()), max(abs(float(want)), 1e-30)
        return LeafDifference(step=step, path=path, difference=difference / size, allowed=self.tolerance)

    def _leaf(
        self, path: str, before: np.ndarray, want: np.ndarray, got: Sharded, noise: np.ndarray, *, step: int
    ) -> LeafDifference:
        if not jnp.issubdtype(want.dtype, jnp.inexact):
            different = float(got.differences(want).max(initial=0))
            return LeafDifference(step=step, path=path, difference=different, allowed=0.0)
        old, new = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (before, want))
        change, size = float(np.linalg.norm(new - old)), float(np.linalg.norm(new))
        # Of the leaf itself: a small change of a large param is rounded as the param is.
        rounding = 4 * float(jnp.finfo(want.dtype).eps) * size
        moved = 2 * float(np.linalg.norm(noise))
        allowed = self.tolerance * change + moved + rounding
        difference = float(np.linalg.norm(got.differences(want)))
        # Of what the step changes; where that is nothing, of what rounding may change, else of the leaf.
        scale = max(change or moved or size, 1e-30)
        return LeafDifference(step=step, path=path, difference=difference / scale, allowed=allowed / scale)


def _largest_move(x: jax.Array, moved: jax.Array) -> jax.Array:
    """Returns how far an array is from the furthest of others `[n, *dims]`, element by element."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros(x.shape)
    return jnp.max(jnp.abs(moved - x), axis=0).astype(jnp.float32)


def _leaves(tree: PyTree) -> list[Any]:
    is_held = lambda x: isinstance(x, Sharded)  # noqa: E731
    return [x if is_held(x) else host_array(x) for x in jax.tree.leaves(tree, is_leaf=is_held)]
