"""Programs written by hand, whose counts are known."""

import pytest

from moelib.planning.hlo import program as hlo
from moelib.planning.hlo.source import SourceMap

LOOPS = """HloModule jit_step, is_scheduled=true

FileNames
1 "/somewhere/moelib/layers/norm.py"
2 "/home/user/project/mine.py"

FunctionNames
1 "RMSNorm.forward"
2 "outer.<locals>.inner"

FileLocations
1 {file_name_id=1 function_name_id=1 line=35 end_line=35 column=1 end_column=9}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}


%fused_computation (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  ROOT %neg = f32[8]{0:T(128)} negate(%p.0), backend_config={"estimated_cycles":"7"}
}

%inner_body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], /*index=1*/f32[8]{0:T(128)S(1)}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p.1), index=1
  %fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(step)/neg" stack_frame_id=2}, backend_config={"estimated_cycles":"100"}
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%x, %fusion.1)
}

%inner_condition (p.2: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%p.2, %five), direction=LT
}

%outer_body (p.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.3 = (s32[], f32[8]{0}) parameter(0)
  ROOT %while.1 = (s32[], f32[8]{0}) while(%p.3), condition=%inner_condition, body=%inner_body
}

%outer_condition (p.4: (s32[], f32[8])) -> pred[] {
  %p.4 = (s32[], f32[8]{0}) parameter(0)
  ROOT %call.1 = pred[] custom-call(%p.4), custom_call_target="unknown"
}

%cheap (p.5: f32[8]) -> f32[8] {
  ROOT %p.5 = f32[8]{0} parameter(0)
}

%dear (p.6: f32[8]) -> f32[8] {
  %p.6 = f32[8]{0} parameter(0)
  ROOT %exp = f32[8]{0} exponential(%p.6), backend_config={"estimated_cycles":"11"}
}

ENTRY %main (a: f32[8], b: s32[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = s32[] parameter(1)
  %start = (s32[], f32[8]{0}) tuple(%b, %a)
  %while.2 = (s32[], f32[8]{0}) while(%start), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  %while.3 = (s32[], f32[8]{0}) while(%start), condition=%outer_condition, body=%outer_body
  %chosen = f32[8]{0} conditional(%b, %a, %a), branch_computations={%cheap, %dear}
  ROOT %kernel = f32[8]{0:T(8,128)(2,1)} custom-call(%chosen, /*index=1*/%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"rows":"128",
"groups":"4"
}}, metadata={op_name="jit(step)/gmm/pallas_call" stack_frame_id=1}, backend_config={"estimated_cycles":"9223372036854775807"}
}
"""  # noqa: E501 (as the compiler writes it)

ASYNC = """HloModule jit_step

%wrapped (p.0: bf16[4,8]) -> bf16[8,8] {
  %p.0 = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p.0), channel_id=1, replica_groups=[2,2]<=[4], dimensions={0}
}

ENTRY %main (a: bf16[4,8]) -> bf16[8,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %async-start = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}, u32[]) async-start(%a), async_execution_thread="sparsecore", calls=%wrapped
  ROOT %async-done = bf16[8,8]{1,0} async-done(%async-start), calls=%wrapped
}
"""  # noqa: E501 (as the compiler writes it)


@pytest.fixture(scope="module")
def program():
    return hlo.parse(LOOPS)


def test_loops_multiply_and_a_bound_stands_in_for_a_trip_count(program):
    runs = {name: each.executions for name, each in program.computations.items()}
    # Two outer loops, one of 3 trips and one of unknown length; the inner one's bound is 5.
    assert runs["outer_body"] == 3 + 1
    assert runs["inner_body"] == runs["fused_computation"] == 4 * 5
    assert program.loops_of_unknown_length == ("while.3",)


CONDITION = """
%fused (q.0: s32[], q.1: s32[]) -> pred[] {{
  %q.1 = s32[] parameter(1)
  %q.0 = s32[] parameter(0)
  ROOT %fused_less = pred[] compare(%q.0, %q.1), direction=LT
}}

%condition (p.0: (s32[], s32[])) -> pred[] {{
  %p.0 = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p.0), index=0
  %n = s32[] get-tuple-element(%p.0), index=1
  %c = s32[] constant(512)
  %copied = s32[] copy(%c)
  %rows = s32[] multiply(%i, %c)
  ROOT %more = pred[] {}
}}

%body (p.1: (s32[], s32[])) -> (s32[], s32[]) {{
  ROOT %p.1 = (s32[], s32[]) parameter(0)
}}

ENTRY %main (a: (s32[], s32[])) -> (s32[], s32[]) {{
  %a = (s32[], s32[]) parameter(0)
  ROOT %while = (s32[], s32[]) while(%a), condition=%condition, body=%body
}}
"""


