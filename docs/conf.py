"""The site's settings: Sphinx reads the Markdown pages of this folder, and makes the API pages from docstrings."""

import inspect
import json
import os
import pathlib
import re
import sys
import tomllib
import types
from collections.abc import Iterable, Mapping

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import zero_jax
from zero_jax import _MODULES

HERE = pathlib.Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The address of pyproject.toml, or that of the repository whose workflow builds the site; "" while there is none.
REPOSITORY = PROJECT["urls"]["Repository"]
if os.environ.get("GITHUB_REPOSITORY"):
    REPOSITORY = f"https://github.com/{os.environ['GITHUB_REPOSITORY']}"
elif "_NOT_SET" in REPOSITORY:
    REPOSITORY = ""

project = "zero_jax"
author = "the zero_jax authors"
html_title = "zero_jax"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "jupyter_execute", "**/.ipynb_checkpoints", "recorded"]

# Pages. Links to files outside of this folder become links to the repository, where its address is known.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
pygments_dark_style = "github-dark"
highlight_language = "text"  # of fenced blocks that name none: commands and what they print

# Theme: no fonts, scripts or pictures of other hosts.
html_theme = "furo"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_search_scorer = str(HERE / "search_order.js")
# The button copies the commands of a block with prompts, not what they print.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
html_theme_options = {"navigation_with_keys": True}

# Docstrings are Google style, with code in single backticks, as in Markdown (`code_as_in_markdown`).
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_attr_annotations = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_numpy_docstring = False
viewcode_line_numbers = True
# The titles of the API pages, by package.
TITLES = {
    "training": "Train state and train step",
    "sharding": "Meshes, precision, sharding rules",
    "core": "Model state",
    "transforms": "Transforms: gather on use, remat, attention",
    "attention": "Attention",
    "finetuning": "Fine-tuning",
    "pretrained": "Hugging Face checkpoints",
    "analysis": "Memory, traffic, the paper",
    "planning": "Planning",
    "libraries": "Models of Flax and Equinox",
    "verification": "Verification",
    "checkpoint": "Checkpoints",
    "data": "Data",
    "cluster": "Processes",
    "trainer": "The trainer",
}
# What most people look for, first in its list; then by the alphabet.
FIRST = ("ZeroConfig", "init_state", "make_train_step", "Trainer", "TrainConfig", "make_mesh")
COLON = "\ue000"
COLAB = "https://colab.research.google.com/github"
# Constants have no docstrings.
CONSTANTS = {
    "zero_jax.PAPER_CONFIGS": "The paper's configurations C1 to C5 (Table 3) by name, each a ``ZeroConfig``. All "
    "train in bfloat16 and rematerialize every block.",
}


def package_names() -> dict[str, list[str]]:
    """Returns the public names of `zero_jax` by the package that they are from."""
    found: dict[str, list[str]] = {package: [] for package in TITLES}
    for name, module in _MODULES.items():
        origin = module if module != "zero_jax" else f"zero_jax.{name}"
        found.setdefault(origin.split(".")[1], []).append(name)
    return found


def in_order(names: Iterable[str]) -> list[str]:
    """Returns names as the lists of the API have them: those of `FIRST`, then the others by the alphabet."""
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name.lower()))


def is_class_or_function(value: object) -> bool:
    """Returns whether an object has a docstring of its own, unlike constants and aliases of types."""
    return callable(value) and not isinstance(value, types.GenericAlias)


def entry(path: str, value: object) -> str:
    """Returns the directive that documents an object."""
    if inspect.isclass(value):
        members = "" if issubclass(value, BaseException) else "\n   :members:"
        return f".. autoclass:: {path}{members}"
    if callable(value):
        return f".. autofunction:: {path}"
    return f".. py:data:: {path}\n\n   {CONSTANTS[path]}"  # a KeyError: a public constant needs a line there


def api_page(package: str, names: list[str]) -> str:
    """Returns the page of a package: its public names, then the modules among them with theirs."""
    values = {name: getattr(zero_jax, name) for name in in_order(names)}
    lines = [f"# {TITLES[package]}", ""]
    entries = [entry(f"zero_jax.{name}", v) for name, v in values.items() if not isinstance(v, types.ModuleType)]
    for name, module in values.items():
        if not isinstance(module, types.ModuleType):
            continue
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"]
        public = sorted(getattr(module, "__all__", own), key=str.lower)
        public = [n for n in public if n not in zero_jax.__all__ and is_class_or_function(getattr(module, n))]
        title = f"zero_jax.{name}"
        entries += [f"{title}\n{'-' * len(title)}", f".. automodule:: {module.__name__}\n   :no-index:"]
        entries += [entry(f"{module.__name__}.{n}", getattr(module, n)) for n in public]
    lines += ["```{eval-rst}", *("\n\n".join(entries)).splitlines(), "```", ""]
    return "\n".join(lines)


