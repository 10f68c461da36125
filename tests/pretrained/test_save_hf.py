"""States as folders of the hub: the same names and bits, nothing written over, nothing left half."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hub_folders import FOLDERS, assert_params, assert_same_bits, read, tensors_of, write
from test_load_hf import NAMES, config_of, own_model, own_tensors

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer
from zero_jax.models import decoder, huggingface
from zero_jax.models.decoder_config import DECODERS, DecoderConfig
from zero_jax.pretrained import TensorName, export_hf, load_tensors, save_tensors, saving

TX = optax.adam(1e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "stage"),
    [
        ("llama", "bfloat16", 3),
        ("qwen2", "float32", 1),
        ("gemma3", "bfloat16", None),
        ("mixtral", "float16", None),
        ("gpt2", "float32", None),
        ("gpt_neox", "bfloat16", 3),
        ("falcon", "float16", 2),
        ("deepseek_v3", "bfloat16", 3),
    ],
)
def test_a_round_trip_is_equal_to_the_bit(name, dtype, stage, tmp_path):
    """Of a train state at a stage, or of the params as they were loaded."""
    tensors = tensors_of(FOLDERS[name], dtype)
    norm = next(tensor for tensor in tensors if "norm" in tensor or "ln_" in tensor)
    tensors[norm] = tensors[norm].astype(np.float32)  # a folder may have several dtypes
    write(tmp_path / "in", FOLDERS[name], tensors, num_files=2)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    mesh = zero.make_mesh(data=4, model=2)
    loaded = zero.load_hf(tmp_path / "in", mesh=mesh, config=config_of(stage or 0))
    state = loaded.params
    if stage is not None:
        state = zero.init_state(state, TX, jax.random.key(0), mesh=mesh, config=loaded.config)
    done = zero.save_hf(tmp_path / "out", state, loaded, max_file_bytes=9000)
    assert_same_bits(read(tmp_path / "out"), tensors)
    assert (
        done.num_tensors == len(tensors) and done.num_files == len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == FOLDERS[name] | {"torch_dtype": dtype}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}" and not list(tmp_path.glob(".*"))


def test_params_of_a_shape_alone_get_a_config(tmp_path):
    config = huggingface.decoder_config(FOLDERS["mixtral"], seq_len=32)
    mesh = zero.make_mesh()
    state = zero.init_state(
        lambda key: decoder.init(config, key), TX, jax.random.key(0), mesh=mesh, config=config_of(3)
    )
    zero.save_hf(tmp_path / "out", state, config, dtype="bfloat16")
    back = zero.load_hf(tmp_path / "out", mesh=mesh, config=config_of(0), seq_len=32)
    assert back.source.config == config
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(back.params), strict=True):
        np.testing.assert_array_equal(np.asarray(x).astype(y.dtype), y)


@pytest.mark.parametrize("name", DECODERS)
def test_presets_have_a_config_of_the_hub(name):
    config = DECODERS[name]
    found = json.loads(json.dumps(huggingface.hf_config(config)))
    back = huggingface.decoder_config(found, seq_len=config.seq_len)
    assert back.shapes == config.shapes and back.rope_scaling == config.rope_scaling
    assert [back.has_window(i) for i in range(9)] == [config.has_window(i) for i in range(9)]


def test_settings_of_no_family_are_named():
    with pytest.raises(ValueError, match=r"the nearest, llama, is without logits_soft_cap=3\.0: export as plain"):
        huggingface.hf_config(DecoderConfig(logits_soft_cap=3.0))


def test_a_model_of_ones_own_is_saved_by_names(tmp_path):
    tensors = own_tensors()
    write(tmp_path / "in", {}, tensors)
    params = load_tensors(tmp_path / "in", own_model(), NAMES, mesh=zero.make_mesh(), config=config_of(3))
    save_tensors(tmp_path / "out", params, NAMES)
    assert_same_bits(read(tmp_path / "out"), tensors)


def test_params_of_one_tensor_are_equal_or_refused(tmp_path):
    """The second one was written over the first, as where a name was copied and not changed."""
    w, names = jnp.arange(12.0).reshape(3, 4), {"v": TensorName("t"), "w": TensorName("t")}
    save_tensors(tmp_path / "tied", {"v": w, "w": w}, names)
    with pytest.raises(ValueError, match=r"params 'v' and 'w' have one tensor, 't', and differ: give each a name"):
        save_tensors(tmp_path / "out", {"v": w, "w": w + 1}, names)
    whole_and_part = {"v": TensorName("t", part=(0, 4, 4)), "w": TensorName("t")}
    with pytest.raises(ValueError, match=r"param 'w' shares .* t with another one, and one of them is a part of it"):
        save_tensors(tmp_path / "out", {"v": w, "w": w + 1}, whole_and_part)
    assert [path.name for path in tmp_path.iterdir()] == ["tied"]


def loaded_llama(tmp_path):
    write(tmp_path / "in", FOLDERS["llama"], tensors_of(FOLDERS["llama"]))
    return zero.load_hf(tmp_path / "in", mesh=zero.make_mesh(), config=config_of(3))


def test_what_is_there_stays(tmp_path, monkeypatch):
    loaded = loaded_llama(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    with pytest.raises(ValueError, match="in it: choose a folder that is new or empty"):
        zero.save_hf(tmp_path / "in", loaded.params, loaded)
    assert {path: path.read_bytes() for path in (tmp_path / "in").iterdir()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is no folder"):
        zero.save_hf(tmp_path / "file", loaded.params, loaded)
    # A folder that is there is not replaced: it may be a mount, the current folder, or have rights of its own.
    (tmp_path / "empty").mkdir(mode=0o750)
    empty = (tmp_path / "empty").stat()
    monkeypatch.chdir(tmp_path / "empty")
    zero.save_hf(".", loaded.params, loaded)
    assert (after := (tmp_path / "empty").stat()).st_ino == empty.st_ino and after.st_mode == empty.st_mode
    assert "config.json" in os.listdir() and not [name for name in os.listdir() if name.startswith(".")]
    (tmp_path / "large disk").mkdir()
    (tmp_path / "link").symlink_to("large disk")
    zero.save_hf(tmp_path / "link", loaded.params, loaded)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "large disk/config.json").is_file()
    (tmp_path / "dangling").symlink_to("gone")
    with pytest.raises(ValueError, match="dangling is no folder"):
        zero.save_hf(tmp_path / "dangling", loaded.params, loaded)
    names = ["dangling", "empty", "file", "in", "large disk", "link"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_tokenizer_that_is_gone_is_warned_of_and_the_params_are_saved(tmp_path):
    loaded = loaded_llama(tmp_path)
    (tmp_path / "in/tokenizer.json").symlink_to("pruned")
    with pytest.warns(UserWarning, match=r"tokenizer.json is no file, or a link to none, and is not saved: copy it"):
        zero.save_hf(tmp_path / "a", loaded.params, loaded)
    shutil.rmtree(tmp_path / "in")
    with pytest.warns(UserWarning, match="in is gone: its tokenizer is not saved, copy it from elsewhere"):
        zero.save_hf(tmp_path / "b", loaded.params, loaded)
    for name in ("a", "b"):
        assert_same_bits(read(tmp_path / name), tensors_of(FOLDERS["llama"]))


def test_paths_are_those_of_the_user_or_refused(tmp_path, monkeypatch):
    loaded = loaded_llama(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "in")
    zero.save_hf("~/a b/ü%41", loaded.params, loaded)
    assert (tmp_path / "home/a b/ü%41/config.json").is_file() and not (tmp_path / "in/~").exists()
    for path, told in [
        ("", "give the path of a folder"),
        ("a\0b", "give the path of a folder"),
        ("x" * 300, "File name too long .the name is too long"),
    ]:
        with pytest.raises(ValueError, match=told):
            zero.save_hf(path, loaded.params, loaded)


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    loaded = loaded_llama(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "copy_companions", full)
    with pytest.raises(ValueError, match=r"No space left on device .*free some space.; nothing was left there"):
        zero.save_hf(tmp_path / "out", loaded.params, loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda p: p | {"head": p["head"] * 1e6}, {"dtype": "float16"}, "'head' has values that float16 cannot hold"),
        (lambda p: p | {"head": p["head"].T}, {}, r"param 'head' has shape \[64, 16\], the model \[16, 64\]"),
        (lambda p: {"hed": p["head"]}, {}, "param 'hed' has no tensor's name: did you mean 'head'"),
        (lambda p: p, {"dtype": "int8"}, "dtype='int8': give a floating dtype"),
    ],
)
def test_what_cannot_be_saved_is_named(change, options, message, tmp_path):
    loaded = loaded_llama(tmp_path)
    with pytest.raises(ValueError, match=message):
        zero.save_hf(tmp_path / "out", change(loaded.params), loaded, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def checkpoint(folder, config, mesh):
    state = zero.init_state(
        lambda key: decoder.init(config, key), TX, jax.random.key(0), mesh=mesh, config=config_of(3)
    )
    model = json.loads(json.dumps(dataclasses.asdict(config)))
    if config.rope_scaling is not None:  # as release 0.2.0 recorded it
        for later in ("norm", "gated_mlp", "parallel", "rotary_fraction", "learned_positions"):
            del model[later]
        del model["rope_scaling"]["beta_fast"]
    with Checkpointer(folder / "checkpoints", log=pytest.fail) as checkpointer:
        checkpointer.save(1, state, extra={"config": {"model": {"name": "m", **model}}}, loss=1.0)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "deepseek_v3"])
def test_a_checkpoint_is_exported_for_the_hub(name, tmp_path):
    config = huggingface.decoder_config(FOLDERS[name], seq_len=16)
    state = checkpoint(tmp_path / "run", config, zero.make_mesh())
    done = export_hf(tmp_path / "run", tmp_path / "out", dtype="float32")
    assert done.num_files == 1
    host = jax.tree.map(np.asarray, state.params)
    assert_params(host, read(tmp_path / "out"), FOLDERS[name])
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["model_type"] == name and found.get("rope_scaling") == FOLDERS[name].get("rope_scaling")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    mesh = zero.make_mesh()
    state = zero.init_state(
        lambda key: {"w": jax.random.normal(key, (8, 8))}, TX, jax.random.key(0), mesh=mesh, config=config_of(3)
    )
    with Checkpointer(tmp_path / "run", log=pytest.fail) as checkpointer:
        checkpointer.save(1, state, extra={"config": {"model": {"name": "gpt-tiny"}}}, loss=1.0)
    with pytest.raises(ValueError, match="of the model 'gpt-tiny', which is no decoder"):
        export_hf(tmp_path / "run", tmp_path / "out")
