"""Steps written by hand, whose time follows from their order."""

import pytest

from moelib.planning.estimate.candidates import Mesh
from moelib.planning.estimate.links import Links
from moelib.planning.hardware.topologies import describe
from moelib.planning.hlo.program import parse
from moelib.planning.hlo.source import SourceMap
from moelib.planning.report.timeline import play

MESH = {"fsdp": 2, "expert": 2}
# An all-gather of 2^20 bf16 over two devices sends 2^20 bytes over a v6e's link of 100 GB/s.
SENT = 2**20 / 100e9 + 1e-6
CYCLES = 1.75e9
OVER_FSDP, OVER_EXPERT = "replica_groups={{0,2},{1,3}}", "replica_groups={{0,1},{2,3}}"


def _compute(name, operand, seconds):
    estimate = f'backend_config={{"estimated_cycles":"{round(seconds * CYCLES)}"}}'
    return f"  %{name} = f32[8]{{0}} negate(%{operand}), {estimate}"


def _gather(name, operand, groups):
    shapes = "(bf16[524288]{0}, bf16[1048576]{0})"
    return f"  %{name} = {shapes} all-gather-start(%{operand}), {groups}, dimensions={{0}}"


def _done(name, operand):
    return f"  %{name} = bf16[1048576]{{0}} all-gather-done(%{operand})"


def _play(lines, others="", shares=None):
    body = "\n".join(lines)
    text = f"HloModule step\n\n{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n"
    text += f"  %p = f32[8]{{0}} parameter(0)\n{body}\n}}\n"
    topology = describe("v6e:2x2")
    links = Links(topology, Mesh(tuple(MESH.items())))
    return play(parse(text, shares), MESH, links, topology.accelerator, SourceMap(text))


def test_a_gather_waits_for_what_its_computation_does_not_cover():
    half = SENT / 2
    found = _play([_gather("g", "p", OVER_FSDP), _compute("c", "p", half), _done("d", "g")])
    assert found.seconds == pytest.approx(SENT, rel=1e-3)
    assert found.compute == pytest.approx(half, rel=1e-3)
    ((wait, seconds),) = found.waits.items()
    assert (wait.kind, wait.axes, wait.asynchronous) == ("all-gather", ("fsdp",), True)
    assert seconds == pytest.approx(half, rel=1e-3)


def test_a_gather_under_enough_work_does_not_wait():
    lines = [_gather("g", "p", OVER_FSDP), _compute("c", "p", 2 * SENT), _done("d", "g")]
    found = _play(lines)
    assert found.seconds == pytest.approx(2 * SENT, rel=1e-3)
    assert not found.waits


@pytest.mark.parametrize(("second", "times"), [(OVER_FSDP, 2), (OVER_EXPERT, 1)])
def test_gathers_over_one_axis_share_its_links(second, times):
    lines = [_gather("g", "p", OVER_FSDP), _gather("h", "p", second)]
    found = _play([*lines, _done("d", "g"), _done("e", "h")])
    assert found.seconds == pytest.approx(times * SENT, rel=1e-3)


def test_a_synchronous_collective_is_a_wait():
    shape = "bf16[1048576]{0} all-reduce(%p)"
    found = _play([f"  %r = {shape}, {OVER_FSDP}, to_apply=%add"])
    ((wait, seconds),) = found.waits.items()
    assert not wait.asynchronous
    # A ring sends an array twice, less its own part: half of it, twice.
    assert seconds == pytest.approx(2 * 2**20 / 100e9 + 1e-6, rel=1e-3) == found.seconds


def test_a_collective_of_a_sparse_core_begins_with_its_data():
    other = (
        "%sent (q: f32[8]) -> bf16[1048576] {\n"
        "  %q = f32[8]{0} parameter(0)\n"
        f"  ROOT %g = bf16[1048576]{{0}} all-gather(%q), {OVER_FSDP}, dimensions={{0}}\n}}\n"
    )
    lines = [
        "  %s = ((), ()) custom-call-start(), called_computations={%sent}",
        _compute("before", "p", SENT),
        "  %u = ((), ()) custom-call-update(%s, %before)",
        "  %d = bf16[1048576]{0} custom-call-done(%u)",
    ]
    assert _play(lines, other).seconds == pytest.approx(2 * SENT, rel=1e-3)


