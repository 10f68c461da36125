"""The search, on a model of memory and time that is simple enough to work out by hand."""

import dataclasses
import itertools
import json
import math
import random
import re

import pytest
from paper_formulas import PAPER_CASES, model_state_bytes

from zero_jax.core.text_tables import format_bytes
from zero_jax.planning.errors import SettingRefused
from zero_jax.planning.ranking import Candidate, Figures
from zero_jax.planning.search import Search, candidates


def settings_of(num_devices=8, num_slices=1, **choices):
    choices = {"stage": (0, 1, 2, 3), "batch_size": (32,), **choices}
    return candidates(choices, num_devices=num_devices, num_slices=num_slices)


STAGES = dict(enumerate(PAPER_CASES.values()))


def estimate(setting):
    """1.6 billion params: 25.6 GB unsharded; 0.5 GB an example of a microbatch; microbatches and gathers take time."""
    states = sum(model_state_bytes(1.6e9, sharded=STAGES[setting.stage], num_devices=setting.data).values())
    residuals = 0.5e9 * setting.batch_size // (setting.replica * setting.data * setting.num_microbatches)
    seconds = 1 + 0.1 * setting.num_microbatches + (0.5 if setting.stage == 3 else 0)
    return Figures(
        bytes=states + residuals,
        seconds=seconds,
        note=f"{format_bytes(states, decimals=1)} of model state",
    )


def as_estimated(setting):
    got = estimate(setting)
    return Figures(fits=True, bytes=got.bytes, seconds=got.seconds)


class Compiler:
    """Compiles by a function of settings and takes down what it was asked for."""

    def __init__(self, outcome=as_estimated):
        self.asked, self.outcome = [], outcome

    def __call__(self, setting):
        self.asked.append(setting)
        return self.outcome(setting)


def run(settings=None, *, compiler=None, capacity_bytes=16e9, estimate=estimate, fallback=(), **options):
    settings = settings_of() if settings is None else settings
    search = Search(estimate=estimate, compile=compiler or Compiler(), capacity_bytes=capacity_bytes, **options)
    return search.run(settings, fallback)


# Candidates.


def test_candidates_multiply_up_and_divide():
    found = settings_of(num_devices=8, batch_size=(48,), remat=("full", "dots"), num_microbatches=range(1, 5))
    assert len(set(found)) == len(found)
    for s in found:
        assert s.replica * s.data * s.model == 8 and 48 % (s.replica * s.data * s.num_microbatches) == 0
        assert s.num_microbatches in (1, 2, 3)  # the divisors of 6 up to 4
    # Stage 0 has no replicas; the others shard over 2, 4 or 8 devices; 3 counts of microbatches, 2 policies. Stage 2
    # without microbatches is the program of stage 1.
    assert len(found) == (1 + 3 * 3) * 3 * 2 - 3 * 2
    assert {s.stage for s in found if s.num_microbatches == 1} == {0, 1, 3}


def test_candidates_keep_experts_sharded_where_params_are():
    found = settings_of(num_devices=8, batch_size=(8,), stage=(2, 3), experts=(False, True))
    assert {(s.stage, s.experts) for s in found} == {(2, False), (3, False), (3, True)}


def test_candidates_of_one_device_and_of_the_model_axis():
    assert {(s.stage, s.replica, s.data) for s in settings_of(num_devices=1, batch_size=(1,))} == {
        (0, 1, 1),
        (3, 1, 1),
    }
    assert {s.stage for s in settings_of(num_devices=1, batch_size=(1,), stage=(2, 1))} == {2}
    found = settings_of(num_devices=8, batch_size=(8,), model=(1, 2, 3, 4), stage=(3,))
    assert {s.model for s in found} == {1, 2, 4}  # 8 devices do not split into 3
    assert {s.data * s.replica for s in found if s.model == 4} == {2}


