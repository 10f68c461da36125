"""Public functions refuse what a parameter cannot be, in one line of zero_jax's own, whatever the parameter.

The cases are made from the signatures: a function or parameter that is added is tested by that.
"""

import functools
import inspect
import pathlib
import tempfile
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from reference import mesh_of
from two_layers import host_params, loss_fn, make_batch

import zero_jax as zero
from zero_jax.models import decoder
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.planning import CompileOptions

PACKAGE = f"{pathlib.Path(zero.__file__).parent}/"
MESH, CONFIG, TX = mesh_of("4"), reference.make_config(stage=3), optax.sgd(0.1)
PLACED = {"mesh": MESH, "config": CONFIG}
WRONG = {
    "None": None, "text": "x", "integer": 3, "negative": -1, "fraction": 1.5, "nan": float("nan"), "list": [1],
    "nothing": [], "dict": {"a": 1}, "object": object(), "function": lambda: None, "bytes": b"x", "class": dict,
    "huge": 10**30, "bool": True, "array": jnp.ones(3),
}  # fmt: skip
NUMBERS = {"integer", "negative", "fraction", "nan", "bool", "array"}
TREES = {*NUMBERS, "None", "list", "nothing", "dict"}
# What some parameter may be all the same.
RIGHT = {
    "batch": TREES,
    "tree": TREES,
    "write_leaf.value": {"array"},
    "write_leaves.values": {"nothing"},
    "params": TREES,
    "model_state": {"text"},  # a path
    "init_fn": {"class", "function"},
    "fn": {"class", "function"},
    "loss_fn": {"class", "function"},
    "log": {"class", "function"},
    "temporaries": {"class", "function"},
    "cache": {"text", "None"},
    "num_devices_per_host": {"integer"},
    "num_hosts": {"integer"},
    "verify.replica": {"integer"},  # that divides
    "num_steps": {"integer", "huge"},
    "seed": {"integer", "huge"},
    "tolerance": {"None", "integer", "fraction", "huge"},
    "weighted": {"bool"},
    "plan.pipe": {"integer", "huge"},
    "plan.replica": {"integer", "huge"},  # of as many devices as the topology may have
    "plan.model": {"integer", "huge"},
    "plan.data_layout": {"list", "nothing"},
    "name": {"text"},
    "field": {"text"},  # known when a state comes
    "compiler_options": {"dict"},
    "keep_gathered": {"bool"},
    "own_process": {"bool"},
    "quick": {"bool"},
    "max_hoisted_bytes": {"integer", "huge"},
    "max_compiles": {"integer", "huge"},
    "host_memory_bytes": {"integer", "huge"},
    "max_num_microbatches": {"integer", "huge"},
    "timeout_seconds": {"integer", "fraction", "huge"},
    "unknown_trip_count": {"integer", "huge"},
    "folder": {"text"},
    "seq_len": {"integer"},
    "max_file_bytes": {"integer", "huge"},
    "dim": {"integer", "huge"},  # known when an activation comes
    "specs": {"None", "nothing"},  # prefixes of a tree without leaves
    "param_shapes": {"nothing", "array"},
    "replica_axes": {"nothing"},
    "model_axes": {"nothing"},
    "pipe_axes": {"nothing"},
    "layouts": {"nothing"},
    "offloads": {"nothing"},
    "models": {"list"},
    "pipes": {"list"},
    "replicas": {"list"},
    "stages": {"list"},
    "scale": {"integer", "negative", "fraction", "huge"},
    "logits_soft_cap": {"integer", "fraction", "huge"},
    "local_window_size": {"integer", "huge"},
    "is_causal": {"bool"},
}


@functools.cache
def state():
    return zero.init_state(host_params(), TX, jax.random.key(0), **PLACED)


@functools.cache
def compiled():
    return zero.make_train_step(loss_fn, TX, **PLACED).lower(state(), make_batch()).compile()


def planned(**more):
    model = {"loss_fn": loss_fn, "init_fn": lambda key: host_params(), "tx": TX, "batch": make_batch()}
    return {**model, "topology": "v5e:2x2", "config": CONFIG, "own_process": False, "cache": None, **more}


DECODER = DecoderConfig(vocab_size=8, seq_len=8, num_layers=1, d_model=8, num_heads=2, head_dim=4, d_hidden=8)


@functools.cache
def hub_folder():
    folder = tempfile.mkdtemp()
    zero.save_hf(folder, decoder.init(DECODER, jax.random.key(0)), DECODER)
    return folder


def adapters():
    lora = zero.Lora(rules=zero.lora_rules(DECODER, "q_proj"), rank=2)
    return {"adapters": lora.init(decoder.init(DECODER, jax.random.key(0)), jax.random.key(1)), "lora": lora}


@functools.cache
def peft_folder():
    folder = tempfile.mkdtemp()
    zero.save_peft(folder, **adapters(), like=DECODER)
    return folder


