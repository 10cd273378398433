"""Each rule of lint on programs written by hand: where it fires, and where it must not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from moelib.kernels.cross_entropy import cross_entropy
from moelib.planning.hlo import program as hlo
from moelib.planning.hlo.source import SourceMap
from moelib.planning.lint.arrays import largest_temporaries, memory_above_estimate, unscaled_memory
from moelib.planning.lint.collectives import exposed_waits
from moelib.planning.lint.compute import traced_large_arrays
from moelib.planning.lint.facts import Facts, StateArray, Step, Thresholds
from moelib.planning.lint.rules import lint, merged
from tests.planning.report.test_step_report import make_report

MIB = 2**20
WEIGHT = StateArray(
    "model/layer0/up", (1024, 4096), ("embed", "ffn"), 2 * MIB, split=True, cast=True
)
EXPERTS = StateArray(
    "model/layer0/experts", (16, 1024, 512), ("experts", "expert_embed", None), MIB, True, True
)
FACTS = Facts(
    mesh={"data": 1, "expert": 2, "fsdp": 2},
    batch_size=16,
    seq_len=2048,
    batch_axes=("expert", "fsdp"),
    train_dtype="bfloat16",
    num_experts=frozenset({16}),
    state=(WEIGHT, EXPERTS),
)
EMPTY = "ENTRY %main (a: f32[8]) -> f32[8] {\n  ROOT %a = f32[8]{0} parameter(0)\n}\n"
OVER_FSDP, OVER_EXPERT = "replica_groups=[2,2]<=[4]", "replica_groups=[2,2]<=[2,2]T(1,0)"


def _found(*statements, facts=FACTS, sizes=None, model_flops=0):
    """Returns [(rule, instruction)] of lint in a program of some statements."""
    text = "ENTRY %main (a: f32[8]) -> f32[8] {\n"
    text += "".join(f"  {line}\n" for line in statements)
    program = hlo.parse(text + "  ROOT %end = f32[] constant(0)\n}\n")
    found = lint(program, facts, thresholds=sizes or Thresholds(), model_flops=model_flops)
    return [(each.rule, each.instruction.partition(" ")[0]) for each in found]


def _gather(shape, groups=OVER_FSDP, dimension=0, where="jit(s)/jvp(decoder)/add"):
    return (
        f"%g = {shape} all-gather(%a), {groups}, dimensions={{{dimension}}}, "
        f'metadata={{op_name="{where}"}}'
    )


def _state(array, **changes):
    return {"state": (dataclasses.replace(array, **changes),)}


LEFT = "%l = f32[1024,1024]{1,0} parameter(0)"
DENSE = (
    "%d = f32[1024,1024]{1,0} dot(%l, %l), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
    'metadata={op_name="jit(s)/jvp(decoder)/ragged_dot_general"}'
)
KERNEL = (
    '%k = f32[8]{0} custom-call(%l), custom_call_target="tpu_custom_call", '
    'metadata={op_name="ragged_dot_general"}'
)
STACKED = StateArray("w", (16, 1024, 4096), ("layers", "embed", "ffn"), MIB, True, True)
OF_LAYERS = StateArray("w", (3, 16, 1024, 4096), ("layers", "experts", "expert_ffn", "embed"), MIB,
    True, True)  # fmt: skip
TABLE = StateArray("t", (16 * 2048, 1024), ("vocab", "embed"), MIB, True, True)
LAYERS = StateArray("model/w", (4, 2048, 8, 4, 128), (
    "layers", "embed", None, "kv_heads", "head_dim"), MIB, True, True)  # fmt: skip
FOUR = {"batch_size": 4, "seq_len": 4096, "platform": "cpu"} | _state(LAYERS)


@pytest.mark.parametrize(
    ("statement", "changes", "rule"),
    [
        (_gather("f32[1024,4096]{1,0}"), {}, "float32 gather of weights"),
        # Of a combined gather.
        (_gather("(s32[8]{0}, f32[1024,4096]{1,0})"), {}, "float32 gather of weights"),
        (_gather("(f32[8]{0}, bf16[1024,4096]{1,0})"), {}, None),
        (_gather("bf16[1024,4096]{1,0}"), {}, None),
        (_gather("f32[1024,4000]{1,0}"), {}, None),  # No weight has this shape.
        (_gather("f32[1024,4096]{1,0}", where="jit(s)/learner/add"), {}, None),  # In float32.
        (_gather("f32[1024,4096]{1,0}"), {"train_dtype": "float32"}, None),
        (_gather("f32[1024,4096]{1,0}"), _state(WEIGHT, cast=False), None),
        (_gather("bf16[16,1024,512]{2,1,0}", OVER_EXPERT), {}, "all-gather for all-to-all"),
        (_gather("bf16[8,1024,512]{2,1,0}", OVER_FSDP, 1), {}, None),  # The device's own experts.
        (_gather("bf16[1024,4096]{1,0}", OVER_EXPERT), {}, None),  # Weights that all tokens need.
        # Activations of all rows.
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)", {}, "unsplit activation"),
        (
            "%x = bf16[32768,1024]{1,0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}",
            {},
            "unsplit activation",
        ),
        ("%x = bf16[4,2048,8192]{2,1,0} add(%a, %a)", {}, None),  # A device's own rows.
        ("%x = bf16[16,2048,64]{2,1,0} add(%a, %a)", {}, None),  # Small.
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)", {"batch_axes": ()}, None),
        ("%x = bf16[32768,1024]{1,0} add(%a, %a)", {}, None),  # Rows sent to experts.
        # A quarter of the width; not of the other side.
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)", _state(WEIGHT, shape=(4096, 4096)), None),
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)", _state(WEIGHT, shape=(4096, 1024)), None),
        # Stacked weights.
        ("%x = f32[16,1024,4096]{2,1,0} add(%a, %a)", _state(STACKED), None),
        ("%x = f32[16,512,4096]{2,1,0} add(%a, %a)", _state(STACKED), None),
        ("%x = f32[16,1024,4096]{2,1,0} add(%a, %a)", {}, "unsplit activation"),
        ("%x = f32[16,512,4096]{2,1,0} add(%a, %a)", {}, "unsplit activation"),
        # Those of 16 experts of a layer, gathered, and in pieces.
        ("%x = bf16[16,1024,4096]{2,1,0} add(%a, %a)", _state(OF_LAYERS), None),
        ("%x = bf16[16,1024,2,2048]{3,2,1,0} add(%a, %a)", _state(OF_LAYERS), None),
        ("%x = bf16[16,2048,4096]{2,1,0} add(%a, %a)", _state(OF_LAYERS), "unsplit activation"),
        # As many tokens as a table has rows.
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)", _state(TABLE), "unsplit activation"),
        # Layers and heads as many as the devices.
        ("%x = bf16[4,1,4096,2048]{3,2,1,0} add(%a, %a)", FOUR, None),  # The residual stream.
        ("%x = f32[1,4,8,128,4096]{4,3,2,1,0} add(%a, %a)", FOUR, None),  # Key heads, transposed.
        ("%x = f32[1,4,4096,1024]{3,2,1,0} add(%a, %a)", FOUR, None),
        ("%x = bf16[4,4096,2048]{2,1,0} add(%a, %a)", FOUR, "unsplit activation"),
        ("%x = bf16[4,2048,2048]{2,1,0} add(%a, %a)", FOUR, "unsplit activation"),
        ("%x = f32[262144,4]{1,0:T(8,128)} add(%a, %a)", {}, "padding"),
        ("%x = f32[262144,4]{0,1:T(8,128)} add(%a, %a)", {}, None),  # The large one is innermost.
        ("%x = f32[1024,4]{1,0:T(8,128)} add(%a, %a)", {}, None),
        ("%x = bf16[8192,4096]{1,0} copy(%a)", {}, "copy of a large array"),
        ("%x = bf16[1024,4096]{1,0} copy(%a)", {}, None),
        ("%x = bf16[8192,4096]{1,0} negate(%a)", {}, None),
        (DENSE, {}, "dense grouped matmul"),
        (DENSE.replace("ragged_dot_general", "dot_general"), {}, None),
        (KERNEL, {}, None),  # A TPU has a kernel for it.
    ],
)
def test_a_rule_finds_its_instruction_and_no_other(statement, changes, rule):
    sizes = Thresholds(activation=16 * MIB) if changes is FOUR else None
    facts = dataclasses.replace(FACTS, **changes)
    found = _found(LEFT, statement, facts=facts, sizes=sizes)
    assert found == ([(rule, statement[1])] if rule else [])


def test_a_copy_names_who_makes_and_who_uses_it():
    text = (
        "ENTRY %main (a: f32[8]) -> f32[8] {\n"
        "  %a = f32[8]{0} parameter(0)\n  %m = bf16[64,64]{1,0} negate(%a), "
        'backend_config={"estimated_cycles":"900"}\n'
        '  %c = bf16[64,64]{0,1} copy(%m), backend_config={"estimated_cycles":"100"}\n'
        "  ROOT %u = f32[8]{0} dot(%c, %c)\n}\n"
    )
    (finding,) = lint(hlo.parse(text), FACTS)
    assert finding.advice.startswith("negate makes it as {1,0}, dot uses it as {0,1}, 10.0% of")
    assert lint(hlo.parse(text.replace('"100"', '"8"')), FACTS) == []  # Less than 1%.


@pytest.mark.parametrize(("seconds", "count"), [(0.03, 1), (0.01, 0)])
def test_what_a_played_step_waits_for_is_found_by_source(seconds, count):
    row = {"kind": "all-gather", "axes": ["fsdp"], "source": "a.py:1 < b.py:2", "seconds": seconds}
    rows = [row | {"phase": phase, "asynchronous": True} for phase in ("forward", "recomputed")]
    found = list(exposed_waits(rows, 2.0))
    assert [(each.instruction, each.count, each.locations) for each in found] == [
        ("all-gather over fsdp (forward, recomputed)", 2, ("a.py:1", "b.py:2"))
    ] * count


@pytest.mark.parametrize(
    ("size", "mesh", "count"),
    [(64, FACTS.mesh, 1), (63, FACTS.mesh, 0), (64, {"data": 1, "expert": 1, "fsdp": 1}, 0)],
)
def test_state_that_no_axis_splits_is_found_if_it_is_large(size, mesh, count):
    whole = _state(WEIGHT, split=False, shard_bytes=size * MIB)
    found = _found(facts=dataclasses.replace(FACTS, mesh=mesh, **whole))
    assert found == [("replicated state", "model/layer0/up")] * count


def test_memory_that_stays_when_there_are_more_devices_is_found():
    memory = {"memory.arguments": 200 * MIB, "memory.temporaries": 200 * MIB}
    few = make_report(memory, mesh={"data": 1, "fsdp": 2})
    many = make_report(memory | {"memory.temporaries": 100 * MIB}, mesh={"data": 2, "fsdp": 2})
    (finding,) = unscaled_memory(few, many)
    assert (finding.instruction, finding.config_path) == ("arguments", "mesh_shape")
    with pytest.raises(ValueError, match=r"4 devices.*2"):
        unscaled_memory(many, few)


def test_memory_far_above_the_estimate_is_found_with_the_largest_temporaries():
    text = "ENTRY %m (a: f32[8]) -> f32[8] {\n"
    for name, size in (("x", 1024), ("y", 4096), ("z", 2048), ("u", 512)):
        text += f'  %{name} = f32[{size},1024]{{1,0}} add(%a, %a), metadata={{op_name="{name}"}}\n'
    step = Step(hlo.parse(text + "  ROOT %end = f32[] constant(0)\n}\n"), FACTS, SourceMap(""))
    report = make_report({"memory.peak": 130 * MIB}, largest=largest_temporaries(step))
    assert memory_above_estimate(report, 100 * MIB) == []
    (finding,) = memory_above_estimate(report, 99 * MIB)
    assert "1.31 times" in finding.advice
    names = ["y f32[4096,1024] of 16 MiB", "z f32[2048,1024] of 8 MiB", "x f32[1024,1024] of 4 MiB"]
    assert all(name in finding.advice for name in names)


@pytest.mark.parametrize(("model_flops", "count"), [(2**29, 1), (2**31, 0), (0, 0)])
def test_far_more_matmuls_than_the_model_counts_are_found(model_flops, count):
    dot = DENSE.replace("ragged_dot_general", "dot_general")
    found = _found(LEFT, dot, model_flops=model_flops)  # 2^31 FLOPs.
    assert found == [("more FLOPs than the model", "d")] * count


SMALL_STEP = Facts(
    mesh={"fsdp": 1},
    batch_size=2,
    seq_len=8,
    train_dtype="bfloat16",
    num_experts=frozenset({16}),
    state=(StateArray("model/head", (4, 32), ("embed", "vocab"), 512, split=False, cast=True),),
)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "dtype", "rule"),
    [
        ("bqhd,bkhd->bhqk", [(2, 8, 3, 4), (2, 8, 3, 4)], "bfloat16", "dense attention scores"),
        ("bqhd,bkhd->bhqk", [(2, 4, 3, 4), (2, 8, 3, 4)], "bfloat16", None),  # A block of queries.
        ("bsd,dv->bsv", [(2, 8, 4), (4, 32)], "bfloat16", "whole logits"),
        ("bsd,dv->bsv", [(1, 8, 4), (4, 32)], "bfloat16", None),  # Of a part of the tokens.
        ("bsd,df->bsf", [(2, 8, 4), (4, 64)], "float32", "matmul in float32"),
        ("bsd,df->bsf", [(2, 8, 4), (4, 64)], "bfloat16", None),
        ("bsd,de->bse", [(2, 8, 64), (64, 16)], "float32", None),  # A router.
        ("bsd,bsf->df", [(2, 8, 64), (2, 8, 64)], "float32", None),  # The gradient of a weight.
    ],
)
def test_large_arrays_are_found_in_a_trace(subscripts, shapes, dtype, rule):
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    traced = jax.make_jaxpr(lambda *x: jnp.einsum(subscripts, *x))(*operands)
    step = Step(hlo.parse(EMPTY), SMALL_STEP, SourceMap(""), Thresholds(activation=256))
    found = [each.rule for each in traced_large_arrays(step, traced)]
    assert found == ([rule] if rule else [])


def test_logits_of_a_single_chunk_of_the_loss_are_not_found():
    shapes = [(16, 4), (4, 32), (16,)]
    operands = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ("bfloat16", "bfloat16", "int32"), strict=True)
    ]
    traced = jax.make_jaxpr(jax.grad(lambda *x: cross_entropy(*x)[0]))(*operands)
    step = Step(hlo.parse(EMPTY), SMALL_STEP, SourceMap(""), Thresholds(activation=256))
    assert [each.rule for each in traced_large_arrays(step, traced)] == []


def test_equal_findings_become_one_the_largest():
    program = hlo.parse(
        "ENTRY %m (a: f32[8]) -> f32[8] {\n"
        "  %x = bf16[8192,4096]{1,0} copy(%a)\n  %y = bf16[8192,8192]{1,0} copy(%a)\n"
        "  ROOT %z = f32[262144,4]{1,0:T(8,128)} add(%a, %a)\n}\n"
    )
    padding, copies = sorted(lint(program, FACTS), key=lambda f: f.rule, reverse=True)
    assert (copies.instruction, copies.count) == ("y bf16[8192,8192]", 2)
    assert padding.count == 1


def test_warnings_come_before_hints():
    program = hlo.parse(
        "ENTRY %m (a: f32[8]) -> f32[8] {\n  %y = bf16[8192,81920]{1,0} copy(%a)\n"
        "  ROOT %x = bf16[16,2048,1024]{2,1,0} add(%a, %a)\n}\n"
    )
    assert [each.severity for each in lint(program, FACTS)] == ["warning", "hint"]
    assert merged([]) == []
