"""What a release needs is there, says one version, and calls commands that exist."""

import pathlib
import re
import tomllib

import pytest
import yaml

import zero_jax

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow):
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        yield from job.get("steps", [])


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert zero_jax.__version__ == PROJECT["version"]
    released = re.search(rf"^## \[{PROJECT['version']}\] - (.*)$", CHANGELOG, re.MULTILINE)[1]
    assert citation["date-released"] == released


def test_the_changelog_has_this_version_or_the_next():
    version, state = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)[0]
    newest, own = (tuple(map(int, x.split("."))) for x in (version, PROJECT["version"]))
    assert newest >= own
    assert state == "unreleased" or newest == own


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_commands_of_the_repository(workflow):
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    paths = re.findall(r"^(\.ci/\w+|scripts/\w+)", "\n".join(commands), re.MULTILINE)
    assert all((ROOT / path).stat().st_mode & 0o111 for path in paths)
    if workflow.name == "ci.yml":
        assert set(paths) == {".ci/run", "scripts/check_wheel"}
    assert all(re.search(r"@v\d+$|@release/v\d+$", step["uses"]) for step in steps(workflow) if "uses" in step)


def test_a_tag_is_published_only_after_the_tests_by_trusted_publishing():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["publish"]["needs"] == "test" and jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert not re.search(r"secrets\.|password", (ROOT / ".github" / "workflows" / "release.yml").read_text())


def test_each_light_extra_is_tried():
    text = (ROOT / "scripts" / "check_wheel").read_text(encoding="utf-8")
    tried = set(re.search(r"extras=\(([a-z ]+)\)", text)[1].split())
    heavy = {"all", "cuda", "cuda12", "tpu", "gpu-compiler", "test", "dev"}
    assert tried <= set(PROJECT["optional-dependencies"]) - heavy
    assert {"train", "plan", "plot", "completion", "parquet", "wandb"} <= tried


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("form", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.name)
def test_issue_forms_have_what_they_need(form):
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert content["name"] and content["description"] and isinstance(content["labels"], list)
    asked = [part for part in content["body"] if part["type"] != "markdown"]
    assert asked and all(part["id"] and part["attributes"]["label"] for part in asked)
    assert any(part.get("validations", {}).get("required") for part in asked)
