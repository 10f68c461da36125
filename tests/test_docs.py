"""Runs every snippet of README.md and docs/ as a reader would copy it, and checks commands, names, paths and links."""

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import re
import shlex
import subprocess
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero
from zero_jax.cli.commands import build_parser
from zero_jax.cli.models.own import import_own_model, read_own_model
from zero_jax.cli.train import read_config
from zero_jax.trainer import prepare

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
ROOT_PAGES = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Snippets that cannot run here, by page and index, with the reason.
NOT_RUN: dict[tuple[str, int], str] = {}


def snippets(page):
    """Returns the snippets of a page, each with its first line number."""
    text = page.read_text(encoding="utf-8")
    return [(text[: found.start(1)].count("\n") + 1, found[1]) for found in SNIPPET.finditer(text)]


def two_blocks():
    """Returns the names that a page assumes: a small model, its mesh, its optimizer."""

    def init_fn(key):
        up, down = (jax.random.normal(k, (64, 64)) / 8 for k in jax.random.split(key))
        return {"blocks": {"up": up, "down": down}}

    def loss_fn(params, batch):
        blocks = params["blocks"]
        return jnp.square(jax.nn.relu(batch["x"] @ blocks["up"]) @ blocks["down"] - batch["y"]).mean()

    mesh, tx = zero.make_mesh(), optax.adamw(3e-4)
    config = zero.ZeroConfig(stage=3, num_microbatches=2, noise_scale=True)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    batch = {"x": np.ones((64, 64), np.float32), "y": np.zeros((64, 64), np.float32)}
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
    abstract_state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    return dict(locals()) | {"jax": jax, "jnp": jnp, "optax": optax, "zero": zero, "train_step": step}


def with_params():
    """Returns the names of `two_blocks`, and the params of its state."""
    names = two_blocks()
    return names | {"params": names["state"].params}


def trained():
    """Returns the names of `two_blocks`, and the metrics of a step."""
    names = two_blocks()
    _, metrics = names["step"](names["state"], names["batch"])
    return names | {"metrics": metrics, "batch_size": 64}


def own_loop():
    """Returns a step before `jax.jit`, for the three lines that an existing loop changes."""

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(own_loop.namespace["loss_fn"])(state.params, batch)
        params = jax.tree.map(lambda p, g: p - 1e-3 * g, state.params, grads)
        return dataclasses.replace(state, params=params), loss

    names = two_blocks()
    return {name: names[name] for name in ("loss_fn", "abstract_state", "mesh", "config", "state", "batch")} | {
        "train_step": train_step
    }


def rematted():
    """Returns a model of repeated blocks."""

    def loss_fn(params, batch):
        x = batch["x"]
        for block in params["blocks"]:
            x = x + jax.nn.relu(x @ block["up"]) @ block["down"]
        return jnp.square(x).mean()

    params = {"blocks": [{"up": jnp.ones((64, 64)), "down": jnp.ones((64, 64))} for _ in range(4)]}
    return two_blocks() | {"loss_fn": loss_fn, "params": params}


def checkpointed():
    """Returns a loop of few steps; the paths of the page are in the test's folder."""
    few = lambda *_: range(200, 801, 200)  # noqa: E731
    return two_blocks() | {"position": 7, "validation_loss": 1.0, "range": few}


def chunked_head():
    """Returns a model that ends in hidden states."""
    batch = {name: np.zeros((8, 16), np.int32) for name in ("inputs", "targets")}
    params = {"embed": jnp.ones((96, 32))}
    return two_blocks() | {"model": lambda params, inputs: params["embed"][inputs], "params": params, "batch": batch}


def hub_folder(write):
    """Returns `two_blocks`, and makes a folder of the hub in the working directory."""

    def make():
        path = ROOT / "tests" / "pretrained" / "hub_folders.py"
        spec = importlib.util.spec_from_file_location("hub_folders", path)
        folders = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(folders)
        write(folders)
        return two_blocks() | {"np": np}

    return make


