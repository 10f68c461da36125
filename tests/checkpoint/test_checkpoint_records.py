"""Records that were forged, and what is no file: a checkpoint is taken that is whole and says what its folder says."""

import json
import os
import shutil
import socket

import jax
import optax
import pytest
import reference

import zero_jax as zero
from zero_jax.checkpoint import (
    Checkpointer,
    CheckpointError,
    describe,
    find_checkpoint,
    find_restorable,
    latest_step,
    leaf_files,
    list_steps,
    restore,
)
from zero_jax.checkpoint import record as checkpoint_record
from zero_jax.checkpoint.leaf_files import check_files
from zero_jax.core.files.untrusted import json_checksum

TX, CONFIG = optax.sgd(1e-2), reference.make_config(stage=3)


def init_params(key):
    return {"w": jax.random.normal(key, (16, 8)), "b": jax.numpy.zeros((8,), "int4")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2, of different params."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder, log=pytest.fail) as checkpointer:
        for step in (1, 2):
            key = jax.random.key(step)
            state = zero.init_state(init_params, TX, key, mesh=reference.mesh_of("8"), config=CONFIG)
            checkpointer.save(step, state, extra={"step": step})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def reload(folder, **options):
    settings = {"init_fn": init_params, "tx": TX, "mesh": reference.mesh_of("8"), "config": CONFIG, "log": str}
    return restore(folder, **{**settings, **options})


def forge(step, change):
    """Changes a record, and gives it the checksum of what it says now."""
    file = step / "record" / "metadata"
    record = json.loads(file.read_text())
    del record["checksum"]
    record = change(record) or record
    file.write_text(json.dumps({**record, "checksum": json_checksum(record)}))


def field(name, value):
    return lambda record: record.update({name: value})


def leaf(key, value):
    """Changes what is said of a leaf; `None` for a key takes the leaf's place."""
    return lambda record: record["leaves"].update(
        {"params/w": value if key is None else {**record["leaves"]["params/w"], key: value}}
    )


def without(*path):
    def change(record):
        for key in path[:-1]:
            record = record[key]
        del record[path[-1]]

    return change


W = "params/w"
FORGED = {
    "other step": (field("step", 7), "is the checkpoint of step 7, copied or renamed"),
    "negative step": (field("step", -2), "-2 is not a whole number"),
    "step of another type": (field("step", "2"), "'2' is not a whole number"),
    "step 2.0": (field("step", 2.0), "2.0 is not a whole number"),
    "step true": (field("step", True), "True is not a whole number"),
    "step null": (field("step", None), "None is not a whole number"),
    "huge step": (field("step", 10**400), "is not a whole number from 0 to"),
    "NaN step": (field("step", float("nan")), "nan is not a whole number"),
    "text as loss": (field("loss", "low"), "'low' is not a number"),
    "huge loss": (field("loss", 10**400), "is not a number"),
    "list as extra": (field("extra", [1]), r"\[1\] is not an object"),
    "null as extra": (field("extra", None), "None is not an object"),
    "list as classes": (
        lambda record: record["extra"].update({"zero_jax.opt_state_classes": [1]}),
        r"\[1\] is not an object",
    ),
    "number as a class": (
        lambda record: record["extra"].update({"zero_jax.opt_state_classes": {"a": 1}}),
        "1 is not a text",
    ),
    "list as leaves": (field("leaves", [1, 2]), "is not an object"),
    "no step": (without("step"), "it lacks 'step'"),
    "no loss": (without("loss"), "it lacks 'loss'"),
    "no leaves": (without("leaves"), "it lacks 'leaves'"),
    "no extra": (without("extra"), "it lacks 'extra'"),
    "one key too many": (field("more", 1), "it has 'more'"),
    "leaf null": (leaf(None, None), "leaf 'params/w': None is not an object"),
    "leaf without shape": (without("leaves", W, "shape"), "leaf 'params/w': it lacks 'shape'"),
    "leaf without fingerprint": (without("leaves", W, "fingerprint"), "it lacks 'fingerprint'"),
    "leaf with more": (leaf("more", 1), "it has 'more'"),
    "shape is a number": (leaf("shape", 16), "16 is not a shape"),
    "shape is a text": (leaf("shape", "16"), "'16' is not a shape"),
    "negative size": (leaf("shape", [-16, 8]), "-16 is not a whole number"),
    "size 16.0": (leaf("shape", [16.0, 8]), "16.0 is not a whole number"),
    "huge sizes": (leaf("stored_shape", [2**62, 2**62]), "more elements than an array can have"),
    "other shape in the files": (leaf("stored_shape", [8, 16]), "float32.16, 8. is never stored as float32.8, 16."),
    "other dtype in the files": (leaf("stored_dtype", "int32"), "is never stored as int32"),
    "unknown dtype": (leaf("dtype", "float33"), "float33.* is never stored"),
    "dtype of objects": (leaf("dtype", "object"), "is never stored"),
    "dtype that is code": (leaf("dtype", "__import__('os')"), "is never stored"),
    "dtype is a list": (leaf("dtype", ["float32"]), "is not a text"),
    "keys instead": (leaf("dtype", "key<fry>"), "is never stored"),
    "huge fingerprint": (leaf("fingerprint", 2**32), "is not a whole number"),
    "text as fingerprint": (leaf("fingerprint", "1"), "is not a whole number"),
    "list": (lambda record: [record], None),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_passed_over_with_the_reason(name, folder):
    change, reason = FORGED[name]
    if reason is None:
        (folder / "step_00000002" / "record" / "metadata").write_text("[1]")
        reason = "is of format None"
    else:
        forge(folder / "step_00000002", change)
    found = describe(folder)
    assert found.step == latest_step(folder) == 1 and list_steps(folder) == [1]
    (told,) = found.passed_over
    assert "step_00000002" in told and "\n" not in told and len(told) < 1000
    assert "PASSED OVER: " + told in str(found) and found.to_json()["passed_over"] == [told]
    with pytest.raises(CheckpointError, match=reason):
        describe(folder, step=2)
    with pytest.raises(CheckpointError, match=reason):
        describe(folder / "step_00000002")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("leaves", W), "of 'params/w' there are values or a record, not both"),
        (
            lambda record: record["leaves"].update({"params/x": record["leaves"][W]}),
            "of 'params/x' there are values or",
        ),
        (
            lambda record: record["leaves"][W].update({"shape": [8, 8], "stored_shape": [8, 8]}),
            "its files contain float32",
        ),
    ],
)
def test_a_record_of_other_leaves_than_there_are_is_damaged_and_no_other_model(change, reason, folder):
    forge(folder / "step_00000002", change)
    assert reload(folder).step == 1
    with pytest.raises(CheckpointError, match=reason):
        reload(folder, step=2)
    assert any(reason in problem for problem in describe(folder, step=2, verify_leaves=True).problems or ())


