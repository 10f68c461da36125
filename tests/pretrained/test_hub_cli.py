"""The command line on folders of the hub: train from one, write one, and what it refuses."""

import json
import math

import jax
import numpy as np
import optax
import pytest
from command_line import run
from hub_folders import FOLDERS, read, tensors_of, write

import zero_jax as zero
from zero_jax.cli import commands as cli
from zero_jax.cli.models.presets import PRESETS
from zero_jax.data import load_tokenizer

SMALL = "--seq-len 16 --steps 2 --warmup-steps 1 --eval-batches 1 --sample-tokens 0 --token-cache none".split()
LLAMA = FOLDERS["llama"] | {"vocab_size": 320, "num_hidden_layers": 1}


def tokenizer(path, *, num_tokens, more=None, added=()):
    """Writes a tokenizer of bytes, further tokens of text (`more`), and special ones (`added`)."""
    alphabet = sorted({chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 324))})[: num_tokens - 1]
    vocab = {"<|endoftext|>": 0} | {token: i + 1 for i, token in enumerate(alphabet)} | (more or {})
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    entries = [{"id": 0, "content": "<|endoftext|>", **special}, *({**special, **entry} for entry in added)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    path.write_text(
        json.dumps(
            {"version": "1.0", "added_tokens": entries, "pre_tokenizer": level, "decoder": level, "model": model}
        )
    )


@pytest.fixture
def hub(tmp_path):
    folder = write(tmp_path / "tiny-llama", LLAMA, tensors_of(LLAMA, "bfloat16"), num_files=2)
    tokenizer(folder / "tokenizer.json", num_tokens=250)
    (tmp_path / "text.txt").write_text("".join(f"def f{i}(x): return {i * i} * x\n\n" for i in range(400)))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_a_checkpoint_of_the_hub_is_trained_and_written_back(hub, tmp_path, capsys):
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "runs")]
    status, out, err = run(["train", "--from-hf", str(hub), *SMALL, *data, "--name", "a", "--json"], capsys)
    assert status == 0, err
    trained = json.loads(out)
    assert trained["model"] == "tiny-llama"
    assert (tmp_path / "runs/a/hf/tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()
    assert f'[model]\nfrom_hf = "{hub}"\nseq_len = 16\n' in (tmp_path / "runs/a/config.toml").read_text()
    status, out, err = run(["evaluate", str(tmp_path / "runs/a"), "--json"], capsys)
    assert status == 0 and json.loads(out)["loss"] == pytest.approx(trained["final_validation_loss"], rel=1e-6), err
    status, out, err = run(["export", str(tmp_path / "runs/a"), "--to-hf", str(tmp_path / "out"), "--json"], capsys)
    assert status == 0 and json.loads(out)["num_files"] == 1, err
    before, after = tensors_of(LLAMA, "bfloat16"), read(tmp_path / "out")
    assert {name: (x.shape, x.dtype) for name, x in after.items()} == {n: (x.shape, x.dtype) for n, x in before.items()}
    moved = [name for name, x in before.items() if x.tobytes() != after[name].tobytes()]
    assert (
        0 < len(moved) and abs(after["lm_head.weight"].astype("f") - before["lm_head.weight"].astype("f")).max() < 0.1
    )
    assert json.loads((tmp_path / "out/config.json").read_text()) == LLAMA | {"torch_dtype": "bfloat16"}
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_adapters_are_merged_into_the_checkpoint_that_they_began_with(hub, tmp_path, capsys):
    """A run that begins with the merged checkpoint has the loss that the adapters had at the end."""
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "runs"), "--precision", "fp32", "--json"]
    lora = ["--lora", "blocks/query,blocks/gate", "--lora-rank", "2", "--learning-rate", "0.05"]
    status, out, err = run(["train", "--from-hf", str(hub), *SMALL, *data, *lora, "--name", "a"], capsys)
    assert status == 0, err
    trained, folder = json.loads(out), str(tmp_path / "runs/a")
    assert abs(trained["final_validation_loss"] - trained["first_validation_loss"]) > 0.01
    hub.rename(tmp_path / "gone")
    status, out, err = run(["evaluate", folder, "--json"], capsys)  # its adapters merged
    assert status == 0, err
    evaluated = json.loads(out)
    assert evaluated["loss"] == pytest.approx(trained["final_validation_loss"], rel=1e-4)
    assert evaluated["perplexity"] == pytest.approx(math.exp(evaluated["loss"]))
    words = ["--prompt", "def ", "--num-tokens", "4", "--temperature", "0", "--json"]
    status, out, err = run(["sample", folder, *words], capsys)
    assert status == 0 and len(json.loads(out)["samples"]) == 1, err
    status, _, err = run(["export", folder, "--to-hf", str(tmp_path / "factors")], capsys)
    assert status == 2 and "the checkpoint has adapters (" in err and "merge them into the params with --merged" in err
    options = ["--merged", "--dtype", "float32", "--json"]
    status, out, err = run(["export", folder, "--to-hf", str(tmp_path / "merged"), *options], capsys)
    assert status == 0, err
    before, after = tensors_of(LLAMA, "bfloat16"), read(tmp_path / "merged")
    assert before.keys() == after.keys()
    moved = {name for name, x in before.items() if (x.astype("f") != after[name]).any()}
    assert moved == {f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.gate_proj")}
    status, out, err = run(["train", "--from-hf", str(tmp_path / "merged"), *SMALL, *data, "--name", "b"], capsys)
    assert status == 0, err
    assert json.loads(out)["first_validation_loss"] == pytest.approx(trained["final_validation_loss"], abs=1e-3)
    for words, reason in (
        ([str(tmp_path / "runs/b")], "--merged is for runs with --lora"),
        ([folder, "--ema"], "--merged takes the params themselves"),
        ([folder, "--dtype", "int8"], "--dtype int8: with --merged give one of float32"),
        ([str(tmp_path)], "no checkpoint in "),
    ):
        status, _, err = run(["export", *words, "--out", str(tmp_path / "c"), "--merged"], capsys)
        assert status == 2 and reason in err
    status, out, err = run(["export", folder, "--out", str(tmp_path / "c"), "--merged", "--json"], capsys)
    assert status == 0 and json.loads(out)["num_tensors"] == len(read(tmp_path / "c")), err


@pytest.mark.slow
def test_a_folder_of_the_hub_is_looked_at(hub, tmp_path, capsys):
    """On all of the text that is given: the loss is that of the logits, and the likeliest tokens are sampled."""
    mesh = zero.make_mesh(devices=jax.devices()[:1])
    loaded = zero.load_hf(hub, mesh=mesh, config=zero.ZeroConfig(stage=0))
    tokenizer, text = load_tokenizer(hub / "tokenizer.json"), (tmp_path / "text.txt").read_text()[:64]
    options = ["--data", str(tmp_path / "few.txt"), "--seq-len", "64", "--token-cache", "none", "--json"]
    (tmp_path / "few.txt").write_text(text[:20])
    status, out, err = run(["evaluate", str(hub), *options], capsys)
    assert status == 2 and "21 tokens for validation, but one sequence takes seq_len + 1 = 65" in err
    (tmp_path / "few.txt").write_text(text)
    status, out, err = run(["evaluate", str(hub), *options], capsys)
    assert status == 0, err
    inputs = tokenizer.encode(text)
    targets = np.append(inputs[1:], tokenizer.end_of_document)
    logits = loaded.apply(loaded.params, inputs[None])[0]
    expected = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), targets).mean()
    assert json.loads(out)["loss"] == pytest.approx(float(expected), rel=2e-2)  # the command computes in bfloat16
    prompt = inputs[:8]
    made = loaded.generate(loaded.params, prompt, num_tokens=3, temperature=0)
    for token in made.tolist():
        assert token == int(loaded.apply(loaded.params, prompt[None])[0, -1].argmax())
        prompt = np.append(prompt, token)
    assert loaded.generate(loaded.params, text[:8], num_tokens=3, temperature=0) == tokenizer.decode(np.asarray(made))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "{hub}"], "is a checkpoint of the hub: give --data, what to evaluate it on"),
        (["evaluate", "{hub}", "--step", "3", "--data", "stdlib"], "--step 3 is of a run, and"),
        (["sample", "{hub}", "--prompt="], "prompt='': give text to go on from"),
        (["sample", "{hub}", "--num-tokens", "0"], "argument --num-tokens: 0: give at least 1"),
        (["sample", "nowhere"], "nowhere is neither a run (a folder with config.toml"),
    ],
)
def test_what_cannot_be_looked_at_is_named(words, message, hub, capsys):
    status, out, err = run([word.format(hub=hub) for word in words], capsys)
    assert (status, out) == (2, "") and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["evaluate", "sample"])