def test_candidates_of_a_pipeline_have_microbatches_for_each_stage():
    space = {"num_slices": 2, "batch_size": (16,), "pipeline": ("gpipe", "1f1b"), "secondary": (False, True)}
    found = settings_of(**space, pipe=(1, 2, 3, 4))
    staged = [s for s in found if s.pipe > 1]
    assert {(s.pipe, s.pipeline) for s in staged} == {(2, "gpipe"), (2, "1f1b"), (4, "gpipe"), (4, "1f1b")}
    assert all(s.replica * s.data * s.pipe == 8 and s.num_microbatches % s.pipe == 0 for s in staged)
    assert {s.num_microbatches for s in staged if s.pipe == 4} == {4, 8}
    assert not any(s.secondary for s in staged)
    assert {s.pipeline for s in found if s.pipe == 1} == {"gpipe"}
    assert "data=2 pipe=4 microbatches=8 remat=full 1f1b" in " ".join(map(str, staged))
    with pytest.raises(ValueError, match="pipe=3 does not divide num_devices=8"):
        settings_of(**space, pipe=(3,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_devices": 8, "batch_size": (12,)}, "batch_size=8 or 16"),
        ({"num_devices": 8, "batch_size": (4,)}, "try batch_size=8$"),
        ({"num_devices": 8, "batch_size": (8,), "model": (3,)}, "try model=1"),
        ({"num_devices": 0, "batch_size": (8,)}, "positive"),
        ({"num_devices": 8, "batch_size": (8,), "stage": (4,)}, "unknown ZeRO stage"),
        ({"num_devices": 8, "batch_size": (8,), "replica": (3,)}, r"with replica in \(3,\)"),
    ],
)
def test_candidates_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**fields)


# Search.


def test_prunes_by_estimate_and_says_by_how_much():
    compiler = Compiler()
    got = run(compiler=compiler, capacity_bytes=16e9)
    reasons = {entry.setting: entry.reason for entry in got.rejected}
    # Stage 0: 16 bytes x 1.6e9 + 4 examples of 0.5 GB.
    assert reasons[Candidate(stage=0, data=8, batch_size=32)] == (
        "needs 27.6 GB (25.6 GB of model state), 16.0 GB usable: short of 11.6 GB"
    )
    assert not any(setting in reasons for setting in compiler.asked)
    everything = {entry.setting for entry in (*got.ranked, *got.rejected)}
    assert everything == set(settings_of())
    assert all(estimate(entry.setting).bytes <= 16e9 for entry in got.ranked)
    assert all(estimate(entry.setting).bytes > 16e9 for entry in got.rejected)


def test_compiles_the_fastest_and_ranks_by_the_compiler():
    # The compiler finds what looks second best to be the fastest.
    compiled_seconds = itertools.chain([3.0, 2.0], itertools.repeat(4.0))
    compiler = Compiler(lambda s: Figures(fits=True, bytes=1e9, seconds=next(compiled_seconds)))
    got = run(compiler=compiler, max_compiles=3)
    asked = [estimate(setting).seconds for setting in compiler.asked]
    assert asked == sorted(asked) and len(asked) == 3
    assert asked[-1] <= min(entry.seconds for entry in got.ranked if not entry.outcome)
    assert got.best == compiler.asked[1]
    assert [entry.seconds for entry in got.ranked[:3]] == [2.0, 3.0, 4.0]
    rest = [entry.seconds for entry in got.ranked[3:]]
    assert rest == sorted(rest) and all(entry.outcome is None for entry in got.ranked[3:])
    assert got.num_compiled == 3


def is_plain(setting):
    return setting.replica == 1


def test_the_plain_setting_is_the_control():
    # The fastest by estimate, with replicas, is compiled second; the control is the fastest plain one.
    for max_compiles in (1, 2):
        compiler, lines = Compiler(), []
        run(compiler=compiler, max_compiles=max_compiles, is_plain=is_plain, log=lines.append)
        assert compiler.asked[0] == Candidate(stage=1, data=8, batch_size=32)
        assert f"compiling 1 of at most {max_compiles}: {compiler.asked[0]}, the plain setting, as a control" in lines
        assert len(compiler.asked) == max_compiles


def test_the_next_plain_setting_is_the_control_where_the_compiler_refuses_the_first():
    compiler = Compiler(lambda s: Figures(fits=s.stage == 3, bytes=1e9 if s.stage == 3 else 99e9, seconds=1))
    got = run(compiler=compiler, max_compiles=4, is_plain=is_plain)
    (control,) = [setting for setting in compiler.asked if setting.stage == 3 and is_plain(setting)][:1]
    assert control.num_microbatches == 1  # of all that fit, the fewest microbatches
    assert all(is_plain(setting) for setting in compiler.asked[: compiler.asked.index(control)])
    assert got.best.stage == 3


