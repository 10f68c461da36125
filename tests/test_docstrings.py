"""The examples in the docstrings of public names, run as their readers would, with the names of the quickstart."""

import dataclasses
import doctest
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero
from zero_jax.models import decoder
from zero_jax.models.decoder_config import DECODERS

# Public names of modules that the commands and other packages stand on, or that are rows of a report: others' examples
# show them. This list may shrink.
WITHOUT = frozenset(
    "cluster.Watchdog cluster.let_others_end_first cluster.report_end cluster.report_start comms.Finding "
    "comms.ScheduledOverlap data.Batch data.Dataset data.Stream data.StreamBatches data.Tokens data.load_dataset "
    "data.log_progress data.make_tokens data.source_chunks data.stream_batches data.token_folder_tokenizer "
    "data.train_batches data.train_bpe data.validation_batches memory.ArgumentLeaf memory.Buffer memory.HeapLayout "
    "memory.Residuals memory.Temporary memory.TransformerResiduals memory.read_layout memory.transformer_residuals "
    "paper.PaperTable paper.PaperTables paper.communication paper.figure1 paper.models paper.residuals paper.show_gb "
    "paper.show_params paper.show_ratio paper.table1 paper.table2 paper.table3 pretrained.export_hf "
    "pretrained.load_tensors pretrained.save_tensors trainer.Evaluation trainer.Model trainer.Run trainer.RunRecords "
    "trainer.Sampler trainer.TrackedRun trainer.evaluate trainer.execute "
    "trainer.plot_runs trainer.prepare trainer.train".split()
)
# Examples that compile for a TPU.
COMPILING = {"plan", "plan_auto", "plan_layouts", "verify", "PlanReport", "AutoPlan", "LayoutPlans", "Verification"}
COMPILING |= {"ModelError", "CompilerCrash"}


def public_names():
    """Yields the public functions and classes by name, those of the modules among them as `module.name`."""
    for name in zero.__all__:
        value = getattr(zero, name)
        if not isinstance(value, types.ModuleType):
            yield from [(name, value)] if callable(value) else []
            continue
        own = [x for x, inner in vars(value).items() if getattr(inner, "__module__", "") == value.__name__]
        for inner in getattr(value, "__all__", [x for x in own if not x.startswith("_")]):
            if inner not in zero.__all__ and callable(getattr(value, inner)):
                yield f"{name}.{inner}", getattr(value, inner)


NAMES = dict(public_names())
EXAMPLES = {
    name: found[0]
    for name, value in NAMES.items()
    if (found := doctest.DocTestFinder(recurse=False).find(value, name)) and found[0].examples
}


@functools.cache
def quickstart():
    """Returns the names that examples stand on: a model, its optimizer, mesh, config, step and first state."""

    def init_fn(key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (64, 64)) / 8, "down": jax.random.normal(down, (64, 64)) / 8}

    def loss_fn(params, batch):
        return jnp.square(jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]).mean()

    mesh, config, tx = zero.make_mesh(), zero.ZeroConfig(stage=3), optax.adamw(1e-3)
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    batch = {"x": np.ones((16, 64), np.float32), "y": np.zeros((16, 64), np.float32)}
    return locals() | {"zero": zero, "jax": jax, "jnp": jnp, "np": np, "optax": optax}


@functools.cache
def tiny_decoder():
    """Returns the shape of a small model of the hub's form."""
    small = {"vocab_size": 64, "seq_len": 16, "num_layers": 2, "d_model": 32, "num_heads": 2, "num_kv_heads": 2}
    return dataclasses.replace(DECODERS["llama-3-8b"], **small, head_dim=16, d_hidden=64)


def names_for(text, folder):
    """Returns the names that an example uses, its own folder and what has to be made for it among them."""
    given = quickstart()
    names = {**given, "state": jax.tree.map(jnp.copy, given["state"]), "folder": folder}  # a step donates its own
    shape, key = tiny_decoder(), jax.random.key(0)
    names |= {"shape": shape, "decoder": decoder, "DECODERS": DECODERS}
    if re.search(r"\bhf\b", text):
        names["hf"] = zero.save_hf(folder / "hf", decoder.init(shape, key), shape).folder
    if re.search(r"\bpeft\b", text):
        lora = zero.Lora(rules=zero.lora_rules(shape, "q_proj"), rank=4)
        adapters = lora.init(decoder.init(shape, key), key)
        names["peft"] = zero.save_peft(folder / "peft", adapters, lora, shape).folder
    return names


def test_every_public_name_has_an_example():
    assert {name for name in NAMES if name not in EXAMPLES} == WITHOUT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.tpu_compiler] * (name in COMPILING)) for name in EXAMPLES]
)
def test_the_example_of_a_docstring_runs(name, tmp_path, monkeypatch):
    if name in COMPILING:
        pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    example, told = EXAMPLES[name], []
    monkeypatch.chdir(tmp_path)
    example.globs = names_for(example.docstring, tmp_path)
    failed, tried = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert tried and not failed, "".join(told)
