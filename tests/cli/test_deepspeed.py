"""DeepSpeed configs: what is translated loads and means the same, and every other key is named with a reason."""

import json
import math

import pytest
from command_line import run

from zero_jax.cli import commands as cli
from zero_jax.cli.config_file import read_file, write_file
from zero_jax.cli.deepspeed import translate
from zero_jax.cli.deepspeed.rows import KEYS, SECTIONS
from zero_jax.cli.options import field_values
from zero_jax.cli.run_config import read_part
from zero_jax.trainer import OptimizerConfig, TrainConfig
from zero_jax.trainer.optimizers import make_schedule
from zero_jax.training import ZeroConfig

# tests/deepspeed/ds_config_zero3.json of huggingface/transformers.
TRANSFORMERS_ZERO3 = {
    "fp16": {
        "enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e14, "reduce_bucket_size": 0,
        "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_fp16_weights_on_model_save": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}  # fmt: skip
# deepspeed_configs/zero3_bf16_cpuoffload_all.json of axolotl.
AXOLOTL_ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "fp16": {
        "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
        "hysteresis": 2, "min_loss_scale": 1,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip
# bing_bert/deepspeed_bsz64k_lamb_config_seq128.json of DeepSpeedExamples.
BERT_LAMB = {
    "train_batch_size": 65536,
    "train_micro_batch_size_per_gpu": 64,
    "steps_per_print": 100,
    "prescale_gradients": False,
    "optimizer": {
        "type": "Lamb",
        "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01},
    },
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0},
    "sparse_attention": {
        "mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4, "num_global_blocks": 1,
        "attention": "bidirectional", "horizontal_global_attention": False, "num_different_global_patterns": 4,
    },
}  # fmt: skip
PUBLISHED = {
    "transformers": (
        TRANSFORMERS_ZERO3,
        {"stage": 3, "precision": "fp16", "clip_norm": None, "overlap": True, "offload": "state"},
        {
            "optimizer": "adamw",
            "learning_rate": 3e-5,
            "beta1": 0.8,
            "beta2": 0.999,
            "weight_decay": 3e-7,
            "warmup_steps": 500,
        },
        {"zero_optimization.offload_param", "fp16.hysteresis"},
    ),
    "axolotl": (
        AXOLOTL_ZERO3,
        {"stage": 3, "precision": "bf16"},
        {},
        {"gradient_clipping", "train_batch_size", "optimizer.type", "zero_optimization.offload_param"},
    ),
    "bert": (
        BERT_LAMB,
        {"stage": 0, "precision": "fp16", "clip_norm": 1.0, "num_microbatches": 16},
        {},
        {"optimizer.type", "optimizer.params.max_coeff", "sparse_attention", "scheduler.type"},
    ),
}


def merged(config, **changes):
    """Returns a config with keys changed by dotted name (with `__` for dots)."""
    config = json.loads(json.dumps(config))
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return config


def row(translation, key):
    (found,) = (row for row in translation.rows if row.key == key)
    return found


def loaded(translation, path):
    """Returns the train config of the emitted file, read as `zero-jax train --config` does."""
    write_file(path, translation.sections, title="\n".join(["a test", *translation.undecided]))
    options = cli.parse(["train", "--config", str(path)])
    config = TrainConfig(**field_values(TrainConfig, options))
    return config, {part: read_part(part, options) for part in ("zero", "optimizer", "log")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_load_as_what_they_say(name, tmp_path):
    config, zero, optimizer, undecided = PUBLISHED[name]
    translation = translate(config, devices=64)
    run, parts = loaded(translation, tmp_path / "a.toml")
    assert {key: getattr(parts["zero"], key) for key in zero} == zero
    assert {key: getattr(parts["optimizer"], key) for key in optimizer} == optimizer
    assert {row.key for row in translation.of("not translated", "auto")} >= undecided
    assert not translation.of("unknown")
    if name == "bert":
        assert run.batch_size == 65536 and parts["optimizer"] == TrainConfig().optimizer
        assert "optimizer" not in translation.sections


SAMPLES = {"bool": [True, False], "int": [1, 4], "number": [0.5, 1], "text": ["a"], "list": [[0.9, 0.99]]}
SAMPLES |= {"block": [{"enabled": True, "device": "cpu"}, {}], "any": [0, "a"]}


def at(key, value):
    """Returns a config with one key, beside what it needs."""
    base = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000, "warmup_max_lr": 1e-3}}}
    base |= {"optimizer": {"type": "AdamW", "params": {}}}
    if key in SECTIONS:
        return base | {key: value}
    return merged(base, **{key.replace(".", "__"): value})