def whole_llama(folders):
    hf_config = folders.FOLDERS["llama"]
    folders.write(pathlib.Path("Llama-3.2-1B"), hf_config, folders.tensors_of(hf_config, "bfloat16"))


def part_of_llama(folders):
    tensors = folders.tensors_of(folders.FOLDERS["llama"])
    tensors = {name: x for name, x in tensors.items() if "embed" in name or "q_proj" in name}
    folders.write(pathlib.Path("mine"), {}, tensors)


SUPPLIED = {
    ("finetuning.md", 3): hub_folder(whole_llama),
    ("huggingface.md", 0): hub_folder(whole_llama),
    ("huggingface.md", 1): hub_folder(part_of_llama),
    ("README.md", 1): own_loop,
    ("attention.md", 0): two_blocks,
    ("axes.md", 0): two_blocks,
    ("attention.md", 1): with_params,
    ("overlap.md", 0): two_blocks,
    ("buffers.md", 0): chunked_head,
    ("checkpoints.md", 0): checkpointed,
    ("checkpoints.md", 1): two_blocks,
    ("coming_from.md", 0): two_blocks,
    ("fragmentation.md", 0): two_blocks,
    ("looking_inside.md", 0): two_blocks,
    ("noise_scale.md", 0): trained,
    ("planning.md", 0): two_blocks,
    ("remat.md", 0): rematted,
    ("verification.md", 0): two_blocks,
}


def after_own_loop(names):
    state = jax.device_put(names["state"], names["shardings"])
    _, loss = names["train_step"](state, jax.device_put(names["batch"], zero.batch_sharding(names["mesh"])))
    assert np.isfinite(loss)


def after_readme(names):
    assert np.isfinite(float(names["metrics"].loss))


def after_head(names):
    assert np.isfinite(names["loss_fn"](names["params"], names["batch"]))


def after_several_steps(names):
    batches = jax.tree.map(lambda x: np.stack([x, x]), names["batch"])
    _, metrics = names["several"](names["state"], batches)
    assert metrics.loss.shape == (2,) and np.isfinite(metrics.loss).all()


def after_restore(names):
    assert names["back"].step == 800 and names["back"].extra == {"position": 7}


AFTER = {
    ("README.md", 0): after_readme,
    ("README.md", 1): after_own_loop,
    ("buffers.md", 0): after_head,
    ("checkpoints.md", 0): after_restore,
    ("overlap.md", 0): after_several_steps,
}
WITH_SNIPPETS = [page for page in PAGES if snippets(page)]
QUICK = {"clusters.md", "buffers.md", "noise_scale.md", "quickstart.md", "remat.md"}


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            page.name,
            marks=[pytest.mark.tpu_compiler, pytest.mark.slow]
            if page.name in ("planning.md", "verification.md")
            else []
            if page.name in QUICK
            else pytest.mark.slow,
        )
        for page in WITH_SNIPPETS
    ],
)
def test_snippets_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (page,) = (page for page in WITH_SNIPPETS if page.name == name)
    names = types.ModuleType("snippet").__dict__
    for i, (line, code) in enumerate(snippets(page)):
        if (name, i) in NOT_RUN:
            continue
        names |= SUPPLIED[name, i]() if (name, i) in SUPPLIED else {}
        own_loop.namespace = names
        for text, shorter in {
            '"/runs/': f'"{tmp_path}/runs/',
            "range(10)": "range(2)",
            "steps=1000": "steps=2",
        }.items():
            code = code.replace(text, shorter)
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        AFTER.get((name, i), lambda names: None)(names)
    for tx in names.values():
        if isinstance(tx, optax.GradientTransformation):
            assert_does_not_grow_weights(tx)