def nested(_):
    return b"[" * 100_000 + b"]" * 100_000


RAW = {
    "nested deeply": (nested, "nested too deeply"),
    "many digits": (lambda text: text.replace(b'"step": 2,', b'"step": %s,' % (b"9" * 5000)), "cannot be read"),
    "nothing": (lambda _: b"", "cannot be read"),
    "zeros": (lambda text: b"\0" * len(text), "cannot be read"),
    "no UTF-8": (lambda text: b"\xff" + text, "cannot be read"),
    "a number": (lambda _: b"17", "is of format None"),
    "keys twice": (lambda text: text.replace(b'"step": 2,', b'"step": 2, "step": 3,', 1), "checksum"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_a_record_that_is_no_record_is_passed_over(name, folder):
    change, reason = RAW[name]
    file = folder / "step_00000002" / "record" / "metadata"
    file.write_bytes(change(file.read_bytes()))
    assert latest_step(folder) == 1
    with pytest.raises(CheckpointError, match=reason):
        describe(folder, step=2)


def replace(make):
    """Puts something in the place of a file."""

    def change(path):
        path.unlink()
        make(path)

    return change


def bind(path):
    with socket.socket(socket.AF_UNIX) as one:
        before = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is of 108 bytes at most
        try:
            one.bind(path.name)
        finally:
            os.chdir(before)


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 30)


PLACES = {
    "a pipe": (replace(os.mkfifo), "it is a named pipe|is a named pipe, not a file"),
    "a folder": (replace(os.mkdir), "it is a folder|cannot be read|is damaged"),
    "a socket": (replace(bind), "a socket"),
    "a device": (replace(lambda path: path.symlink_to("/dev/zero")), "a device"),
    "a link to itself": (replace(lambda path: path.symlink_to(path.name)), "cannot be read|symbolic links"),
    "a link to nothing": (replace(lambda path: path.symlink_to("nowhere")), "is missing|cannot be read"),
    "a gigabyte": (replace(sparse), "more than the|is damaged"),
}


@pytest.mark.parametrize("file", ["record/metadata", "state/manifest.ocdbt"])
@pytest.mark.parametrize("what", PLACES)
def test_what_is_no_file_is_passed_over_and_not_waited_for(what, file, folder):
    change, reason = PLACES[what]
    change(folder / "step_00000002" / file)
    back = reload(folder)
    assert back.step == 1 and back.extra == {"step": 1} and len(back.warnings) == 1
    with pytest.raises(CheckpointError, match=reason):
        reload(folder, step=2)
    if file.startswith("state"):
        assert describe(folder, step=2, verify_leaves=True).problems


def test_links_that_lead_in_circles_are_reported(folder):
    for name in "ijklmnop":
        (folder / "step_00000002" / "state" / name).symlink_to("..")
    record, _ = find_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"state/[i-p] leads to a folder that is there already"):
        check_files(record)