def test_every_key_has_one_row_and_what_comes_of_it_loads(tmp_path):
    for key, entry in KEYS.items():
        for value in (*SAMPLES[entry.kind], "auto", None):
            if value == "auto" and entry.kind == "block":
                continue
            try:
                translation = translate(at(key, value), devices=8)
            except ValueError as error:
                assert key.rpartition(".")[2] in str(error) or "optimizer.params" in str(error), (key, value, error)
                continue
            assert key in {row.key for row in translation.rows}, (key, value)
            assert all(row.reason or row.settings or row.status in ("off", "same") for row in translation.rows), key
            write_file(tmp_path / "a.toml", translation.sections, title="")
            read_file(tmp_path / "a.toml")


def test_every_key_of_a_wrong_kind_is_named():
    wrong = {"bool": "yes please", "int": 1.5, "number": "three", "text": 3, "list": 0.9, "block": 3}
    for key, entry in KEYS.items():
        if entry.kind in wrong and key not in SECTIONS:
            with pytest.raises(ValueError, match=rf"^{key.replace('.', '[.]')} = .*: give"):
                translate(at(key, wrong[entry.kind]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16__enabled": True}, "fp16.enabled are both true"),
        ({"zero_optimization__stage": 4}, "zero_optimization.stage: unknown ZeRO stage 4"),
        ({"zero_optimization": 3}, "zero_optimization = 3: give true or false"),
        ({"fp16": True}, "fp16 = True: give an object of keys"),
        ({"optimizer__params__lr": -1}, "optimizer.params: learning_rate=-1.0"),
        ({"optimizer__params__betas": [0.9]}, "give two numbers"),
        ({"gradient_clipping": -1.0}, "gradient_clipping: clip_norm=-1.0"),
        ({"train_batch_size": 0}, "train_batch_size = 0: give at least 1"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "7 does not divide by 16"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8},
         "are for 4 data-parallel devices, not 8"),
        ({"scheduler__type": "WarmupDecayLR"}, "total_num_steps = None: give a number of steps"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(changes, message):
    config = {"fp16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {}}}
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        translate(merged(config, **changes), devices=8)


@pytest.mark.parametrize(
    ("keys", "devices", "expected"),
    [
        ({"train_batch_size": 64}, None, (64, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, (64, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, None, (64, None)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8, (64, 4)),
        ({"train_micro_batch_size_per_gpu": 2}, 8, (16, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, None, (None, 1)),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 4}, 8, (None, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}}, 8, (4, 1)),
    ],
)
def test_the_batch_is_inferred_as_deepspeed_does(keys, devices, expected):
    sections = translate(keys, devices=devices).sections
    assert (sections.get("run", {}).get("batch_size"), sections["zero"].get("num_microbatches")) == expected


@pytest.mark.parametrize(
    ("keys", "per_device", "expected"),
    [
        ("size micro num", 4, (32, 1)),  # 8 devices x 4 x 1
        ("size micro", 4, (64, 2)),  # of 2 accumulation steps
        ("size num", 4, (24, 1)),  # of 3 a device, in the file
        ("size micro num", None, (None, None)),
    ],
)
def test_batch_sizes_that_are_auto_are_those_of_the_trainer(keys, per_device, expected):
    names = {
        "size": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "num": "gradient_accumulation_steps",
    }
    config = {names["size"]: 32, names["micro"]: 3, names["num"]: 2} | {names[key]: "auto" for key in keys.split()}
    sections = translate(config, devices=8, per_device_batch_size=per_device).sections
    assert (sections.get("run", {}).get("batch_size"), sections["zero"].get("num_microbatches")) == expected


@pytest.mark.parametrize(("warmup", "more"), [(100, ""), (1000, " --steps 10000")])
def test_the_command_has_the_steps_that_a_warm_up_needs(warmup, more, tmp_path, monkeypatch, capsys):
    params = {"warmup_num_steps": warmup, "warmup_max_lr": 1e-3}
    config = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR", "params": params}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    status, text, _ = run(["from-deepspeed", "ds.json", "--out", "a.toml"], capsys)
    assert status == 0 and text.endswith(f"wrote a.toml: zero-jax train --config a.toml --data TEXT{more}\n")
    status, shown, _ = run(["train", "--config", "a.toml", *more.split(), "--show-config"], capsys)
    assert status == 0 and f"warmup_steps = {warmup}\n" in shown


def deepspeed_rate(kind, peak, warmup, total, update, end=1e-4):
    """Returns the rate of an update by DeepSpeed's own formulas; its scheduler steps after the optimizer."""
    i = max(update - 1, 0)
    if i < warmup:
        return peak * i / warmup
    if kind == "WarmupLR":
        return peak
    if kind == "WarmupDecayLR":
        return peak * max(0.0, (total - i) / (total - warmup))
    progress = min(1.0, (i - warmup + 1) / (total - warmup))
    return peak * (end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_schedules_are_deepspeeds_but_for_two_updates(kind, tmp_path):
    params = {"warmup_num_steps": 100, "warmup_type": "linear"}
    params |= {"warmup_max_lr": 3e-4} if kind != "WarmupCosineLR" else {}
    params |= {"total_num_steps": 1000} if kind != "WarmupLR" else {}
    config = {"optimizer": {"type": "Adam", "params": {"lr": 3e-4}}, "scheduler": {"type": kind, "params": params}}
    run, parts = loaded(translate(config), tmp_path / "a.toml")
    steps = 1000 if kind == "WarmupLR" else run.steps
    assert steps == 1000
    schedule = make_schedule(parts["optimizer"], num_steps=steps)
    for update in range(0, 1000, 7):
        ours, shifted = float(schedule(update)), deepspeed_rate(kind, 3e-4, 100, 1000, update)
        assert abs(ours - shifted) <= 2.1 / 100 * 3e-4, update


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam"}, {"optimizer": "adamw", "learning_rate": 1e-3, "beta2": 0.999, "weight_decay": 0.0}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"optimizer": "adamw", "weight_decay": 0.01}),
        ({"type": "Lion", "params": {"lr": 1e-4}}, {"optimizer": "lion", "learning_rate": 1e-4, "weight_decay": 0.0}),
        ({"type": "SGD", "params": {"lr": 0.1}}, {"optimizer": "sgd", "momentum": 0.0}),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}}, {"optimizer": "sgd", "momentum": 0.9}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {"optimizer": "adamw"}),
        # Other optimizers than those here: nothing of them is set.
        ({"type": "SGD", "params": {"momentum": 0.9}}, None),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, None),
        ({"type": "Adam", "params": {"bias_correction": False}}, None),
        ({"type": "Muon", "params": {"lr": 0.1}}, None),
        ({"type": "OneBitAdam", "params": {"freeze_step": 400}}, None),
        ({"type": "Adan", "params": {"lr": 0.1}}, None),
    ],
)
def test_optimizers(optimizer, expected, tmp_path):
    translation = translate({"optimizer": optimizer})
    if expected is None:
        assert "optimizer" not in translation.sections
        assert row(translation, "optimizer.type").status == "not translated"
        return
    parts = loaded(translation, tmp_path / "a.toml")[1]
    assert {name: getattr(parts["optimizer"], name) for name in expected} == expected