def test_a_run_of_the_trainer_in_python_is_no_checkpoint_of_the_hub(command, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model": {"name": "mine"}, "zero": {}, "optimizer": {}}))
    status, out, err = run([command, str(tmp_path)], capsys)
    assert (status, out) == (2, "") and f"{tmp_path} is a run that zero.Trainer made in Python" in err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("gone.txt", "the run's data gone.txt is gone, and its tokenizer with it: give --tokenizer FILE"),
        ("gone/*.jsonl", "no checkpoint in"),
        ("hf:name", "no checkpoint in"),
    ],
)
def test_text_that_is_no_folder_of_tokens_is_bytes_wherever_it_is(data, message, tmp_path, capsys):
    model = '[model]\npreset = "gpt-tiny"\nnum_layers = 1\nd_model = 16\nnum_heads = 2\nseq_len = 16\n'
    (tmp_path / "config.toml").write_text(f'{model}[data]\ndata = "{data}"\n')
    status, out, err = run(["sample", str(tmp_path), "--prompt", "a", "--num-tokens", "2"], capsys)
    assert (status, out) == (2, "") and message in err


def test_a_tokenizer_has_to_fit_the_vocabulary(hub, tmp_path, capsys):
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "runs")]
    tokenizer(hub / "tokenizer.json", num_tokens=250, more={"zz": 320})
    status, _, err = run(["train", "--from-hf", str(hub), *SMALL, *data], capsys)
    assert status == 2 and "tokenizer.json makes tokens up to 320, and the model in" in err and "has 320" in err
    (hub / "tokenizer.json").unlink()
    status, _, err = run(["train", "--from-hf", str(hub), *SMALL, *data], capsys)
    assert status == 2 and "has no tokenizer.json: give --tokenizer bytes or" in err
    assert not (tmp_path / "runs").exists()


