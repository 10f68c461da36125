"""Folders of the hub on meshes: the right slices of the right tensors, little memory, and no folder half loaded."""

import json
import os
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hub_folders import FOLDERS, assert_params, assert_same_bits, read, tensors_of, write

import zero_jax as zero
from zero_jax.models import decoder
from zero_jax.pretrained import TensorName, load_tensors, loading, open_hf

TX = optax.adam(1e-3)


def config_of(stage, precision="bf16"):
    return zero.ZeroConfig(stage=stage, precision=precision, min_shard_size=8)


@pytest.mark.parametrize(
    ("name", "dtype", "axes", "stage", "num_files"),
    [
        ("llama", "bfloat16", {"data": 4, "model": 2}, 3, 1),
        ("qwen2", "float16", {"data": 8}, 1, 2),
        ("gemma3", "float32", {"data": 2, "replica": 2, "model": 2}, 2, 3),
        ("mixtral", "bfloat16", {"data": 4, "model": 2}, 3, 3),
        ("mixtral", "float32", {"data": 8}, 0, 1),
        ("falcon", "bfloat16", {"data": 4, "model": 2}, 3, 2),
        ("gpt2", "float32", {"data": 2, "model": 4}, 1, 1),
    ],
)
def test_every_shard_has_its_slices(name, dtype, axes, stage, num_files, tmp_path):
    tensors = tensors_of(FOLDERS[name], dtype)
    write(tmp_path, FOLDERS[name], tensors, num_files=num_files)
    mesh = zero.make_mesh(**axes)
    loaded = zero.load_hf(tmp_path, mesh=mesh, config=config_of(stage))
    assert_params(loaded.params, tensors, FOLDERS[name])
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype(dtype)}
    shapes = zero.abstract_state(lambda _: loaded.params, TX, mesh=mesh, config=loaded.config)
    for x, like in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(shapes.masters), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    if "model" in axes:
        assert "model" in str(loaded.params["blocks"]["up"].sharding.spec)


def test_a_layer_that_predicts_another_token_may_be_missing(tmp_path):
    """Transformers saves none, whatever the config says; published folders have copies of two tensors with it."""
    tensors = tensors_of(FOLDERS["deepseek_v3"])
    copies = {"model.layers.3.embed_tokens.weight": "model.embed_tokens.weight"}
    copies |= {"model.layers.3.shared_head.head.weight": "lm_head.weight"}
    write(tmp_path / "all", FOLDERS["deepseek_v3"], tensors | {name: tensors[copy] for name, copy in copies.items()})
    loaded = zero.load_hf(tmp_path / "all", mesh=zero.make_mesh(), config=config_of(0))
    assert_params(loaded.params, tensors, FOLDERS["deepseek_v3"])
    main = {name: x for name, x in tensors.items() if not name.startswith("model.layers.3.")}
    assert len(main) < len(tensors)
    write(tmp_path / "main", FOLDERS["deepseek_v3"], main)
    source = open_hf(tmp_path / "main")
    assert source.config.num_extra_tokens == 0 and "extra_blocks" not in source.load(zero.make_mesh(), config_of(0))


def test_params_of_files_in_half_precision_are_float32_where_nothing_else_is_asked_for(tmp_path):
    tensors = tensors_of(FOLDERS["llama"], "float16")
    write(tmp_path, FOLDERS["llama"], tensors)
    loaded = zero.load_hf(tmp_path, mesh=zero.make_mesh(), config=config_of(3, "fp32"))
    assert_params(loaded.params, tensors, FOLDERS["llama"])
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_are_not_finite_are_named_with_their_number(dtype, tmp_path):
    tensors = tensors_of(FOLDERS["llama"], dtype)
    tensors["model.layers.1.mlp.up_proj.weight"][3, :5] = np.nan
    tensors["lm_head.weight"][7, 7] = np.inf
    write(tmp_path, FOLDERS["llama"], tensors)
    found = r": 5 of 1,152 elements of 'blocks/up', 1 of 1,024 elements of 'head' are NaN or infinite"
    with pytest.warns(UserWarning, match=f"^{re.escape(str(tmp_path))}{found}: .* Download the files again") as warned:
        zero.load_hf(tmp_path, mesh=zero.make_mesh(data=4, model=2), config=config_of(3))
    assert len(warned) == 1


def test_values_that_a_dtype_has_no_room_for_are_no_damage_of_the_files(tmp_path):
    tensors = tensors_of(FOLDERS["llama"], "bfloat16")
    tensors["lm_head.weight"][7, 7] = 1e5
    write(tmp_path, FOLDERS["llama"], tensors)
    with pytest.warns(UserWarning, match=r"1 of 1,024 .*\. float16 has no room for larger values: take bfloat16"):
        zero.load_hf(tmp_path, mesh=zero.make_mesh(), config=config_of(3), dtype="float16")


