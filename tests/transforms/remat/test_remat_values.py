"""Remat by value: which values blocks could keep, what each costs, what a budget chooses, and the same numbers."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import make_config, mesh_of
from rematting import BATCH, LAYERS, TOKENS, WIDTH, assert_same, batch_of, model_of, placed, plain

import zero_jax as zero
from zero_jax.training import StepLoss, value_costs
from zero_jax.transforms.remat.choice import ValueBudget, choose
from zero_jax.transforms.remat.transform import Remat, remat_report, rematerialize, resolve_remat

# Bytes of a value of a block like the residual stream, on one of two shards of the batch, of all blocks.
STREAM_BYTES = LAYERS * BATCH * TOKENS * WIDTH * 4 // 2


def reported(kind, remat, mesh="model4"):
    params, loss_fn, specs = model_of(kind)
    return remat_report(loss_fn, params, batch_of(), remat=remat, mesh=mesh_of(mesh), specs=specs)


# Costs


def test_products_that_elementwise_work_reads_are_kept_in_place():
    """The hidden features of an MLP; what is added to the stream, and what attention reads in heads, is copied."""
    params = {name: np.ones((LAYERS, 128, 128), np.float32) for name in ("up", "gate", "down", "query")}

    def layer(x, w):
        x += (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
        heads = (x @ w["query"]).reshape(*x.shape[:-1], 4, 32).swapaxes(-2, -3)
        return x * heads.swapaxes(-2, -3).reshape(x.shape), None

    def loss_fn(params, batch):
        return jax.lax.scan(layer, batch, params)[0].mean()

    config = zero.ZeroConfig(stage=3, remat="full")
    loss = StepLoss.of(loss_fn, params, mesh=mesh_of("8"), config=config)
    (costs,) = value_costs(loss, params, np.ones((8, 256, 128), np.float32))
    products = [label for label in costs.values if label.startswith("dot_general")]
    passes = [costs.keeping_seconds(x) / costs.roofline.moved_seconds(costs.values[x]) for x in products]
    assert passes[:2] == [1, 1] and min(passes[2:]) > 1.5, dict(zip(products, passes, strict=True))


# Names


def test_names_of_values_and_budgets_lead_to_policies_and_back():
    for name in ("save:a,b@c.py:3#2", "offload:input", "save:a+offload:b,input", "auto:4.5", "auto"):
        assert resolve_remat(name).name == name
    assert Remat(save="a", offload=["b"]) == resolve_remat("save:a+offload:b")
    assert resolve_remat("auto:4.5") == Remat(policy="auto", budget_gb=4.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Remat(policy="full", save=["a"]), "no other policy takes any"),
        (lambda: Remat(policy="values"), "needs the values"),
        (lambda: Remat(save=["a"], residuals="sharded"), "place of its own"),
        (lambda: Remat(save=["a", "b"], offload=["b"]), r"\['b'\] are in both"),
        (lambda: Remat(budget_gb=1.0), "for policy 'auto'"),
        (lambda: Remat(policy="auto", budget_gb=-1.0), "give GB of a device's memory"),
        (lambda: resolve_remat("auto:much"), "give the budget in GB"),
        (lambda: resolve_remat("save:a+keep:b"), "or both with a +"),
        (lambda: rematerialize(model_of("dict scan")[1], "auto", mesh=mesh_of("8"))(*arguments()), "budget_gb=..."),
        (lambda: reported("dict scan", "save:imput"), "did you mean 'input'"),
        (lambda: reported("dict scan", "offload:dot_general@gpt.py:1"), "which no block of .* makes"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def arguments():
    return model_of("dict scan")[0], batch_of()


# Selectors


@pytest.mark.slow
def test_kinds_select_what_policies_keep():
    """The products with weights are what `dots` keeps; in host memory inputs are what `full_offloaded` moves."""
    assert reported("dict scan", "save:products").kept == reported("dict scan", "dots").kept
    assert reported("dict loop", "offload:input").kept == reported("dict loop", "full_offloaded").kept
    kept = reported("dict scan", "save:attention").kept.device_bytes
    assert kept == STREAM_BYTES + STREAM_BYTES // 4  # of the heads of a fourth


def test_a_value_is_selected_by_its_label_its_line_and_its_number():
    rows = reported("dict scan", "auto:1").choice.rows
    several = [row.value for row in rows if row.value.startswith("dot_general") and row.value.endswith("#1")]
    label = several[0].removesuffix("#1")
    one, all_of_line = (reported("dict scan", f"save:{x}").kept.device_bytes for x in (f"{label}#1", label))
    assert STREAM_BYTES < one < all_of_line
    assert reported("dict scan", f"save:{label.partition('@')[2]}").kept.device_bytes >= all_of_line


# What a budget chooses


@pytest.mark.parametrize("kind", ["dict scan", pytest.param("dict loop own", marks=pytest.mark.slow)])
def test_what_is_chosen_is_what_is_kept(kind):
    """The bytes of the table are those that JAX saves; more of them save more, and none exceeds its budget."""
    saved, stream_bytes = [], STREAM_BYTES // 2
    for streams in (1, 2, 6, 100):
        report = reported(kind, Remat(policy="auto", budget_gb=streams * stream_bytes / 1e9), mesh="4")
        kept = sum(row.num_bytes for row in report.choice.rows if row.place == "device")
        assert report.kept.device_bytes == pytest.approx(kept, rel=0.02), report
        assert kept <= streams * stream_bytes
        saved.append(report.choice.saved_seconds)
    assert saved == sorted(saved)
    assert saved[-1] > saved[0]


def test_the_table_says_where_each_value_is_made_and_why_it_is_kept():
    text = str(reported("dict scan", Remat(policy="auto", budget_gb=1.3 * STREAM_BYTES / 1e9)))
    assert "made at" in text and "decoder.py:" in text and "ms a GB" in text and "does not fit" in text


@pytest.mark.tpu_compiler
def test_on_hardware_that_is_known_values_move_to_the_host_while_blocks_compute():
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    params, loss_fn, _ = model_of("dict scan")
    mesh = zero.make_mesh(topology="v5p:2x2x1")
    report = remat_report(loss_fn, params, batch_of(), remat="auto:0", mesh=mesh)
    moved = sum(row.host_seconds for row in report.choice.rows if row.place == "offloaded")
    assert moved > 0
    assert report.kept.host_bytes > 0


@dataclasses.dataclass
class Additive:
    """Blocks whose values save seconds independently of each other."""

    seconds: dict
    values: dict
    is_scanned: bool = True
    input_bytes: float = 0.0
    lines: dict = dataclasses.field(default_factory=lambda: dict.fromkeys("abcdef", ""))

    @property
    def forward_seconds(self):
        return 1.0

    def backward_seconds(self, kept):
        return 10.0 - sum(self.seconds.get(label, 0.0) for label in kept)

    def keeping_seconds(self, label):
        return 0.0


def test_the_choice_is_near_the_best_of_all():
    """Of random values with one place to keep them, greedy saves at least half of what the best subset does."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = dict(zip("abcdef", rng.integers(1, 10, 6).astype(float), strict=True))
        seconds = dict(zip("abcdef", rng.uniform(0.1, 1.0, 6), strict=True))
        subsets = itertools.chain.from_iterable(itertools.combinations("abcdef", n) for n in range(7))
        best = max(sum(seconds[x] for x in kept) for kept in subsets if sum(sizes[x] for x in kept) <= 12)
        found = choose([Additive(seconds, sizes)], ValueBudget(device_bytes=12.0))
        assert sum(row.num_bytes for row in found.rows if row.place) <= 12
        assert found.saved_seconds >= best / 2