def test_the_next_plain_setting_is_one_that_fits_by_what_is_compiled():
    def estimate(setting):
        return Figures(bytes={1: 15e9, 2: 13e9, 4: 8e9}[setting.num_microbatches], seconds=setting.num_microbatches)

    compiler = Compiler(lambda s: Figures(fits=(x := 1.5 * estimate(s).bytes) <= 16e9, bytes=x, seconds=1.0))
    settings = settings_of(stage=(3,), replica=(1,))
    run(settings, compiler=compiler, estimate=estimate, max_compiles=4, is_plain=is_plain)
    # Of 2 microbatches the estimate is 13 GB, which by the first program, of 22.5 GB, are 19.5.
    assert [x.num_microbatches for x in compiler.asked][:2] == [1, 4]


@pytest.mark.parametrize("seed", range(20))
def test_no_compiled_setting_is_faster_than_the_best(seed):
    draw = random.Random(seed)

    def outcome(setting):
        unknown = draw.random() < 0.2
        return Figures(fits=draw.random() < 0.7, bytes=1e9, seconds=math.inf if unknown else draw.lognormvariate(0, 2))

    compiler = Compiler(outcome)
    got = run(compiler=compiler, max_compiles=8, is_plain=is_plain)
    compiled = {x.setting: x.outcome.seconds for x in got.ranked if x.outcome}
    assert set(compiled) <= set(compiler.asked) and is_plain(compiler.asked[0])
    if known := [seconds for seconds in compiled.values() if seconds < math.inf]:
        assert compiled[got.best] == min(known)
    # Compiled settings come first, and their times are never those of an estimate.
    assert [bool(x.outcome) for x in got.ranked] == [True] * len(compiled) + [False] * (len(got.ranked) - len(compiled))
    assert all(x.seconds == x.outcome.seconds for x in got.ranked[: len(compiled)])


def test_the_next_setting_is_chosen_by_corrected_estimates():
    # No remat takes ten times as long as estimated: after one such program the others of its kind are not tried.
    def estimate(setting):
        return Figures(bytes=1e9, seconds=1.0 if setting.remat == "none" else 2.0 + setting.num_microbatches)

    def outcome(setting):
        return Figures(fits=True, bytes=1e9, seconds=estimate(setting).seconds * (10 if setting.remat == "none" else 1))

    compiler = Compiler(outcome)
    settings = settings_of(stage=(3,), remat=("none", "full"))
    plain = lambda setting: setting.remat == "full" and is_plain(setting)  # noqa: E731
    got = run(settings, compiler=compiler, estimate=estimate, max_compiles=3, is_plain=plain)
    assert [setting.remat for setting in compiler.asked] == ["full", "none", "full"]
    assert got.best.remat == "full" and got.ranked[0].seconds == 3.0
    rest = [entry for entry in got.ranked if not entry.outcome]
    assert all(x.corrected_seconds and x.seconds == x.corrected_seconds for x in rest)
    assert all(x.seconds > 5 for x in rest if x.setting.parts == compiler.asked[1].parts)
    text = str(got)
    assert "estimate, corrected" in text
    ranks = [line.split()[0] for line in text.splitlines() if line.lstrip()[:2].strip().isdigit()]
    assert ranks == ["1", "2", "3"]  # estimates have no rank beside what is compiled


def test_goes_on_when_the_compiler_says_no():
    # The fastest, stage 2 over 8 devices in one microbatch, needs 3.2 + 2.8 + 2.0 = 8 GB by estimate, and 17.6 really.
    def outcome(setting):
        needed = 2.2 * estimate(setting).bytes
        return Figures(fits=needed <= 16e9, bytes=needed, seconds=1.0)

    compiler = Compiler(outcome)
    got = run(compiler=compiler, max_compiles=6)
    assert got.best is not None and 2.2 * estimate(got.best).bytes <= 16e9
    first = compiler.asked[0]
    reason = next(entry.reason for entry in got.rejected if entry.setting == first)
    assert reason.startswith("compiled, needs ") and "16.0 GB usable: short of" in reason
    # After a setting that is too large, none is compiled that needs more by estimate.
    sizes = [estimate(setting).bytes for setting in compiler.asked]
    failed = [size for size in sizes if 2.2 * size > 16e9]
    assert failed == sorted(set(failed), reverse=True)
    passed = [entry for entry in got.rejected if entry.kind == "passed over"]
    assert passed and all("needs no less by estimate than" in entry.reason for entry in passed)
    assert len({*got.ranked, *got.rejected}) == len(settings_of())