@pytest.mark.slow
def test_loaded_params_train(tmp_path):
    write(tmp_path, FOLDERS["llama"], tensors_of(FOLDERS["llama"], "bfloat16"))
    mesh = zero.make_mesh(data=4, model=2)
    loaded = zero.load_hf(tmp_path, mesh=mesh, config=config_of(3), seq_len=16)
    state = zero.init_state(loaded.params, TX, jax.random.key(0), mesh=mesh, config=loaded.config)
    step = zero.make_train_step(loaded.loss_fn, TX, mesh=mesh, config=loaded.config)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16)).astype(np.int32)
    batch = zero.shard_batch({"inputs": tokens, "targets": tokens}, mesh=mesh)
    host = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), loaded.params)
    expected, _ = decoder.loss_fn(loaded.source.config)(host, {"inputs": tokens, "targets": tokens})
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert abs(losses[0] - float(expected)) < 0.1 and losses[1] < losses[0]


@pytest.mark.slow
def test_host_memory_stays_within_the_shards_of_the_largest_param(tmp_path, monkeypatch):
    hf_config = FOLDERS["llama"] | {"vocab_size": 8192, "hidden_size": 64, "num_hidden_layers": 2}
    hf_config |= {"intermediate_size": 4096}
    write(tmp_path, hf_config, tensors_of(hf_config))
    mesh, config, put = zero.make_mesh(data=8), config_of(3), jax.device_put
    # A CPU takes host memory as that of a device where it is aligned; devices of other kinds never do.
    monkeypatch.setattr(jax, "device_put", lambda x, device: jax.block_until_ready(put(x, device) + 0))
    loaded = zero.load_hf(tmp_path, mesh=mesh, config=config)  # imports and caches are not measured
    largest_bytes = max(x.nbytes for x in jax.tree.leaves(loaded.params))
    whole_bytes = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
    tracemalloc.start()
    try:
        zero.load_hf(tmp_path, mesh=mesh, config=config)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # All shards are this process's. One is read at a time; JAX may free the ones before a little later.
    assert peak_bytes < largest_bytes < whole_bytes / 4, (peak_bytes, largest_bytes, whole_bytes)


def test_a_process_reads_the_slices_of_its_devices_alone(tmp_path, monkeypatch):
    write(tmp_path, FOLDERS["mixtral"], tensors_of(FOLDERS["mixtral"]))
    source, read = open_hf(tmp_path), []
    original = loading.LeafTensors.read

    def count(leaf, index, dtype):
        values = original(leaf, index, dtype)
        read.append(values.size)
        return values

    monkeypatch.setattr(loading.LeafTensors, "read", count)
    mesh = zero.make_mesh(data=4, devices=jax.devices()[:4])
    source.load(mesh, config_of(3))
    whole = sum(size for size in read)
    assert whole < 1.2 * source.config.num_params  # what is sharded is read once, not once a device


SHAPE = {
    "layers_0": {"q": {"kernel": (16, 4, 4)}, "o": {"kernel": (4, 4, 16)}},
    "norm": {"scale": (16,)},
    "odd": (2, 3, 5),
}
NAMES = {
    "layers_0/q/kernel": TensorName("h.0.q.weight", True, (16, 16)),
    "layers_0/o/kernel": TensorName("h.0.o.weight", True, (16, 16)),
    "norm/scale": TensorName("norm.weight"),
    "odd": TensorName("odd.{}.{}"),
}


def own_model():
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPE, is_leaf=is_shape)


def own_tensors():
    make = np.random.default_rng(0).standard_normal
    tensors = {"h.0.q.weight": make((16, 16)), "h.0.o.weight": make((16, 16)), "norm.weight": make(16)}
    tensors |= {f"odd.{i}.{j}": make(5) for i in range(2) for j in range(3)}
    return {name: x.astype(np.float32) for name, x in tensors.items()}


def test_a_model_of_ones_own_is_loaded_by_names(tmp_path):
    tensors = own_tensors()
    write(tmp_path, {}, tensors, num_files=2)
    params = load_tensors(tmp_path, own_model(), NAMES, mesh=zero.make_mesh(), config=config_of(3))
    layer = params["layers_0"]
    np.testing.assert_array_equal(layer["q"]["kernel"], tensors["h.0.q.weight"].T.reshape(16, 4, 4))
    np.testing.assert_array_equal(layer["o"]["kernel"], tensors["h.0.o.weight"].T.reshape(4, 4, 16))
    np.testing.assert_array_equal(params["norm"]["scale"], tensors["norm.weight"])
    np.testing.assert_array_equal(params["odd"][1, 2], tensors["odd.1.2"])