def test_rounds_of_a_dispatch_after_the_first_do_not_count():
    text = CONDITION.format("compare(%rows, %n), direction=LT")
    named = 'body=%body, metadata={op_name="jit(step)/jvp(further_rounds)/while"}'
    found = hlo.parse(text.replace("body=%body", named))
    assert found.computations["body"].executions == 0
    assert found.loops_of_unknown_length == ()


@pytest.mark.parametrize(
    ("more", "executions"),
    [
        ("compare(%i, %copied), direction=LT", 512),
        ("fusion(%i, %c), kind=kLoop, calls=%fused", 512),
        ("compare(%rows, %n), direction=LT", None),
        ("compare(%rows, %c), direction=LT", None),
        ("fusion(%rows, %n), kind=kLoop, calls=%fused", None),
        ("compare(%i, %c), direction=GT", None),
    ],
)
def test_only_the_limit_of_a_counter_bounds_a_loop(more, executions):
    found = hlo.parse(CONDITION.format(more))
    assert found.computations["body"].executions == (executions or 1)
    assert found.loops_of_unknown_length == (() if executions else ("while",))


@pytest.mark.parametrize(("step", "executions"), [(1, 512), (128, 4), (100, 6)])
def test_a_loop_of_larger_steps_takes_fewer(step, executions):
    text = CONDITION.format("compare(%i, %c), direction=LT").replace(
        "  ROOT %p.1 = (s32[], s32[]) parameter(0)\n",
        "  %p.1 = (s32[], s32[]) parameter(0)\n"
        "  %i.1 = s32[] get-tuple-element(%p.1), index=0\n"
        "  %n.1 = s32[] get-tuple-element(%p.1), index=1\n"
        f"  %step = s32[] constant({step})\n"
        "  %next = s32[] add(%i.1, %step)\n"
        "  ROOT %t = (s32[], s32[]) tuple(%next, %n.1)\n",
    )
    assert hlo.parse(text).computations["body"].executions == executions


def test_the_costliest_branch_runs_and_fused_computations_are_marked(program):
    assert program.computations["dear"].executions == 1
    assert program.computations["cheap"].executions == 0
    assert program.computations["fused_computation"].fused
    assert not program.computations["inner_body"].fused


def test_the_slots_of_a_pipeline_run_as_its_schedule_has_them():
    branches = "branch_computations={%cheap, %dear}"
    named = LOOPS.replace(
        branches, branches + ', metadata={op_name="jit(step)/pipeline_slots/cond"}'
    )
    inside = named.replace("calls=%fused_computation", "calls=%dear")  # In loops, 20 times.
    found = hlo.parse(inside, {"pipeline_slots": (0.5, 0.5)}).computations
    assert (found["cheap"].executions, found["dear"].executions) == (0.5, 20.5)
    # A single share is that of the costliest branch.
    found = hlo.parse(inside.replace('"3"', '"8"'), {"pipeline_slots": (0.0,)}).computations
    assert (found["cheap"].executions, found["dear"].executions) == (0, 45)


def test_attributes_of_several_lines_belong_to_their_instruction(program):
    kernel = program.computations["main"].instructions["kernel"]
    assert kernel.operands == ("chosen", "a")
    assert kernel.shape == "f32[8]{0:T(8,128)(2,1)}"
    assert kernel.attribute("frontend_attributes") == (
        '{kernel_metadata={"rows":"128","groups":"4"}}'
    )
    assert kernel.op_name == "jit(step)/gmm/pallas_call"
    assert kernel.cycles == 0  # The compiler does not know.
    in_loop = program.computations["inner_body"].instructions["p.1"]
    assert in_loop.shape == "(s32[], f32[8]{0:T(128)S(1)})"


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule empty\n")


def test_a_wrapped_collective_is_asynchronous():
    wrapped = hlo.parse(ASYNC).computations["wrapped"]
    assert (wrapped.executions, wrapped.asynchronous) == (1, True)


def test_locations_are_source_lines_innermost_first(program):
    fusion = program.computations["inner_body"].instructions["fusion.1"]
    norm, mine = SourceMap(LOOPS).stack(fusion)
    assert (str(norm), norm.function) == ("layers/norm.py:35", "RMSNorm.forward")
    assert (str(mine), mine.function) == ("project/mine.py:7", "inner")
    assert SourceMap(ASYNC).stack(fusion) == []