def test_a_fusion_that_reduces_and_scatters_is_a_wait():
    other = (
        "%all-reduce-scatter (q: bf16[1048576]) -> bf16[524288] {\n"
        "  %q = bf16[1048576]{0} parameter(0)\n  %i = s32[] constant(0)\n"
        f"  %r = bf16[1048576]{{0}} all-reduce(%q), {OVER_FSDP}, to_apply=%add\n"
        "  ROOT %s = bf16[524288]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={524288}\n}\n"
    )
    fusion = "  %f = bf16[524288]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter"
    found = _play([fusion], other)
    # Of 2^20 bf16, each of two devices sends half: 2^20 bytes.
    assert found.seconds == pytest.approx(SENT, rel=1e-3)
    assert [(wait.kind, wait.asynchronous) for wait in found.waits] == [("reduce-scatter", False)]


def test_a_transfer_between_slices_takes_the_network_of_a_device():
    ends = '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"'
    shape = "(f32[262144]{0}, u32[], token[])"
    lines = [
        "  %t = token[] after-all()",
        f"  %s = {shape} send(%p, %t), frontend_attributes={{{ends}}}",
        f"  %r = {shape} recv(%t), frontend_attributes={{{ends}}}",
        "  %e = token[] send-done(%s)",
        "  %d = (f32[262144]{0}, token[]) recv-done(%r)",
    ]
    found = _play(lines)
    # Two slices each send half of 2^20 bytes twice, at the 12.5 GB/s of a v6e.
    assert found.seconds == pytest.approx(2**20 / 12.5e9 + 1e-6, rel=1e-3)
    assert found.busy == {"network": pytest.approx(2**20 / 12.5e9 + 1e-6, rel=1e-3)}


def _loop(lines, times):
    body = "\n".join(lines)
    return (
        f"%body (q: f32[8]) -> f32[8] {{\n  %q = f32[8]{{0}} parameter(0)\n{body}\n}}\n\n"
        "%condition (r: f32[8]) -> pred[] {\n  ROOT %r = f32[8]{0} parameter(0)\n}\n"
    ), (
        "  %w = f32[8]{0} while(%p), condition=%condition, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    )


@pytest.mark.parametrize("times", [1, 7, 5_000])
def test_the_turns_of_a_loop_add_up(times):
    turn = [_gather("g", "q", OVER_FSDP), _compute("c", "q", SENT / 4), _done("d", "g")]
    others, loop = _loop(turn, times)
    found = _play([loop], others)
    assert found.seconds == pytest.approx(times * SENT, rel=1e-3)
    assert sum(found.waits.values()) == pytest.approx(0.75 * times * SENT, rel=1e-3)
    assert sum(found.busy.values()) == pytest.approx(times * SENT, rel=1e-3)


def test_a_gather_that_began_before_a_loop_is_not_delayed_by_it():
    others, loop = _loop([_compute("c", "q", SENT / 100)], 100)
    found = _play(
        [_gather("g", "p", OVER_FSDP), loop, _gather("h", "p", OVER_FSDP), _done("d", "h")], others
    )
    assert found.seconds == pytest.approx(2 * SENT, rel=1e-3)


def test_an_axis_over_two_sides_of_the_torus_is_busy_once():
    topology, mesh = describe("v6e:2x2"), {"fsdp": 4}
    links = Links(topology, Mesh(tuple(mesh.items())))
    text = (
        "HloModule step\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        + "\n".join([_gather("g", "p", "replica_groups={{0,1,2,3}}"), _done("d", "g")])
        + "\n}\n"
    )
    found = play(parse(text), mesh, links, topology.accelerator, SourceMap(text))
    assert sum(found.busy.values()) == pytest.approx(found.seconds, rel=1e-3)


def test_a_branch_counts_with_its_share():
    others = "\n".join(
        f"%{name} (q: f32[8]) -> f32[8] {{\n  %q = f32[8]{{0}} parameter(0)\n"
        f"{_compute(name + '_c', 'q', seconds)}\n}}\n"
        for name, seconds in (("often", 1e-3), ("seldom", 4e-3))
    )
    branch = (
        "  %b = f32[8]{0} conditional(%p, %p, %p), branch_computations={%often, %seldom}, "
        'metadata={op_name="jit(step)/slots/cond"}'
    )
    found = _play([branch], others, {"slots": (0.75, 0.25)})
    assert found.seconds == pytest.approx(0.75e-3 + 1e-3)