def test_what_does_not_fit_the_device_goes_over_the_link():
    sizes, seconds = {"a": 4.0, "b": 4.0, "c": 4.0}, {"a": 3.0, "b": 2.0, "c": 1.0}
    budget = ValueBudget(device_bytes=5.0, host_bytes_per_second=6.0)  # in the 0.8 s of a forward pass 4.8 bytes
    found = {row.value: row.place for row in choose([Additive(seconds, sizes)], budget).rows}
    assert found == {"input": "device", "a": "device", "b": "offloaded", "c": ""}
    unrolled = choose([Additive(seconds, sizes, is_scanned=False)], budget)
    assert {row.value: row.place for row in unrolled.rows} == {"input": "device", "a": "device", "b": "", "c": ""}


# Values and gradients


@pytest.mark.slow
def test_values_that_are_kept_change_no_number():
    """Bit for bit as with everything computed again, or nothing: the same operations on the same values."""
    params, loss_fn, specs = model_of("dict scan")
    label = reported("dict scan", "auto:1").choice.rows[3].value
    policies = ("full", f"save:{label}+offload:input", "auto:0.0001", "save:attention+offload:products")
    want, *got = placed(loss_fn, params, batch_of(), policies=policies, specs=specs, gathered=True)
    for policy, values in zip(policies[1:], got, strict=True):
        assert_same(values, plain(loss_fn, params, batch_of()), policy)
        jax.tree.map(np.testing.assert_array_equal, values, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "stage", "microbatches"),
    [
        ("dict scan", "model4", 3, 1),
        ("dict loop own", "8", 0, 1),
        ("linen scan", "4", 3, 2),
        ("nnx loop", "8", 2, 1),
        ("dict scan own", "model2", 1, 2),
    ],
)
def test_a_step_with_chosen_values_is_a_step(kind, mesh, stage, microbatches):
    """Two steps: the losses and params of `own` are those of a budget."""
    params, loss_fn, specs = model_of(kind)
    mesh, tx, results = mesh_of(mesh), optax.sgd(0.1), []
    for remat in ("own", "auto:0.0002"):
        config = make_config(
            stage=stage, num_microbatches=microbatches, remat=remat, param_specs=specs if mesh.size > 4 else None
        )
        state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh, config=config)
        step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
        losses = []
        for seed in range(2):
            batch = jax.tree.map(lambda x: np.concatenate([x] * 4), batch_of(seed))
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
        results.append((np.asarray(losses), jax.tree.map(np.asarray, state.params)))
    assert_same(results[1], results[0])