def test_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"(gone|file) is no folder: give one with "):
            load_tensors(place, own_model(), NAMES, mesh=zero.make_mesh(), config=config_of(3))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {x.replace("norm", "nrm"): NAMES[x] for x in NAMES},
            "param 'norm/scale' has no tensor's name: did you mean 'nrm/scale'",
        ),
        (NAMES | {"x": TensorName("x")}, "'x' has a tensor's name and is no param"),
        (NAMES | {"norm/scale": TensorName("odd.{}.{}")}, "has 2 indices, and the param 1 dims"),
        (NAMES | {"layers_0/q/kernel": TensorName("h.0.q.weight", True, (15, 16))}, "do not divide the dims"),
        (NAMES | {"norm/scale": TensorName("norm.weight", part=(0, 3, 3))}, "does not fit the dims"),
        (NAMES | {"norm/scale": TensorName("norm.weight", part=(0, 4, 8))}, "its params take 4: add the rest"),
        (NAMES | {"norm/scale": TensorName("norm.weight", part=(4, 8, 8))}, "does not follow on 0"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, message, tmp_path):
    write(tmp_path, {}, own_tensors())
    with pytest.raises(ValueError, match=message):
        load_tensors(tmp_path, own_model(), names, mesh=zero.make_mesh(), config=config_of(3))


FILE, INDEX = "model-00002-of-00002.safetensors", "model.safetensors.index.json"
GATE = "model.layers.1.mlp.gate_proj.weight"
FAMILY = "config.json: model_type='lama' is none of .*nearest is 'llama'"
INCOMPLETE = "is no complete safetensors file: "


def of_config(change):
    return lambda hf_config, tensors: hf_config.update(change)


def of_tensors(change):
    return lambda hf_config, tensors: change(tensors)


def of_index(**changes):
    def change(folder):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"].update({name.replace("__", "."): file for name, file in changes.items()})
        (folder / INDEX).write_text(json.dumps(index))

    return change


def of_header(**changes):
    """Returns a change of the first tensor's entry in the header of a file."""

    def change(folder):
        raw = (folder / FILE).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        next(entry for name, entry in header.items() if name != "__metadata__").update(changes)
        text = json.dumps(header).encode()
        (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return change


def instead(make, name=FILE):
    """Returns a change that makes something else in the place of a file."""

    def change(folder):
        (folder / name).unlink()
        make(folder / name)

    return change


def cut(num_bytes):
    def change(folder):
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:num_bytes])

    return change