def test_the_last_compile_goes_to_the_smallest():
    compiler = Compiler(lambda s: Figures(fits=False, note="crashed"))
    got = run(compiler=compiler, max_compiles=3)
    fitting = [estimate(s).bytes for s in settings_of() if estimate(s).bytes <= 16e9]
    assert estimate(compiler.asked[-1]).bytes == min(fitting)
    assert got.best is None and got.nearest is None and got.ranked
    assert "none of 3 compiled settings came out" in str(got) and "allow more compiles" in str(got)


def test_what_is_left_to_compile_is_likely_to_fit_and_not_the_smallest():
    compiler = Compiler(lambda s: Figures(fits=(x := 2.2 * estimate(s).bytes) <= 16e9, bytes=x, seconds=1.0))
    settings = settings_of()
    run(settings, compiler=compiler, max_compiles=2)
    first, last = map(estimate, compiler.asked)
    assert first.bytes * 2.2 > 16e9 >= last.bytes * 2.2
    known = [estimate(x) for x in settings if 2.2 * estimate(x).bytes <= 0.85 * 16e9]
    assert last.seconds == min(x.seconds for x in known)


def test_settings_that_keep_what_fits_stay_where_another_is_too_large():
    def estimate(setting):
        bounded = setting.remat == "auto"
        return Figures(bytes=15e9 if bounded else 9e9, seconds=2.0 if bounded else 1.0, fills=bounded)

    compiler = Compiler(lambda s: Figures(fits=s.remat == "auto", bytes=15e9 if s.remat == "auto" else 20e9, seconds=2))
    settings = settings_of(stage=(3,), replica=(1,), remat=("full", "auto"))
    got = run(settings, compiler=compiler, estimate=estimate, max_compiles=2)
    assert [x.remat for x in compiler.asked] == ["full", "auto"] and got.best == compiler.asked[1]


@pytest.mark.parametrize("name", ["replica", "loss"])
def test_what_is_nearly_compiled_already_comes_later(name):
    first, other = {"replica": (1, 2), "loss": ("", "chunked")}[name]
    seconds = {("full", first): 1.0, ("full", other): 1.01, ("dots", first): 1.03, ("none", first): 1.2}

    def estimate(setting):
        return Figures(bytes=1e9, seconds=seconds.get((setting.remat, getattr(setting, name)), 9.0))

    remats = ("full", "dots", "none")
    tried = {"replica": (1,), "remat": remats, name: (first, other)}
    settings = settings_of(num_devices=8, batch_size=(8,), stage=(3,), **tried)
    compiler = Compiler(lambda s: Figures(fits=True, bytes=1e9, seconds=estimate(s).seconds))
    run(settings, compiler=compiler, estimate=estimate, max_compiles=3)
    asked = [(x.remat, getattr(x, name)) for x in compiler.asked]
    assert asked == [("full", first), ("dots", first), ("full", other)]


def test_a_crash_is_an_outcome():
    def outcome(setting):
        if setting.num_microbatches == 1:
            raise RuntimeError("INTERNAL: segfault in a pass")
        return as_estimated(setting)

    got = run(compiler=Compiler(outcome))
    assert got.best is not None and got.best.num_microbatches > 1
    (crashed, *_) = [entry for entry in got.rejected if entry.kind == "failed"]
    assert crashed.reason == "compiling failed: RuntimeError: INTERNAL: segfault in a pass"
    with pytest.raises(KeyboardInterrupt):
        run(compiler=Compiler(lambda s: (_ for _ in ()).throw(KeyboardInterrupt)))