def test_a_checkpoint_may_be_reached_by_links(folder, tmp_path):
    (folder / "step_00000002" / "state").rename(tmp_path / "elsewhere")
    (folder / "step_00000002" / "state").symlink_to(tmp_path / "elsewhere")
    (folder / "step_00000001").rename(tmp_path / "one")
    (folder / "step_00000001").symlink_to(tmp_path / "one")
    assert reload(folder).step == 2 and reload(folder, step=1).step == 1


@pytest.mark.parametrize("kind", ["copied up", "renamed up", "renamed down", "linked", "many copies", "other widths"])
def test_a_folder_of_another_step_shadows_nothing(kind, folder):
    one, two = folder / "step_00000001", folder / "step_00000002"
    steps = {"copied up": [9], "renamed up": [9], "linked": [9], "many copies": [*range(100, 200)], "renamed down": [0],
             "other widths": []}[kind]  # fmt: skip
    for step in steps:
        other = folder / f"step_{step:08d}"
        if kind == "linked":
            other.symlink_to(one)
        elif kind == "renamed up":
            one.rename(other)
        elif kind == "renamed down":
            two.rename(other)
        else:
            shutil.copytree(one, other)
    if kind == "other widths":
        shutil.copytree(one, folder / "step_9")
        shutil.copytree(one, folder / "step_000000009")
    expected = 1 if kind == "renamed down" else 2
    back = reload(folder)
    assert back.step == back.extra["step"] == expected == latest_step(folder)
    passed = [step for step in steps if step > expected]
    assert len(back.warnings) == len(passed)
    for step, line in zip(reversed(passed), back.warnings, strict=True):
        assert f"checkpoint of step {step} passed over: " in line and "is the checkpoint of step 1, copied or" in line


def test_a_step_is_restored_from_its_own_folder_and_no_other(folder, monkeypatch):
    """A copy under another name was taken for the step beside it that has its number."""
    two, copy = folder / "step_00000002", folder / "kept"
    assert find_restorable(folder) == (str(folder), None)
    assert find_restorable(folder, 1) == (str(folder), 1)
    assert find_restorable(two) == find_restorable(f"{two}/") == (str(folder), 2)
    monkeypatch.chdir(two)
    assert find_restorable(".") == (str(folder), 2)
    shutil.copytree(folder / "step_00000001", copy)
    with pytest.raises(ValueError, match=r"kept is the checkpoint of step 1: name it step_00000001"):
        find_restorable(copy)


@pytest.mark.parametrize("item", ["state", "record"])
def test_files_of_two_checkpoints_mixed_are_passed_over(item, folder):
    shutil.rmtree(folder / "step_00000002" / item)
    shutil.copytree(folder / "step_00000001" / item, folder / "step_00000002" / item)
    back = reload(folder)
    assert back.step == 1 and len(back.warnings) == 1


def test_a_folder_that_cannot_be_read_is_reported(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(checkpoint_record.resolve_folder(folder)), "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read: .*Permission denied .permission was"):
        reload(folder)


def test_a_record_too_large_to_be_read_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_record, "_MAX_RECORD_BYTES", 5000)
    state = zero.init_state(init_params, TX, jax.random.key(0), mesh=reference.mesh_of("8"), config=CONFIG)
    lines = []
    with Checkpointer(tmp_path, log=lines.append) as checkpointer:
        checkpointer.save(1, state, extra={"notes": "x" * 5000})
    assert checkpointer.num_failed == 1 and "save less in `extra`" in lines[0]


# Reading ahead


@pytest.mark.parametrize("num_ahead", [1, 4])
def test_few_leaves_are_read_ahead_of_what_is_on_the_devices(num_ahead, tmp_path, monkeypatch):
    def many(key):
        return {f"layer{i:02d}": jax.random.normal(key, (16, 8)) for i in range(20)}

    state = zero.init_state(many, TX, jax.random.key(0), mesh=reference.mesh_of("8"), config=CONFIG)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state)
    num_open, most, open_leaf, make_array = 0, 0, leaf_files.open_leaf, jax.make_array_from_single_device_arrays

    def opened(*args):
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        return open_leaf(*args)

    def finished(*args, **options):
        nonlocal num_open
        num_open -= 1
        return make_array(*args, **options)

    monkeypatch.setattr(leaf_files, "open_leaf", opened)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", finished)
    monkeypatch.setattr(leaf_files, "_PENDING_BYTES", num_ahead * 16 * 8 * 4)
    assert reload(tmp_path, init_fn=many).step == 1
    assert num_ahead < most <= num_ahead + 2  # key and counters take next to nothing
