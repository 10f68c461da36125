"""The table of published runs: what is asked of `zero-jax`, kept, and shown."""

import json
import subprocess
import types

import published_runs
import pytest

RUN = {
    "name": "a",
    "topology": "v6e:4x4",
    "arguments": "--model gpt-tiny",
    "seconds": 2.0,
    "settings": "",
    "source": "",
}
SETTING = {"remat": "full", "num_microbatches": 2, "replica": 1, "model": 1, "offload": None, "overlap": False}
SEARCH = {"ranking": {"ranked": [{"setting": SETTING, "estimated": {"seconds": 1.0}, "outcome": None}]}}
PROGRAM = {"fits": True, "time": {"step_seconds": 1.5}}


@pytest.fixture
def asked(monkeypatch):
    """The commands that were run; one with a remat policy is a program's."""
    commands = []

    def run(command, **kwargs):
        commands.append(command[3:])
        answer = {"search": SEARCH, "program": PROGRAM}["program" if "--remat" in command else "search"]
        failed = "refused" in command
        return types.SimpleNamespace(returncode=int(failed), stdout="" if failed else json.dumps(answer), stderr="no")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_answers_are_kept_and_programs_compiled_only_when_told_to(tmp_path, asked):
    run, path = published_runs.Run(**RUN), tmp_path / "kept" / "results.json"
    for compiles, cells in ((False, ("0.50", "not compiled", "")), (True, ("0.50", "1.5", "0.75"))):
        row = published_runs.Row.of(run, published_runs.Results(path, again=False), compiles=compiles)
        assert row.figures[-3:] == cells
    assert len(asked) == 2
    options = "plan --topology v6e:4x4 --model gpt-tiny --stage 3 --num-microbatches 2 --remat full --no-overlap"
    assert asked[1] == [*options.split(), "--json"]
    published_runs.Row.of(run, published_runs.Results(path, again=True), compiles=False)
    assert len(asked) == 3


def test_a_search_that_compiles_without_code_says_so(tmp_path, asked, monkeypatch):
    (ranked,) = SEARCH["ranking"]["ranked"]
    monkeypatch.setitem(SEARCH, "ranking", {"ranked": [{**ranked, "outcome": {"seconds": 1.8}}]})
    results = published_runs.Results(tmp_path / "results.json", again=False)
    row = published_runs.Row.of(published_runs.Run(**RUN), results, compiles=False, quick=True)
    assert row.figures[-3:] == ("0.50", "1.8 (quick)", "0.90")
    assert "--quick" in asked[0] and len(asked) == 1


def test_options_ask_for_what_a_search_answers_with():
    setting = {**SETTING, "replica": 2, "attention": "fused", "loss": "sequence_parallel loss_chunk=8192"}
    options = "--replica 2 --num-microbatches 2 --attention fused --remat full --no-overlap"
    assert " ".join(published_runs.options_of(setting)) == f"{options} --sequence-parallel --loss-chunk 8192"


def test_a_command_that_fails_is_no_row_that_does_not_fit(tmp_path, asked):
    run = published_runs.Run(**{**RUN, "arguments": "refused"})
    with pytest.raises(RuntimeError, match="ended with status 1"):
        published_runs.Row.of(run, published_runs.Results(tmp_path / "results.json", again=False), compiles=False)


def test_the_runs_have_sources():
    runs = json.loads(published_runs.RUNS.read_text(encoding="utf-8"))["runs"]
    assert len({published_runs.Run(**run).name for run in runs}) == len(runs) == 19
    assert all(run["source"] and run["seconds"] > 0 for run in runs)