def api_index(packages: dict[str, list[str]]) -> str:
    """Returns the page that lists the public names, each with the first line of its docstring."""
    lines = ["# API reference", "", "`import zero_jax as zero`: these are the names of `zero`, by topic.", ""]
    lines += [
        "Examples use the `init_fn`, `loss_fn`, `tx`, `mesh`, `config`, `state`, `step` and `batch` of the first page,"
    ]
    lines += [
        "an empty `folder`, and of a small decoder its `shape`, a folder of the hub (`hf`) and one of PEFT (`peft`).",
        "",
    ]
    lines += ["```{toctree}", ":hidden:", "", *packages, "```", "", "```{eval-rst}"]
    for package, names in packages.items():
        lines += [f":doc:`{TITLES[package]} <{package}>`", ""]
        for name in in_order(names):
            value = getattr(zero_jax, name)
            path = f"zero_jax.{name}"
            doc = CONSTANTS.get(path) or (inspect.getdoc(value) or "")
            first = re.sub(r"`+([^`]*)`+(\w?)", r"``\1``\\ \2", doc.partition("\n")[0])
            role = f":doc:`{path} <{package}>`" if isinstance(value, types.ModuleType) else f":py:obj:`{path}`"
            lines.append(f"- {role}: {first}")
        lines.append("")
    return "\n".join([*lines, "```", ""])


def write_pages(folder: pathlib.Path, texts: Mapping[str, str]) -> None:
    """Writes pages by name, removes what an earlier build wrote for others; unchanged pages keep their times."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.stem not in texts:
            old.unlink()
    for name, text in texts.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def write_made_pages(*_: object) -> None:
    """Writes the API, a page for each example, and one for each command and each table of a config file."""
    sys.path.insert(0, str(HERE))
    import command_pages
    import example_pages

    packages = {package: names for package, names in package_names().items() if names}
    of_packages = {package: api_page(package, names) for package, names in packages.items()}
    write_pages(HERE / "api", of_packages | {"index": api_index(packages)})
    write_pages(HERE / "gallery", example_pages.pages(HERE / "gallery"))
    write_pages(HERE / "commands", command_pages.pages())


def link_outside(app: object, docname: str, source: list[str]) -> None:
    """Turns links to files outside of `docs/` into links to the repository, or into text where that is not known."""
    to = rf"[\1]({REPOSITORY}/blob/main/\2)" if REPOSITORY else r"\1"
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./(?!docs/)([^)]+)\)", to, source[0])
    if docname.startswith("notebooks/") and REPOSITORY:  # the one place where notebooks get their address
        cells = json.loads(source[0])
        address = f"{REPOSITORY.replace('https://github.com', COLAB)}/blob/main/docs/{docname}.ipynb"
        install = f"`!pip install 'zero-jax @ git+{REPOSITORY}'`"
        cells["cells"][0]["source"] += [f"\n\n[Open it in Colab]({address}); there, run {install} first."]
        source[0] = json.dumps(cells)


def code_as_in_markdown(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Rewrites the code spans and the indented code of a docstring for Sphinx."""

    def literal(found: re.Match[str]) -> str:
        code = re.sub(r"\s+", " ", found[1])
        return f"``{code}``" + (f"\\ {found[2]}" if found[2] else "")  # as in `ShapeDtypeStruct`s

    text = re.sub(r"(?<!`)`([^`]+)`(?!`)(\w)?", literal, "\n".join(lines))
    text = re.sub(r"\n\n(?=    \S)", "\n\n.. code-block:: python\n\n", text)
    if what == "property":  # napoleon takes what is before a colon for its type
        text = text.replace(":", COLON)
    lines[:] = text.split("\n")


def with_colons(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Puts back the colons of properties, after napoleon."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def signature(
    app: object, what: str, name: str, value: object, options: object, args: str | None, returns: str | None
) -> tuple[str, str] | None:
    """Leaves out the signatures of classes that only the library makes."""
    is_private = what == "class" and re.search(r"\b_[A-Z]|<factory>", args or "")
    return ("", "") if is_private else None


def drop_dead_links(app: object, page: str, template: str, context: dict[str, object], doctree: object) -> None:
    """Drops links from source code to what has its documentation elsewhere: viewcode knows one place for a module."""
    if page.startswith("_modules/"):
        known = app.env.domaindata["py"]["objects"]  # type: ignore[attr-defined]
        link = r'<a class="viewcode-back" href="[^"#]*#([^"]*)">\[docs\]</a>'
        context["body"] = re.sub(link, lambda found: found[0] if found[1] in known else "", str(context["body"]))


def setup(app: object) -> None:
    """Connects the functions above to the build."""
    app.connect("builder-inited", write_made_pages)  # type: ignore[attr-defined]
    app.connect("source-read", link_outside)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", code_as_in_markdown, priority=400)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", with_colons, priority=600)  # type: ignore[attr-defined]
    app.connect("autodoc-process-signature", signature)  # type: ignore[attr-defined]
    app.connect("html-page-context", drop_dead_links)  # type: ignore[attr-defined]