def test_what_is_missing_is_deepspeeds_default(tmp_path):
    zero = loaded(translate({"train_batch_size": 8}), tmp_path / "a.toml")[1]["zero"]
    assert zero == ZeroConfig(stage=0, precision="fp32", clip_norm=None)
    assert TrainConfig().zero.stage == 3 and OptimizerConfig().weight_decay == 0.1  # why it has to be written


def test_replicas_and_remat():
    mics = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}
    assert translate(mics, devices=16).sections["run"] == {"replica": 4}
    assert row(translate(mics), "zero_optimization.mics_shard_size").status == "not translated"
    remat = {"activation_checkpointing": {"partition_activations": True}}
    assert "remat" not in translate(remat).sections["zero"]
    assert translate(remat | {"tensor_parallel": {"autotp_size": 2}}).sections["zero"]["remat"] == "full_sharded"
    both = merged(remat, activation_checkpointing__cpu_checkpointing=True)
    assert translate(both).sections["zero"]["remat"] == "full_offloaded"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"offload_optimizer": {"device": "cpu", "pin_memory": True}}, "state"),
        ({"cpu_offload": True}, "state"),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "state"),
        ({"offload_optimizer": {"device": "none"}}, None),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}, None),
        ({"offload_param": {"device": "cpu"}}, None),
    ],
)
def test_offloading(keys, expected, tmp_path):
    translation = translate({"zero_optimization": {"stage": 2} | keys})
    assert loaded(translation, tmp_path / "a.toml")[1]["zero"].offload == expected
    if expected is None and keys != {"offload_optimizer": {"device": "none"}}:
        assert row(translation, f"zero_optimization.{next(iter(keys))}").status == "not translated"