def test_special_tokens_that_no_text_becomes_may_be_beyond_the_vocabulary(hub):
    from zero_jax.data import load_tokenizer

    tokenizer(hub / "tokenizer.json", num_tokens=250, added=[{"id": 250, "content": "<image>"}])
    loaded = load_tokenizer(hub / "tokenizer.json")
    assert loaded.vocab_size == 250 and loaded.encode("<image>").max() < 250


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--d-model", "8"], "--d-model: --from-hf takes the model's shape from its config.json: leave it out"),
        (["--model", "gpt-tiny"], "are two models: leave out one of them"),
        (["--seq-len", "65"], "has contexts of 64 at most"),
    ],
)
def test_options_beside_a_folder_of_the_hub(arguments, message, hub, capsys):
    for command in ("train", "plan"):
        status, _, err = run([command, "--from-hf", str(hub), *arguments], capsys)
        assert status == 2 and message in err and len(err.splitlines()) == 1


def test_a_name_of_the_hub_is_told_how_it_is_fetched(capsys):
    status, _, err = run(["train", "--from-hf", "meta/Llama-1B", *SMALL], capsys)
    assert status == 2 and "as `hf download meta/Llama-1B --local-dir Llama-1B` makes" in err


def test_a_folder_that_cannot_be_loaded_makes_no_run(hub, tmp_path, capsys):
    (hub / "model-00002-of-00002.safetensors").unlink()
    status, _, err = run(["train", "--from-hf", str(hub), *SMALL, "--out", str(tmp_path / "runs")], capsys)
    assert status == 2 and "which is not there" in err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3-8"], "did you mean 'llama-3-8b'? Choose one of gpt-tiny"),
        (["--model", "llama-3-8b", "--mlp-ratio", "4"], "--mlp-ratio: llama-3-8b is a decoder, which has no mlp_ratio"),
        (["--num-kv-heads", "2"], "gpt-tiny is a GPT, which has no num_kv_heads: did you mean --num-heads?"),
        (["--model", "llama-3-8b", "--head-dim", "7"], "head_dim=7 is odd"),
    ],
)
def test_presets_refuse_what_they_have_not(arguments, message, capsys, tmp_path):
    status, _, err = run(["train", "--out", str(tmp_path / "runs"), *arguments], capsys)
    assert status == 2 and message in err and not (tmp_path / "runs").exists()


def test_a_config_file_takes_fields_of_decoders(tmp_path):
    from zero_jax.cli.models.presets import preset_config

    path = tmp_path / "a.toml"
    path.write_text('[model]\npreset = "mistral-7b"\nwindow = "none"\nnum_layers = 2\nqk_norm = true\n')
    config = preset_config(cli.parse(["train", "--config", str(path), "--num-kv-heads", "4"]))
    assert (config.window, config.num_layers, config.qk_norm, config.num_kv_heads) == (None, 2, True, 4)
    assert config.d_hidden == PRESETS["mistral-7b"].d_hidden


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_adapters_begin_at_the_checkpoint(hub, tmp_path, capsys):
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "runs")]
    losses = []
    for name, options in {"all": [], "adapters": ["--lora", "blocks/query,blocks/value"]}.items():
        arguments = [
            "train",
            "--from-hf",
            str(hub),
            *SMALL,
            *data,
            "--name",
            name,
            "--eval-every",
            "1",
            *options,
            "--json",
        ]
        status, _, err = run(arguments, capsys)
        assert status == 0, err
        records = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        losses.append(next(record["loss"] for record in records if record["kind"] == "validation"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