def test_the_fastest_are_compiled_to_the_end():
    """The first compile stops early: by it the fastest are a, b, c; at the end a is refused, and b is slower than c."""
    first = run(max_compiles=3)
    a, b, c = (entry.setting for entry in first.ranked[:3])
    seconds = {a: [1.0, None], b: [1.1, 1.4], c: [1.2, 1.3]}

    def outcome(setting):
        now = seconds[setting][min(compiler.asked.count(setting), 2) - 1]
        return Figures(
            fits=now is not None, bytes=1e9, seconds=now or math.inf, note="" if now else "no room on the chip"
        )

    compiler, said = Compiler(outcome), []
    found = run([a, b, c], compiler=compiler, max_compiles=3, needs_end=lambda x: compiler.asked.count(x) < 2,
                log=said.append)  # fmt: skip
    assert compiler.asked[3:] == [a, b, c]
    assert found.best == c and [entry.setting for entry in found.ranked] == [c, b]
    assert [(entry.setting, entry.kind) for entry in found.rejected] == [(a, "failed")]
    assert found.num_compiled == 3 and f"compiling to the end, for an exact time (quick leaves it out): {a}" in said
    # What is still the fastest by its last compile is not compared with others.
    compiler = Compiler(lambda x: Figures(fits=True, bytes=1e9, seconds={a: 1.0, b: 1.1, c: 1.2}[x]))
    again = run([a, b, c], compiler=compiler, max_compiles=3, needs_end=lambda x: compiler.asked.count(x) < 2)
    assert again.best == a and compiler.asked.count(a) == 2 and len(compiler.asked) == 4


def test_a_search_that_is_ended_early_has_a_result():
    asked = []

    def stopped(setting):
        asked.append(setting)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return as_estimated(setting)

    got = run(compiler=Compiler(stopped))
    assert got.was_stopped and got.num_compiled == 2 and got.best in asked[:2]
    assert {x.setting for x in got.ranked if x.outcome} == {*asked[:2]} and asked[2] in {x.setting for x in got.ranked}
    assert f"not compiled: {len(got.ranked) - 2} settings that fit by estimate" in str(got)
    assert "the search was stopped" in str(got)


def test_without_compiling():
    compiler = Compiler()
    got = run(compiler=compiler, max_compiles=0)
    assert not compiler.asked and got.num_compiled == 0
    assert got.best == min(got.ranked, key=lambda entry: entry.seconds).setting
    assert "(by estimate, not compiled)" in str(got)


def test_estimates_that_refuse():
    def refuse(setting):
        if setting.stage < 3:
            raise SettingRefused("the flux capacitor needs stage 3")
        return estimate(setting)

    got = run(estimate=refuse)
    assert got.best is not None and got.best.stage == 3
    assert {entry.reason for entry in got.rejected if entry.kind == "invalid"} == {"the flux capacitor needs stage 3"}
    text = str(got)
    # One line for all, then one for each.
    assert text.count("the flux capacitor needs stage 3") == 1
    with pytest.raises(ValueError, match="has to be in bytes and seconds"):
        run(estimate=lambda s: Figures(bytes=float("nan"), seconds=1))


def test_nothing_fits():
    got = run(capacity_bytes=2.5e9)
    assert got.best is None and not got.ranked and got.num_compiled == 0
    # Least: stage 3 over 8 devices, 25.6 / 8 = 3.2 GB and one example of 0.5 GB.
    assert got.nearest.setting == Candidate(stage=3, data=8, batch_size=32, num_microbatches=4)
    assert got.nearest.missing_bytes == pytest.approx(1.2e9)
    # With twice the devices 1.6 + 0.5 GB, in 2 microbatches of one example.
    devices, memory = got.nearest.remedies
    assert devices == "8 devices more (16 in all)"
    assert memory == "devices with at least 3.7 GB of usable memory"
    text = str(got)
    assert text.startswith("nothing fits; nearest: stage 3 data=8 microbatches=4 remat=full, short of 1.2 GB.")
    assert "  - 8 devices more" in text