# Changes of a folder before it is written, by their messages.
WRONG_CONTENTS = {
    FAMILY: of_config({"model_type": "lama"}),
    "quantization_config=.* is not supported": of_config({"quantization_config": {"bits": 4}}),
    "rope_theta=1000.*: the config needs a number above 0 and of float32": of_config({"rope_theta": 10**400}),
    "factor=1e[+]39: the config needs": of_config({"rope_scaling": {"rope_type": "linear", "factor": 1e39}}),
    "hidden_size='x': the config needs a whole number": of_config({"hidden_size": "x"}),
    f"{GATE} of the param 'blocks/gate' is missing": of_tensors(lambda t: t.pop(GATE)),
    "is missing; is it 'model.layers.1.mlp.gate.weight'": of_tensors(
        lambda t: t.update({"model.layers.1.mlp.gate.weight": t.pop(GATE)})
    ),
    r"does not fit the model, which has 3,00\d,\d+,\d+ tensors, and the files have": of_config(
        {"model_type": "mixtral", "num_local_experts": 10**9, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    ),
    r"layer_types=\['\\x1b.*\.\.\. is not supported": of_config({"layer_types": ["\x1b[2J" * 10**6]}),
    r"\\x1b\[2J\\na{290,296}\.\.\. .100,005 characters. is in the files": of_tensors(
        lambda t: t.update({"\x1b[2J\n" + "a" * 10**5: np.ones(3, "f")})
    ),
    "extra.weight is in the files, and": of_tensors(lambda t: t.update({"extra.weight": np.ones(3, "f")})),
    rf"{GATE} has shape \[16, 24\], the model needs \[24, 16\]": of_tensors(lambda t: t.update({GATE: t[GATE].T})),
    f"{GATE} is int8: only float32": of_tensors(lambda t: t.update({GATE: t[GATE].astype(np.int8)})),
}
# And of its files.
WRONG_FILES = {
    f"{INCOMPLETE}it has .* bytes, and its tensors end": cut(-1),
    f"{INCOMPLETE}its header would take": cut(40),
    f"{INCOMPLETE}its header would take 0 of its 0 bytes": cut(0),
    f"names the file '{FILE}', which is not there": lambda folder: (folder / FILE).unlink(),
    "names the file '../a/model.safetensors', which is not": of_index(model__norm__weight="../a/model.safetensors"),
    "says that .* is in .*, which does not have it": of_index(model__norm__weights=FILE),
    f"names the file '{'x' * 300}', which is not there": of_index(model__norm__weight="x" * 300),
    "names the file '', which is no file": of_index(model__norm__weight=""),
    f"names the file '{FILE}', which is no file, or a link to none: copy": instead(lambda path: path.symlink_to("no")),
    f"'{FILE}', which is no file, or a link to none": instead(os.mkfifo),
    "has no weight_map .* is not an object: copy or download it again": instead(lambda p: p.write_text("{}"), INDEX),
    f"{INCOMPLETE}\\['F32'\\] is not a text": of_header(dtype=["F32"]),
    f"{INCOMPLETE}'.*' of shape .* would be at bytes": of_header(data_offsets=[0, 2**62]),
    f"{INCOMPLETE}.* has more elements than an array": of_header(shape=[2**40, 2**40]),
    f"has neither model.safetensors nor {INDEX}": lambda folder: (folder / INDEX).unlink(),
    "cannot read .*config.json": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("message", [*WRONG_CONTENTS, *WRONG_FILES])
def test_what_cannot_be_loaded_is_named_and_nothing_is_loaded(message, tmp_path, monkeypatch):
    hf_config, tensors = dict(FOLDERS["llama"]), tensors_of(FOLDERS["llama"])
    if message in WRONG_CONTENTS:
        WRONG_CONTENTS[message](hf_config, tensors)
    folder = write(tmp_path / "a", hf_config, tensors, num_files=2)
    if message in WRONG_FILES:
        WRONG_FILES[message](folder)
    monkeypatch.setattr(loading, "load_leaf", lambda *_: pytest.fail("a param was loaded"))
    with pytest.raises(ValueError, match=message) as refused:
        zero.load_hf(folder, mesh=zero.make_mesh(), config=config_of(3))
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(file, tmp_path):
    folder = write(tmp_path / "a", FOLDERS["llama"], tensors_of(FOLDERS["llama"]))
    instead(os.mkfifo, file)(folder)
    with pytest.raises(ValueError, match=f"{file}.* (it is no regular file|is a named pipe)"):
        zero.load_hf(folder, mesh=zero.make_mesh(), config=config_of(3))


@pytest.mark.parametrize("change", ["cut", "new", "gone"])
def test_a_file_that_changes_while_it_is_read_is_named(change, tmp_path, monkeypatch):
    """A map of a file that is cut ends the process; one of another version mixes the values of two."""
    folder = write(tmp_path / "a", FOLDERS["llama"], tensors_of(FOLDERS["llama"]))
    path, load_leaf, calls = folder / "model.safetensors", loading.load_leaf, []
    happen = {"cut": lambda: os.truncate(path, 100), "new": lambda: os.utime(path, ns=(1, 1)), "gone": path.unlink}

    def meanwhile(*arguments):
        calls.append(load_leaf(*arguments))
        if len(calls) == (12 if change == "new" else 3):  # the last one, of which nothing is opened any more
            happen[change]()
        return calls[-1]

    monkeypatch.setattr(loading, "load_leaf", meanwhile)
    told = "it was there when the reading began" if change == "gone" else "changed while it was read: load again"
    with pytest.raises(ValueError, match=f"model.safetensors.* {told}"):
        zero.load_hf(folder, mesh=zero.make_mesh(), config=config_of(3))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_tied_table_may_have_the_name_of_the_head(family, tmp_path):
    tensors = tensors_of(FOLDERS[family], jnp.bfloat16)
    renamed = {name.replace("model.embed_tokens", "lm_head"): x for name, x in tensors.items()}
    loaded = zero.load_hf(write(tmp_path, FOLDERS[family], renamed), mesh=zero.make_mesh(), config=config_of(3))
    assert_params(loaded.params, tensors, FOLDERS[family])
    zero.save_hf(tmp_path / "saved", loaded.params, like=loaded)
    assert_same_bits(read(tmp_path / "saved"), tensors)
    neither = {name: x for name, x in renamed.items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight of the param 'embed' is missing"):
        open_hf(write(tmp_path / "neither", FOLDERS[family], neither))


def test_tensors_that_transformers_does_not_read_are_left(tmp_path):
    tensors = tensors_of(FOLDERS["qwen2"])
    surplus = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    surplus["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    write(tmp_path, FOLDERS["qwen2"], tensors | surplus)
    loaded = zero.load_hf(tmp_path, mesh=zero.make_mesh(), config=config_of(3))
    assert_params(loaded.params, tensors, FOLDERS["qwen2"])