# Right arguments of each function, by its public name.
CALLS = {
    "abstract_state": lambda: {"init_fn": lambda key: host_params(), "tx": TX, **PLACED},
    "batch_sharding": lambda: {"mesh": MESH},
    "compiler_options": lambda: dict(PLACED),
    "dot_product_attention": lambda: dict.fromkeys(("query", "key", "value"), jnp.ones((2, 4, 2, 8))),
    "fuse_attention": lambda: {"loss_fn": loss_fn, "mesh": MESH},
    "gather_on_use": lambda: {"fn": loss_fn, "specs": P(), "mesh": MESH},
    "init_state": lambda: {"init_fn": host_params(), "tx": TX, "key": jax.random.key(0), **PLACED},
    "load_hf": lambda: {"folder": hub_folder(), **PLACED},
    "load_peft": lambda: {"folder": peft_folder(), "like": DECODER},
    "lora_rules": lambda: {"like": DECODER, "targets": "q_proj"},
    "make_eval_step": lambda: {"loss_fn": loss_fn, **PLACED},
    "make_mesh": lambda: {"data": 8},
    "make_train_step": lambda: {"loss_fn": loss_fn, "tx": TX, **PLACED},
    "pipeline_report": lambda: {"loss_fn": loss_fn, "params": host_params(), "batch": make_batch(), **PLACED},
    "plan": planned,
    "plan_auto": lambda: planned(max_compiles=0),
    "plan_layouts": planned,
    "read_leaf": lambda: {"tree": {"a": jnp.ones(3)}, "path": "a"},
    "read_leaves": lambda: {"tree": {"a": jnp.ones(3)}},
    "rematerialize": lambda: {"loss_fn": loss_fn, "remat": "full", "mesh": MESH},
    "round_state": lambda: {"tx": TX, "field": "nu", "dtype": "bfloat16"},
    "save_hf": lambda: {
        "folder": tempfile.mkdtemp(),
        "params": decoder.init(DECODER, jax.random.key(0)),
        "like": DECODER,
    },
    "save_peft": lambda: {"folder": tempfile.mkdtemp(), **adapters(), "like": DECODER},
    "sequence_parallel": lambda: {"mesh": MESH},
    "shard_batch": lambda: {"batch": make_batch(), "mesh": MESH},
    "sharding_report": lambda: {"params": host_params(), **PLACED},
    "state_shardings": lambda: {"abstract_state": state(), **PLACED},
    "trace_loss": lambda: {"loss_fn": loss_fn, "params": host_params(), "batch": make_batch(), **PLACED},
    "verify": lambda: {key: value for key, value in planned(num_steps=1).items() if key != "cache"},
    "write_leaf": lambda: {"tree": {"a": jnp.ones(3)}, "path": "a", "value": jnp.ones(3)},
    "write_leaves": lambda: {"tree": {"a": jnp.ones(3)}, "values": {"a": jnp.ones(3)}},
    "memory.estimate": lambda: {"state": state(), **PLACED},
    "memory.estimate_stages": lambda: {"params": host_params(), "tx": TX},
    "memory.measure": lambda: {"compiled": compiled()},
    "comms.estimate": lambda: {"state": state(), **PLACED},
    "comms.measure": lambda: {"compiled": compiled(), "mesh": MESH},
}
COMPILING = dict(inspect.signature(CompileOptions).parameters)
# Functions of arrays inside a traced function, or that others below are made of, and what the state is restored with.
ELSEWHERE = {
    "attention_report", "summary", "from_equinox", "from_linen", "from_nnx",
    "dot_product_attention",
    "ema_params", "gather_report", "params_ema", "remat_report", "restore", "memory.compare", "memory.layout_options",
    "memory.measure_arrays", "memory.read_layout", "memory.transformer_residuals", "comms.compare",
    "comms.sharded_residual_bytes",
}  # fmt: skip
# Of these functions, the parameters whose values are the model's own matter.
OF_THE_MODEL = {(name, argument) for name in ("trace_loss", "pipeline_report") for argument in ("params", "batch")}
OF_THE_MODEL.add(("state_shardings", "params"))


class Started(BaseException):
    """The work has begun."""


def start(*_, **__):
    raise Started


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    for target in ("process.report_on", "search.Search.run"):
        monkeypatch.setattr(f"zero_jax.planning.{target}", start)


def public(name) -> Any:
    found: Any = zero
    for part in name.split("."):
        found = getattr(found, part)
    return found


def refusal(name, arguments):
    """Returns what is wrong with how a function refuses its arguments, or ''."""
    try:
        public(name)(**arguments)
    except (ValueError, TypeError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        one_line = len(str(error).splitlines()) == 1 and len(str(error)) < 500
        return "" if one_line and raised_in.startswith(PACKAGE) else f"{type(error).__name__}: {str(error)[:200]}"
    except Started:
        return "accepted: the work started"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted"


def test_every_public_function_is_here():
    names = [f"{part}.{name}" for part in ("memory", "comms") for name in getattr(zero, part).__all__]
    functions = {name for name in (*zero.__all__, *names) if inspect.isfunction(public(name))}
    assert functions == {*CALLS, *ELSEWHERE}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_another_kind_are_refused(name):
    right, wrong, num_cases = CALLS[name](), [], 0
    assert refusal(name, right).startswith("accepted"), refusal(name, right)
    parameters = dict(inspect.signature(public(name)).parameters)
    if parameters.pop("compiling", None):
        parameters |= COMPILING
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD or (name, parameter.name) in OF_THE_MODEL:
            continue
        for kind, value in WRONG.items():
            is_default = value is parameter.default or (
                type(value) is type(parameter.default) and value == parameter.default
            )
            mine = RIGHT.get(f"{name}.{parameter.name}", RIGHT.get(parameter.name, set()))
            if parameter.name == "init_fn" and name == "init_state":
                mine = {*TREES, "class", "function"}  # params themselves
            if is_default or kind in mine:
                continue
            num_cases += 1
            why = refusal(name, {**right, parameter.name: value})
            if why:
                wrong.append(f"{parameter.name}={kind}: {why}")
    assert not wrong, "\n".join(wrong)
    assert num_cases > 10