def test_the_fallback_is_tried_where_nothing_fits():
    settings = settings_of(stage=(2, 3))
    fallback = settings_of(stage=(2,), offload=("state",))

    def smaller(setting):
        found = estimate(setting)
        return dataclasses.replace(found, bytes=found.bytes / 8, host_bytes=5e9) if setting.offload else found

    assert run(settings, fallback=fallback, estimate=smaller).best.offload is None
    got = run(settings, fallback=fallback, estimate=smaller, capacity_bytes=2.5e9)
    assert got.best.offload == "state" and {entry.setting.offload for entry in got.ranked} == {"state"}
    assert {x.setting for x in (*got.ranked, *got.rejected)} == {*settings, *fallback}
    title, _, table = str(got).partition("settings that fit, all with ")[2].partition("\nrank")
    assert title == "stage 2 remat=full offload=state"
    assert table.splitlines()[0].split() == ["setting", "GB", "host", "GB", "s/step", "estimated", "by"]
    # The compiler finds what was estimated to fit too large.
    compiler = Compiler(lambda s: Figures(fits=bool(s.offload), bytes=1e9 if s.offload else 99e9, seconds=1.0))
    got = run(settings, fallback=fallback, estimate=smaller, compiler=compiler, max_compiles=100)
    assert got.best.offload == "state" and [s.offload for s in compiler.asked].index("state") > 0
    got = run(settings, fallback=fallback, estimate=smaller, compiler=compiler, max_compiles=1)
    assert got.num_compiled == 1 and got.best is None and "allow more compiles" in str(got)


def test_what_exceeds_the_memory_of_the_hosts_is_not_proposed():
    settings = settings_of(stage=(2,), num_microbatches=(1,))
    fallback = settings_of(stage=(2,), offload=("optimizer", "state"))

    def smaller(setting):
        """In host memory 24 GB over the devices that the state is sharded over, or 16 GB of them."""
        found, size = estimate(setting), {"state": 24e9, "optimizer": 16e9}.get(setting.offload, 0)
        return dataclasses.replace(found, bytes=found.bytes / (8 if size else 1), host_bytes=size / setting.data)

    options = {"fallback": fallback, "estimate": smaller, "capacity_bytes": 2.5e9}
    unbounded = run(settings, **options)
    assert unbounded.best.offload and "host memory for each device: not known, nothing bounds it" in str(unbounded)
    got = run(settings, **options, host_capacity_bytes=2.5e9)
    assert got.best.offload == "optimizer" and all(x.figures.host_bytes <= 2.5e9 for x in got.ranked)
    assert {x.setting.offload for x in got.rejected if x.kind == "host"} == {"optimizer", "state"}
    assert re.search(r"offload=state +12.0 +9.5  host memory", str(got))
    assert "host memory for each device: 2.50 GB are assumed" in str(got)
    # None: the one that is short of the least, on its device or on its host, and what would do.
    none = run(settings, **options, host_capacity_bytes=1.9e9)
    assert none.best is None and none.nearest.setting.offload == "optimizer"
    assert none.nearest.missing_bytes == pytest.approx(0.1e9)
    first, *_, hosts = none.nearest.remedies
    assert first == "8 devices more (16 in all)" and hosts == "hosts with at least 2.0 GB of memory for each device"
    # The program needs more of it than was estimated.
    compiler = Compiler(lambda s: Figures(fits=True, bytes=1e9, seconds=1.0, host_bytes=smaller(s).host_bytes + 1e9))
    got = run(settings, **options, compiler=compiler, host_capacity_bytes=2.5e9)
    assert got.best is None and {x.kind for x in got.rejected if x.outcome} == {"host"}


def test_nearest_miss_names_smaller_microbatches_and_batches():
    # Only one microbatch is tried: 3.2 + 4 x 0.5 GB.
    settings = settings_of(num_microbatches=range(1, 2))
    got = run(settings, capacity_bytes=4.5e9)
    assert got.nearest.missing_bytes == pytest.approx(0.7e9)
    remedies = got.nearest.remedies
    assert remedies[1] == "2 microbatches" and remedies[2] == "a batch of 16 in 1 microbatch"
    for words, setting in (
        ("2 microbatches", Candidate(stage=3, data=8, batch_size=32, num_microbatches=2)),
        ("a batch of 16", Candidate(stage=3, data=8, batch_size=16)),
    ):
        assert estimate(setting).bytes <= 4.5e9, words