def test_a_page_that_trains_on_the_command_line_and_in_python_shows_one_run(tmp_path, monkeypatch):
    """The two have the same `config.json`, but for where the model is from."""
    monkeypatch.chdir(tmp_path)
    pages = [page for page in WITH_SNIPPETS if "zero.Trainer(" in "".join(code for _, code in snippets(page))]
    assert pages
    for page in pages:
        (command,) = re.findall(r"^zero-jax train (--loss .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        code = [code for _, code in snippets(page)]
        made = next(i for i, text in enumerate(code) if "zero.Trainer(" in text)
        (tmp_path / "my.py").write_text("".join(code[:made]))
        names = types.ModuleType("page").__dict__
        exec("".join([*code[:made], code[made].partition("result =")[0]]), names)
        trainer = names["trainer"]
        options = build_parser().parse_args(["train", *shlex.split(command)])
        own = import_own_model(read_own_model(options))
        runs = [prepare(trainer.config, model=trainer.model), prepare(read_config(options), model=own)]
        python, shell = ({**run.saved_config, "model": None} for run in runs)
        assert python == shell


def imported(path):
    """Returns the module of a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_optimizer_of_the_example_shrinks_weights():
    example = imported(ROOT / "examples" / "train_own_model.py")
    assert_does_not_grow_weights(example.tx)
    with pytest.raises(AssertionError):  # the decay after the sign of the learning rate
        assert_does_not_grow_weights(optax.chain(optax.adam(3e-3), optax.add_decayed_weights(1e-4)))


def assert_does_not_grow_weights(tx):
    """Weight decay comes before the sign of the learning rate: without gradients weights stay or shrink."""
    params = {"w": jnp.ones(4)}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert (updates["w"] <= 0).all(), updates


def test_supplied_and_excluded_snippets_exist():
    existing = {(page.name, i) for page in WITH_SNIPPETS for i in range(len(snippets(page)))}
    assert {*SUPPLIED, *AFTER, *NOT_RUN} <= existing
    assert all(NOT_RUN.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
    """Parses the commands of fenced blocks, line by line."""
    parser = build_parser()
    for block in re.findall(
        r"^```(?:sh|bash)?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        for line in re.split(r"[\n;]", block.replace("\\\n", " ")):
            words = shlex.split(line, comments=True) if re.match(r"\s*(\.venv/bin/)?zero-jax [a-z]+( |$)", line) else []
            if words:
                parser.parse_args(words[1:])


_FIELDS = {field.name for field in dataclasses.fields(zero.ZeroConfig)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_text_exist(page):
    """Such as `zero.memory.measure`, or a config field as in config files and option lists."""
    for path in set(re.findall(r"\bzero((?:\.[a-zA-Z_]\w*)+)", page.read_text(encoding="utf-8"))):
        found = zero
        for name in path.split(".")[1:]:
            assert not isinstance(found, types.ModuleType) or hasattr(found, name) or name in _FIELDS, f"zero{path}"
            found = getattr(found, name, None)


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES[1:]], ids=lambda page: page.name)
def test_paths_and_links_exist(page):
    """Such as `tests/test_docs.py`, `scripts/cluster/*.yaml` or `[stages](docs/stages.md)`."""
    text = page.read_text(encoding="utf-8")
    paths = {
        path.rstrip(".") for path in re.findall(r"(?<![\w/])(?:zero_jax|tests|scripts|examples|docs)/[\w./*-]*", text)
    }
    assert not [path for path in sorted(paths) if not [*ROOT.glob(path)]]
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]


def prose(page):
    """Returns the lines of a page that are neither code nor a row of a table, with their numbers."""
    lines, fence = [], None
    for i, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        mark = re.match(r" *(`{3,})", line)
        if fence is None and not mark and not line.lstrip().startswith("|"):
            lines.append((i, line))
        fence = (None if fence and mark[1] == fence else fence or mark[1]) if mark else fence
    return lines


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES], ids=lambda page: page.name)
def test_lines_are_wrapped_at_120_columns(page):
    """Apart from code, tables and a word, such as an address, that is longer by itself."""
    assert not [f"{page.name}:{i}" for i, line in prose(page) if len(line) > 120 and " " in line.strip()]


def words_above_evidence(page):
    """Returns the number of words of a page, without code and tables, above its heading `Evidence`."""
    above = itertools.takewhile(lambda line: line != "## Evidence", (line for _, line in prose(page)))
    return sum(len(line.split()) for line in above)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_short(page):
    """Figures and how they were measured stand under `Evidence`, or on a page of their own."""
    assert words_above_evidence(page) <= 1200


def navigation(caption):
    """Returns the entries of the navigation under a caption."""
    source = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (tree,) = re.findall(rf"^```\{{toctree\}}\n:caption: {caption}\n(.*?)^```$", source, re.MULTILINE | re.DOTALL)
    return [re.sub(r".*<(.*)>", r"\1", line) for line in tree.splitlines() if line and line[0] != ":"]


@pytest.mark.parametrize("name", navigation("How to"))
def test_how_tos_begin_with_when_how_and_cost(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    lead = text.split("\n\n")[1]
    assert re.findall(r"^- \*\*(.*?):\*\*", lead, re.MULTILINE) == ["When", "How", "What it costs"]
    assert len(lead.splitlines()) <= 12


def test_every_page_is_in_the_navigation_once():
    source = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", source, re.MULTILINE | re.DOTALL)
    entries = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    entries = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    notebooks = {f"notebooks/{path.stem}" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert sorted(entries) == sorted({*pages, *notebooks, "api/index", "commands/index", "gallery/index"})


def test_notebooks_have_a_link_to_colab_where_the_repository_has_an_address():
    conf = imported(ROOT / "docs" / "conf.py")
    text = (ROOT / "docs" / "notebooks" / "lora.ipynb").read_text(encoding="utf-8")
    for repository, links in {"": 0, "https://github.com/someone/fork": 1}.items():
        conf.REPOSITORY = repository
        source = [text]
        conf.link_outside(None, "notebooks/lora", source)
        address = "https://colab.research.google.com/github/someone/fork/blob/main/docs/notebooks/lora.ipynb"
        assert source[0].count(address) == links


def test_the_api_lists_what_most_look_for_first():
    conf = imported(ROOT / "docs" / "conf.py")
    names = conf.in_order(conf.package_names()["training"])
    assert names[:3] == ["ZeroConfig", "init_state", "make_train_step"]
    assert names[3:] == sorted(names[3:], key=str.lower)


def test_every_public_name_is_in_the_api_reference():
    conf = imported(ROOT / "docs" / "conf.py")
    packages = conf.package_names()
    assert sorted(name for names in packages.values() for name in names) == sorted(zero.__all__)
    pages = "\n".join(conf.api_page(package, names) for package, names in packages.items())
    documented = set(re.findall(r"^(?:\.\. \S+ )?(zero_jax\.[\w.]+)$", pages, re.MULTILINE))
    assert {f"zero_jax.{name}" for name in zero.__all__} <= documented
    inside = {
        "analysis.memory.measure",
        "analysis.comms.Finding",
        "checkpoint.describe",
        "cluster.join",
        "trainer.train",
    }
    assert {f"zero_jax.{name}" for name in inside} <= documented


def test_code_of_docstrings_is_code():
    lines = ["Does `it`.", "", "    x = f(a, b)", "    y = x", "", "Args:", "  a: one"]
    imported(ROOT / "docs" / "conf.py").code_as_in_markdown(None, "function", "f", None, None, lines)
    assert (
        lines[:5] == ["Does ``it``.", "", ".. code-block:: python", "", "    x = f(a, b)"] and lines[-1] == "  a: one"
    )


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_have_no_outputs(notebook):
    """The site executes them, so outputs are never old."""
    assert code_cells(notebook)
    assert not [cell for cell in code_cells(notebook) if cell["outputs"] or cell["execution_count"]]


def test_the_workflow_publishes_what_the_script_builds():
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text(encoding="utf-8"))["jobs"]["build"][
        "steps"
    ]
    (command,) = [step["run"] for step in steps if "run" in step]
    (upload,) = [step["with"]["path"] for step in steps if "upload-pages-artifact" in step.get("uses", "")]
    script, folder = command.split()
    assert (ROOT / script).stat().st_mode & 0o100 and folder == upload


FRAMEWORKS = {"dict": "plain pytrees", "linen": "Flax Linen", "nnx": "Flax NNX", "equinox": "Equinox", "haiku": "Haiku"}


def rows_of_the_readme(heading):
    """Returns the rows of the table below a heading of the README, as lists of cells."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_table_of_what_runs_is_that_of_the_tests():
    """Models, frameworks, stages and hardware are those that the named modules go through."""
    rows = {row[5].strip("` "): row for row in rows_of_the_readme("What runs")}
    is_imported = lambda name: name not in ("tests/test_examples.py", "tests/models/test_decoder.py")  # noqa: E731
    modules = {name: imported(ROOT / name) for name in filter(is_imported, rows)}
    combined = modules["tests/training/test_combinations.py"].FACTORS
    _, frameworks, stages, *_ = rows["tests/training/test_combinations.py"]
    assert frameworks.split(", ") == list(dict.fromkeys(FRAMEWORKS[name.split()[0]] for name in combined["framework"]))
    assert stages.replace("with secondary shards", "secondary").split(", ") == [
        str(stage) for stage in combined["stage"]
    ]

    verified = modules["tests/verification/test_verify.py"]
    models, frameworks, stages, hardware, *_ = rows["tests/verification/test_verify.py"]
    assert models == "GPT, experts, a table in a loop, convolutions, MLPs" and [*verified.MODELS] == [
        "gpt", "experts", "table", "linen", "nnx", "equinox",
    ]  # fmt: skip
    assert frameworks.split(", ") == [FRAMEWORKS[name] for name in ("dict", "linen", "nnx", "equinox")]
    assert stages == ", ".join(map(str, verified.FACTORS["stage"]))
    topologies = [name.partition(":")[0].replace("tpu7x", "TPU7x") for name in verified.FACTORS["topology"]]
    assert ", ".join(topologies) in hardware

    tests = dir(modules["tests/transforms/gather/test_gather_models.py"])
    _, frameworks, *_ = rows["tests/transforms/gather/test_gather_models.py"]
    found = [FRAMEWORKS[name] for name in FRAMEWORKS if f"test_{name}" in tests]
    assert frameworks.split(", ") == found and len(found) == 4

    configs = imported(ROOT / "tests" / "models" / "transformers_logits.py").CONFIGS.values()
    types_of = {config["model_type"] for config in configs}
    assert set(re.findall(r"[a-z]+\d?(?:_\w+)?(?=,| of)", rows["tests/models/test_decoder.py"][0])) >= types_of
    number = len([*(ROOT / "examples").glob("*.py")])
    assert rows["tests/test_examples.py"][0].startswith(f"{number} examples")


def test_links_of_the_readme_are_absolute_on_an_index():
    """By the substitutions that the build applies to it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 50 and not [link for link in links if not link.startswith(("https://", "#"))]
    repository = project["project"]["urls"]["Repository"]
    assert f"({repository}/raw/main/docs/pictures/stages.png)" in text
    assert f"({repository}/blob/main/docs/stages.md)" in text


def test_every_link_to_the_repository_has_the_address_of_the_project():
    """`[project.urls]` is the place; an address of before, or of a fork, is found."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    owner_and_name = urls["Repository"].removeprefix("https://github.com/")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = done.stdout.split("\0") if done.returncode == 0 else ["README.md", "CITATION.cff", "pyproject.toml"]
    paths = [ROOT / name for name in names if name.endswith((".md", ".toml", ".yml", ".cff", ".py", ".ipynb"))]
    found = [re.findall(r"[\w.-]+/zero[_-]jax\b(?=[/\"'\s)]|$)", line) for path in paths for line in links(path)]
    assert {name for names in found for name in names} == {owner_and_name}


def links(path):
    """Returns the addresses of GitHub, Colab and the like in a file."""
    return re.findall(r"https?://[^\s)>\"']*github[^\s)>\"']*", path.read_text(encoding="utf-8"))


def test_extras_that_pages_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"""(?:zero-jax|["']\.)\[([\w,-]+)\]""", text)
        assert {name for names in named for name in names.split(",")} <= set(extras), page.name
