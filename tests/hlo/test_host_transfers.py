"""Copies between the memory of a device and that of its host, read from the program."""
# ruff: noqa: E501 (lines of a program)

import pytest

from zero_jax import hlo

TEXT = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[4,256])) -> (s32[], f32[4,256]) {
  %p = (s32[], f32[4,256]{1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %host = f32[4,256]{1,0:S(5)} get-tuple-element(%p), index=1
  %zero = s32[] constant(0)
  %in = ((f32[4,256]{1,0:S(5)}, s32[], s32[]), f32[1,256]{1,0}, u32[]{:S(2)}) dynamic-slice-start(%host, %i, %zero), dynamic_slice_sizes={1,256}
  %got = f32[1,256]{1,0} dynamic-slice-done(%in)
  %new = f32[1,256]{1,0} multiply(%got, %got)
  %out = ((f32[4,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[], s32[]), f32[4,256]{1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%host, %new, %i, %zero)
  %put = f32[4,256]{1,0:S(5)} dynamic-update-slice-done(%out)
  ROOT %r = (s32[], f32[4,256]{1,0:S(5)}) tuple(%i, %put)
}

%condition (q: (s32[], f32[4,256])) -> pred[] {
  %q = (s32[], f32[4,256]{1,0:S(5)}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[4,256])) -> f32[8] {
  %a = (s32[], f32[4,256]{1,0:S(5)}) parameter(0)
  %loop = (s32[], f32[4,256]{1,0:S(5)}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %x = f32[8]{0} constant({0,0,0,0,0,0,0,0})
  %away = (f32[8]{0:S(5)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%x)
  %there = f32[8]{0:S(5)} copy-done(%away)
  %on_chip = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[8]{0:S(1)} copy-done(%on_chip)
  ROOT %y = f32[8]{0} add(%x, %x)
}
"""


def test_copies_from_and_to_the_host():
    found = {t.name: (t.to_host, t.sent_bytes, t.total_sent_bytes) for t in hlo.host_transfers(TEXT)}
    assert found == {"in": (False, 1024, 4096), "out": (True, 1024, 4096), "away": (True, 32, 32)}


def test_the_copies_of_a_gpu_are_fusions():
    text = """HloModule m, is_scheduled=true

%read (p: f32[4,256], n: s32[]) -> f32[1,256] {
  %p = f32[4,256]{1,0:S(5)} parameter(0)
  %n = s32[] parameter(1)
  ROOT %s = f32[1,256]{1,0} dynamic-slice(%p, %n, %n), dynamic_slice_sizes={1,256}
}

%write (p: f32[4,256], q: f32[1,256], n: s32[]) -> f32[4,256] {
  %p = f32[4,256]{1,0:S(5)} parameter(0)
  %q = f32[1,256]{1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %u = f32[4,256]{1,0:S(5)} dynamic-update-slice(%p, %q, %n, %n)
}

ENTRY %main (a: f32[4,256], i: s32[]) -> f32[4,256] {
  %a = f32[4,256]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %in = ((f32[4,256]{1,0:S(5)}, s32[]), f32[1,256]{1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%read, backend_config={"dynamic_slice_config":{"loop_index":"0"}}
  %got = f32[1,256]{1,0} fusion-done(%in)
  %out = ((f32[4,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[]), f32[4,256]{1,0:S(5)}, u32[]) fusion-start(%a, %got, %i), kind=kLoop, calls=%write
  ROOT %put = f32[4,256]{1,0:S(5)} fusion-done(%out)
}
"""
    found = {t.name: (t.to_host, t.sent_bytes, t.total_sent_bytes) for t in hlo.host_transfers(text)}
    assert found == {"in": (False, 1024, 1024), "out": (True, 1024, 1024)}
    # XLA:GPU copies by an engine what it knows the offset of, the rest by a kernel.
    assert {t.name: t.is_async for t in hlo.host_transfers(text)} == {"in": True, "out": False}
    seconds = {"in": 3.0, "out": 5.0}
    costs = hlo.Costs(
        instruction=lambda *_: 0.0, collective=lambda collective: 0.0, copy=lambda copy: seconds[copy.name]
    )
    # Nothing runs beside the kernel, a second one neither.
    twice = text.replace("  ROOT %put = ", "  %out.2 = " + text.split("%out = ")[1].split("\n")[0] + "\n  ROOT %put = ")
    seconds["out.2"] = 5.0
    timeline = hlo.play(hlo.parse(twice), (), costs, copies=hlo.host_transfers(twice))
    assert timeline.exposed_seconds == 3 + 5 + 5


def test_of_a_conditional_the_branch_that_moves_most_counts():
    text = """HloModule m, is_scheduled=true

%large (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = (f32[8]{0:S(5)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%p)
  ROOT %b = f32[8]{0:S(5)} copy-done(%a)
}

%small (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %s = f32[2]{0} slice(%q), slice={[0:2]}
  %c = (f32[2]{0:S(5)}, f32[2]{0}, u32[]{:S(2)}) copy-start(%s)
  %d = f32[2]{0:S(5)} copy-done(%c)
  ROOT %e = f32[8]{0} copy(%q)
}

ENTRY %main (i: pred[], x: f32[8]) -> f32[8] {
  %i = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %r = f32[8]{0} conditional(%i, %x, %x), true_computation=%large, false_computation=%small
}
"""
    assert [(t.name, t.total_sent_bytes) for t in hlo.host_transfers(text)] == [("a", 32)]


def test_computation_waits_for_them():
    costs = hlo.Costs(
        instruction=lambda program, instruction: 1.0 if instruction.opcode == "multiply" else 0.0,
        collective=lambda collective: 0.0,
        copy=lambda copy: copy.sent_bytes / 512,
    )
    timeline = hlo.play(hlo.parse(TEXT), (), costs, copies=hlo.host_transfers(TEXT))
    assert timeline.compute_seconds == 4
    assert timeline.exposed_seconds == pytest.approx(4 * (2 + 2) + 32 / 512)
    assert timeline.host_seconds == pytest.approx(4 * 2 + 32 / 512)
    assert timeline.collective_seconds == 0
    assert not timeline.overlaps