def test_nearest_miss_of_the_compiler_counts_what_the_estimate_missed():
    # 10 GB that no estimate knows of: nothing fits on 12 GB, though 3.7 GB are estimated.
    compiler = Compiler(lambda s: Figures(fits=False, bytes=estimate(s).bytes + 10e9))
    got = run(compiler=compiler, capacity_bytes=12e9)
    assert got.best is None
    assert got.nearest.missing_bytes == pytest.approx(1.7e9)
    assert got.nearest.setting == Candidate(stage=3, data=8, batch_size=32, num_microbatches=4)
    # On 16 devices 25.6 / 16 + 0.5 + 10 = 12.1 GB, on 24 devices 11.6.
    assert got.nearest.remedies[0] == "16 devices more (24 in all, with a batch of 96)"
    assert got.nearest.remedies[-1] == "devices with at least 13.7 GB of usable memory"


def test_prints_ranking_and_every_rejected_setting():
    got = run(capacity_bytes=16e9)
    text = str(got)
    assert text.startswith(f"best: {got.best}\n")
    shown, below = got.ranked[:10], got.ranked[10:]
    assert "\nsettings that fit, all with remat=full\n" in text  # the rows have what differs
    for entry in shown:
        assert f"  {str(entry.setting).removesuffix(' remat=full')} " in text
    assert below and f"... and {len(below)} more that fit by estimate and rank below" in text
    assert text.count("compiler") == 6
    rejected = text[text.index("rejected (") :]
    # Settings that differ in microbatches share a line: 4, 2 and 1 examples beside 25.6 GB.
    assert re.search(r"\n  stage 0 data=8 microbatches=1,2,4 remat=full +26.1 to 27.6 +10.1  estimate", rejected)
    short = [float(x) for x in re.findall(r" ([0-9.]+)  estimate", str(run(capacity_bytes=9e9)).split("rejected (")[1])]
    assert short == sorted(short) and len(short) > 3
    for entry in got.rejected:
        s = entry.setting
        line = next(line for line in rejected.splitlines() if f"stage {s.stage} " in line and f"data={s.data} " in line)
        assert str(s.num_microbatches) in line
    data = json.loads(json.dumps(got.to_json()))
    assert data["best"]["stage"] == got.best.stage and len(data["rejected"]) == len(got.rejected)


def test_of_many_rejected_settings_the_nearest_are_printed():
    """A search tries thousands: those of one reason are not all listed, nor all that are too large."""
    settings = settings_of(remat=[f"policy{i}" for i in range(30)])

    def refuse(setting):
        if setting.stage == 0:
            raise SettingRefused("stage 0 is too old")
        return estimate(setting)

    got = run(settings, estimate=refuse, capacity_bytes=1e9)
    text = str(got)
    assert len(got.rejected) > 800 and len(text.splitlines()) < 80
    assert "stage 0 is too old:" in text and len(re.findall(r"\.\.\. and [0-9,]+ more", text)) == 2
    assert str(got.nearest.setting).split(" remat")[0].split(" microbatches")[0] in text.split("rejected (")[1]


def test_sizes_of_small_models_are_in_megabytes():
    small = lambda setting: dataclasses.replace(estimate(setting), bytes=estimate(setting).bytes / 1e4)  # noqa: E731
    text = str(run(estimate=small, max_compiles=0))
    assert re.search(r"^rank  setting +MB  s/step", text, re.MULTILINE) and " 0.0 " not in text
    assert re.search(r"^rank  setting +GB  s/step", str(run(max_compiles=0)), re.MULTILINE)


def test_search_refuses():
    with pytest.raises(ValueError, match="give settings"):
        run(())


def test_of_several_batch_sizes_the_one_of_most_examples_a_second_is_the_best():
    # A step of 64 examples takes 1.5 times as long as one of 32.
    def estimate(setting):
        return Figures(bytes=1e9, seconds=1.5 if setting.batch_size == 64 else 1.0)

    settings = settings_of(num_devices=8, batch_size=(32, 64), stage=(3,))
    compiler = Compiler(lambda setting: Figures(fits=True, bytes=1e9, seconds=estimate(setting).seconds))
    got = run(settings, compiler=compiler, estimate=estimate, max_compiles=2)
    assert got.best.batch_size == 64 and [x.batch_size for x in compiler.asked] == [64, 64]
    assert str(got).startswith(f"best: batch=64 {got.best}")
