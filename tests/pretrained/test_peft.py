"""Adapters as PEFT has them: its logits, its files in and out, names of modules, and what is refused."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft_logits
import pytest
import safetensors.numpy
from hub_folders import FOLDERS, assert_same_bits, read, tensors_of, write

import zero_jax as zero
from zero_jax.core.tree import leaf_names
from zero_jax.models import decoder
from zero_jax.models.huggingface import decoder_config
from zero_jax.pretrained import export_peft, load_peft, lora_rules, open_hf, save_peft

CONFIG = zero.ZeroConfig(stage=0, precision="fp32")


def write_adapters(folder, name, **changes):
    """Writes a folder of adapters as PEFT had saved it, with changes to its config; returns its tensors."""
    with np.load(peft_logits.PATH) as answers:
        told = json.loads(str(answers[f"{name}/told"]))
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(told["config"] | changes))
    tensors = {key: peft_logits.tensor(key, tuple(shape)) for key, shape in told["shapes"].items()}
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


@pytest.fixture
def base(tmp_path, request):
    hub, _ = peft_logits.CASES[getattr(request, "param", "lora")]
    return peft_logits.write_base(tmp_path / "base", peft_logits.CONFIGS[hub])


def loaded_of(folder):
    return zero.load_hf(folder, mesh=zero.make_mesh(devices=jax.devices()[:1]), config=CONFIG)


def logits(config, params):
    tokens = jnp.asarray(peft_logits.transformers_logits.tokens())
    return jax.jit(lambda params: decoder.apply(config, params, tokens))(params)


@pytest.mark.parametrize(
    ("base", "name"),
    [pytest.param(name, name, marks=[pytest.mark.slow] * (name != "table")) for name in peft_logits.CASES],
    indirect=["base"],
)
def test_logits_and_files_are_those_of_peft(base, name, tmp_path):
    tensors = write_adapters(tmp_path / "adapters", name)
    loaded = loaded_of(base)
    tuned = load_peft(tmp_path / "adapters", loaded, base="own")
    with np.load(peft_logits.PATH) as answers:
        expected = answers[name]
    config, variables = loaded.source.config, tuned.on(loaded.params)
    merged = logits(config, tuned.lora.merge(variables))
    np.testing.assert_allclose(merged, expected, atol=2e-4)
    assert np.abs(merged - logits(config, loaded.params)).max() > 0.05 < np.std(expected)
    # The loss on the factors, of a state on a mesh, is that of the merged params.
    mesh, tx = zero.make_mesh(devices=jax.devices()[:2]), optax.sgd(0.1)
    zero_config = dataclasses.replace(CONFIG, stage=3, min_shard_size=0)
    state = zero.init_state(variables, tx, jax.random.key(0), mesh=mesh, config=zero_config)
    tokens = peft_logits.transformers_logits.tokens()
    batch = {"inputs": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}
    step = zero.make_train_step(tuned.lora.loss_fn(loaded.loss_fn), tx, mesh=mesh, config=zero_config)
    plain, _ = loaded.loss_fn(tuned.lora.merge(variables), jax.tree.map(jnp.asarray, batch))
    saved = save_peft(tmp_path / "saved", state, tuned.lora, loaded)
    trained, metrics = step(state, batch)
    assert float(metrics.loss) == pytest.approx(float(plain), rel=1e-5)
    assert_same_bits(read(tmp_path / "saved"), tensors)
    assert saved.num_tensors == len(tensors) and saved.num_files == 1
    assert sorted(x.name for x in (tmp_path / "saved").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    told = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    before = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(base) and told["r"] == before["r"]
    assert (told["use_dora"], told["modules_to_save"]) == (before["use_dora"], before["modules_to_save"])
    assert told["lora_alpha"] == pytest.approx(before["lora_alpha"] * (2 if before["use_rslora"] else 1))
    modules = {key.partition(".lora_")[0].rpartition(".")[2] for key in tensors if ".lora_" in key}
    assert told["target_modules"] == sorted(modules)
    # What was trained on is written too, and is read back as it is.
    save_peft(tmp_path / "trained", trained, tuned.lora, loaded)
    again = load_peft(tmp_path / "trained", open_hf(base), base="own")
    assert_same_bits(_by_name(again.adapters), _by_name(trained.params))
    assert again.lora == dataclasses.replace(tuned.lora, alpha=told["lora_alpha"])


def _by_name(tree):
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the library PEFT is not installed")
@pytest.mark.parametrize("base", peft_logits.CASES, indirect=True)
def test_peft_loads_what_is_saved(base, tmp_path, request):
    dora = request.node.callspec.params["base"] == "dora"
    loaded = loaded_of(base)
    rules = lora_rules(loaded, "all-linear")
    lora = zero.Lora(rules=rules, rank=3, alpha=5, base="own", dora=dora, train=["head"] if dora else ())
    random = lora.init(loaded.params, jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 100))
    adapters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), random.params)
    variables = dataclasses.replace(random, params=adapters)
    save_peft(tmp_path / "saved", variables, lora, loaded)
    expected = logits(loaded.source.config, lora.merge(variables))
    np.testing.assert_allclose(peft_logits.answer(base, tmp_path / "saved"), expected, atol=2e-4)


def test_modules_are_named_as_peft_names_them():
    llama, mixtral = (FOLDERS[name] for name in ("llama", "mixtral"))
    config = decoder_config(llama)
    assert lora_rules(config, "q_proj,v_proj") == {"blocks/query": "sio", "blocks/value": "sio"}
    assert lora_rules(config, ["self_attn.o_proj", "lm_head"]) == {"blocks/out": "sio", "head": "io"}
    names = ("query", "key", "value", "out", "gate", "up", "down")
    assert lora_rules(config, "all-linear") == {f"blocks/{name}": "sio" for name in names}
    experts = lora_rules(decoder_config(mixtral), "all-linear")
    assert experts["blocks/up"] == "ssio" and experts["blocks/router"] == "sio" and "embed" not in experts
    for wrong in ("q_poj", "proj", "input_layernorm", ""):
        with pytest.raises(
            ValueError, match=r"is the name of no module with a matrix: .*they are|name a module at least"
        ):
            lora_rules(config, wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported: only 'LORA' is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes the base"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={.*} is not supported: merge the adapters with PEFT"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"of_a_later_release": 1}, "of_a_later_release=1 is not supported"),
        ({"r": True}, "r=True: the config needs a whole number"),
        ({"r": 8}, r"lora_A.weight has shape \[4, 32\], the model needs \[8, 32\]"),
        ({"lora_alpha": "8"}, "lora_alpha='8': the config needs a number"),
        ({"use_dora": True}, "lora_magnitude_vector of the param 'blocks/query/magnitude' is missing"),
    ],
)
def test_adapters_that_mean_something_else_are_refused(changes, message, base, tmp_path):
    write_adapters(tmp_path / "adapters", "lora", **changes)
    with pytest.raises(ValueError, match=message):
        load_peft(tmp_path / "adapters", open_hf(base))


def test_adapters_that_are_not_finite_are_named_with_their_number(base, tmp_path):
    tensors = write_adapters(tmp_path / "adapters", "lora")
    name = next(key for key in tensors if "layers.1.self_attn.q_proj.lora_A" in key)
    tensors[name].flat[:3] = [np.nan, np.inf, -np.inf]
    safetensors.numpy.save_file(tensors, tmp_path / "adapters/adapter_model.safetensors")
    with pytest.warns(UserWarning, match=r"adapters: 3 of [\d,]+ elements of 'blocks/query/.*' are NaN or infinite"):
        load_peft(tmp_path / "adapters", open_hf(base))


def test_damaged_folders_and_those_of_other_models_are_refused(base, tmp_path):
    source = open_hf(base)
    with pytest.raises(ValueError, match=r"adapter_config.json.*give a folder that PEFT has saved"):
        load_peft(tmp_path / "none", source)
    tensors = write_adapters(tmp_path / "adapters", "lora")
    file = tmp_path / "adapters/adapter_model.safetensors"
    some = {key: x for key, x in tensors.items() if "layers.1" not in key}
    safetensors.numpy.save_file(some, file)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.lora_A.weight of the param .* is missing"):
        load_peft(tmp_path / "adapters", source)
    safetensors.numpy.save_file({"base_model.model.transformer.c_attn.lora_A.weight": np.zeros((4, 4), "f")}, file)
    with pytest.raises(ValueError, match="has no adapters of this model's modules: it is for another model"):
        load_peft(tmp_path / "adapters", source)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no complete safetensors file"):
        load_peft(tmp_path / "adapters", source)


@pytest.mark.parametrize(
    ("hub", "settings", "message"),
    [
        (
            "mixtral",
            {"rules": {"blocks/up": "ssio"}},
            "leaf 'blocks/up' is of experts, whose adapters PEFT has no lasting",
        ),
        ("llama", {"rules": {"blocks/query": "soi"}}, "leaf 'blocks/query' is adapted as 'soi', which PEFT has not"),
        ("qwen2", {"rules": ["embed"]}, "leaf 'embed' is adapted a table that is the head too"),
        ("qwen2", {"rules": {"blocks/up": "sio"}, "train": ["embed"]}, "leaf 'embed' is the head too"),
        (
            "qwen2",
            {"rules": {"blocks/up": "sio"}, "train": ["blocks/query_bias"]},
            "is a part of model.layers.{layer}.",
        ),
    ],
)
def test_adapters_that_peft_has_no_form_for_are_refused_before_anything_is_written(hub, settings, message, tmp_path):
    config, lora = decoder_config(FOLDERS[hub]), zero.Lora(base="own", **settings)
    variables = lora.init(decoder.init(config, jax.random.key(0)), jax.random.key(1))
    with pytest.raises(ValueError, match=message):
        save_peft(tmp_path / "out", variables, lora, config)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_a_run_begins_with_adapters_of_peft_and_writes_its_own(tmp_path, capsys):
    from command_line import run
    from test_hub_cli import LLAMA, SMALL, tokenizer

    hub = write(tmp_path / "tiny", LLAMA, tensors_of(LLAMA))
    tokenizer(hub / "tokenizer.json", num_tokens=250)
    (tmp_path / "text.txt").write_text("".join(f"def f{i}(x): return {i * i} * x\n\n" for i in range(400)))
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "runs"), *SMALL, "--json"]
    lora = ["--from-hf", str(hub), "--lora", "q_proj,v_proj", "--lora-rank", "2", "--name", "a"]
    status, out, err = run(["train", *lora, *data], capsys)
    assert status == 0 and json.loads(out)["num_params"] == 2 * (16 + 16 + 16 + 8), err
    assert "tiny, 112 of 12.2k params, adapters on a frozen base" in err
    status, out, err = run(["export", str(tmp_path / "runs/a"), "--to-peft", str(tmp_path / "peft"), "--json"], capsys)
    assert status == 0 and json.loads(out)["num_tensors"] == 4, err
    options = ["--from-hf", str(hub), "--lora-from", str(tmp_path / "peft"), "--name", "b", "--learning-rate", "1e-7"]
    status, out, err = run(["train", *options, *data], capsys)
    assert status == 0, err
    saved = (tmp_path / "runs/b/config.toml").read_text()
    assert 'lora = "blocks/query=sio,blocks/value=sio"' in saved and "lora_rank = 2" in saved
    (tmp_path / "peft").rename(tmp_path / "moved")  # the run needs it no more
    export_peft(tmp_path / "runs/b", tmp_path / "again", load_peft(tmp_path / "moved", open_hf(hub)).lora)
    again, before = read(tmp_path / "again"), read(tmp_path / "moved")
    assert again.keys() == before.keys() and all(np.abs(x).max() > 1e-4 for x in before.values())
    assert max(float(np.abs(again[name] - x).max()) for name, x in before.items()) < 1e-5
    status, out, err = run(["export", str(tmp_path / "runs/b"), "--merged", "--to-hf", str(tmp_path / "hf")], capsys)
    assert status == 0, err
    for wrong, message in (
        (["--lora-from", str(tmp_path / "moved"), "--from-hf", str(hub), "--lora-rank", "4"], "give --lora-base alone"),
        (["--lora-from", str(tmp_path / "moved")], "is for decoders, such as those of --from-hf"),
    ):
        status, _, err = run(["train", *wrong, *data], capsys)
        assert status == 2 and message in err


def test_inspect_lists_the_leaves_of_a_model_and_what_is_trained(base, capsys):
    from command_line import run

    status, out, err = run(["inspect", "--from-hf", str(base), "--lora", "q_proj,v_proj", "--lora-rank", "4"], capsys)
    lines = out.splitlines()
    assert status == 0 and lines[0] == "base: 12 leaves, 1,344 of 24k params are trained", err
    row = next(line for line in lines if line.startswith("blocks/query "))
    assert row.split()[1:] == "3 x 32 x 32 3,072 768 model.layers.{layer}.self_attn.q_proj.weight".split()
    status, out, _ = run(["inspect", "--model", "gpt-tiny", "--json"], capsys)
    assert status == 0 and {"embed", "blocks/query"} <= {leaf["path"] for leaf in json.loads(out)["leaves"]}
    status, _, err = run(["inspect", "--model", "gpt-tiny", "runs/a"], capsys)
    assert status == 2 and "give the PATH of a checkpoint, or a model" in err