@pytest.mark.parametrize(("stage", "expected"), [(3, ("int8", "int8")), (2, (None, None))])
def test_quantized_collectives(stage, expected, tmp_path):
    keys = {"stage": stage, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    zero = loaded(translate({"zero_optimization": keys}), tmp_path / "a.toml")[1]["zero"]
    assert (zero.quantize_gathers, zero.quantize_grads) == expected


def test_a_part_of_the_state_is_offloaded(tmp_path):
    keys = {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    zero = loaded(translate({"zero_optimization": {"stage": 2} | keys}), tmp_path / "a.toml")[1]["zero"]
    assert (zero.offload, zero.offload_fraction) == ("state", 0.3)


def test_a_typing_error_of_a_published_config_is_found_and_nothing_is_written(tmp_path, capsys):
    # As in Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_3_config.json of DeepSpeedExamples.
    config = {"zero_optimization": {"stage": 3, "stage3_param_persitence_threshold": 8.192e4}, "mp_sz": 1}
    path, out = tmp_path / "ds.json", tmp_path / "a.toml"
    path.write_text(json.dumps(config))
    status, text, _ = run(["from-deepspeed", str(path), "--out", str(out)], capsys)
    assert status == 1 and not out.exists()
    assert "did you mean 'zero_optimization.stage3_param_persistence_threshold'?" in text
    assert "mp_sz = 1" in text and "DeepSpeed documents no such key" in text


def test_the_command_writes_once_and_its_output_is_a_config(tmp_path, capsys):
    path, out = tmp_path / "ds.json", tmp_path / "a.toml"
    path.write_text(json.dumps(TRANSFORMERS_ZERO3))
    status, text, _ = run(["from-deepspeed", str(path)], capsys)
    assert status == 0
    (tmp_path / "b.toml").write_text(text)
    assert read_file(tmp_path / "b.toml")["ZeroConfig.stage"] == 3
    assert run(["from-deepspeed", str(path), "--out", str(out)], capsys)[0] == 0
    assert "decide yourself" in out.read_text() and "warmup_steps = 500" in out.read_text()
    before = out.read_text()
    status, text, err = run(["from-deepspeed", str(path), "--out", str(out)], capsys)
    assert (status, text) == (2, "") and "exists: give another name, or --force" in err
    assert out.read_text() == before
    status, text, _ = run(["from-deepspeed", str(path), "--out", str(out), "--force", "--json"], capsys)
    record = json.loads(text)
    assert status == 0 and record["written"] == str(out) and record["config"]["zero"]["stage"] == 3
    assert {"key", "value", "status", "settings", "reason", "is_absent"} == {*record["rows"][0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ("[1]", "give an object of keys"),
        ('{"a": NaN}', "NaN is no number"),
        ("{// comment\n}", "in JSON, without comments"),
        ("[" * 100_000, "nested too deeply"),
        ('{"train_batch_size": 1%s}' % ("0" * 400), "train_batch_size: 1000"),
        ('{"train_batch_size": 1e99}', "train_batch_size: 1e+99 is out of range: give a number of float32"),
        ('{"optimizer": {"params": {"lr": 1%s}}}' % ("0" * 400), "optimizer.params.lr: 1000"),
        (b"\xff\xfe", "no text in UTF-8"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_config(text, message, tmp_path, capsys):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    status, out, err = run(["from-deepspeed", str(path)], capsys)
    assert (status, out) == (2, "") and message in err and len(err.splitlines()) == 1