def test_blocks_of_microbatches_make_the_values_of_those_of_the_batch():
    """Where layers compute the same of a batch, as what each looks up in a table of its own, all go on computing it."""

    def loss_fn(params, batch):
        unit = lambda x: x / (1 + jnp.sqrt(jnp.square(x).mean(-1, keepdims=True)))  # noqa: E731
        first, second = params["layers"]
        x = unit(batch["x"] + first["table"][batch["tokens"]])
        x = unit(x + jnp.tanh(x @ first["w_in"]) @ first["w_out"])
        x = unit(x + second["table"][batch["tokens"]])
        x = unit(x + jnp.tanh(x @ second["w_in"]) @ second["w_out"])
        error = jnp.square(x).mean(-1)
        return (error * batch["mask"]).sum() / batch["mask"].sum()

    rng = np.random.default_rng(0)
    shapes = {"table": (64, 32), "w_in": (32, 128), "w_out": (128, 32)}
    layers = [{name: rng.normal(size=shape, scale=0.1) for name, shape in shapes.items()} for _ in range(2)]
    params = jax.tree.map(np.float32, {"layers": layers})
    tokens = rng.integers(0, 64, (16, 64), dtype=np.int32)
    x, mask = rng.normal(size=(16, 64, 32)).astype(np.float32), (tokens > 9).astype(np.float32)
    batch, mesh = {"tokens": tokens, "x": x, "mask": mask}, mesh_of("4")
    report = zero.remat_report(loss_fn, params, batch, remat="auto:1", mesh=mesh)
    values = [row.value for row in report.choice.rows]
    assert any("#" in value for value in values)  # sums are numbered, of which some are of integers
    losses = []
    for remat in ("own", zero.Remat(save=values)):
        config = make_config(stage=2, num_microbatches=2, remat=remat)
        state = zero.init_state(params, optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
        _, metrics = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)(state, batch)
        losses.append(metrics.loss)
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_values_are_chosen_in_the_program_that_microbatches_have():
    def joined(one, other):
        return one[0] * other[0], one[1] * other[0] + other[1]

    def loss_fn(params, batch):
        def layer(x, w):
            decay = jax.nn.sigmoid(x @ w["decay"])
            return jnp.tanh(jax.lax.associative_scan(joined, (decay, x), axis=1)[1] @ w["out"]), None

        error = jnp.square(jax.lax.scan(layer, batch["x"], params)[0]).mean(-1)
        return (error * batch["mask"]).sum() / batch["mask"].sum()

    params = {name: np.ones((4, 64, 64), np.float32) / 64 for name in ("decay", "out")}
    batch = {"x": np.ones((32, 6, 64), np.float32), "mask": np.ones((32, 6), np.float32)}
    fields = {"stage": 2, "num_microbatches": 2}
    loss = StepLoss.of(loss_fn, params, mesh=mesh_of("4"), config=make_config(**fields))
    (costs,) = value_costs(loss, params, batch)
    config = make_config(**fields, remat=zero.Remat(save=[*costs.values]))
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(0), mesh=mesh_of("4"), config=config)
    _, metrics = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh_of("4"), config=config)(state, batch)
    np.testing.assert_allclose(metrics.loss, loss_fn(params, batch), rtol=1e-5)


def test_a_step_that_chooses_values_judges_and_traces_its_loss_once():
    """The batch, and three sizes of its parts: two that the judgement compares, and the microbatch."""
    sizes = []

    def loss_fn(params, batch):
        sizes.append(len(batch))
        for weight in params:
            batch = jax.nn.relu(batch @ weight) @ weight.T
        return jnp.square(batch).mean()

    mesh, tx = mesh_of("8"), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=1, num_microbatches=4, remat="auto:1")
    init = lambda key: [jax.random.normal(key, (8, 16)) for _ in range(4)]  # noqa: E731
    state = zero.abstract_state(init, tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    step.lower(state, jax.ShapeDtypeStruct((32, 8), jnp.float32))
    assert sorted(sizes) == [1, 2, 8, 32], sizes
