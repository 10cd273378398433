"""Each rule of lint on programs written by hand: where it fires, and where it must not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from moelib.planning.hlo import program as hlo
from moelib.planning.hlo.source import SourceMap
from moelib.planning.lint.arrays import (
    largest_temporaries,
    memory_above_estimate,
    unscaled_memory,
)
from moelib.planning.lint.compute import traced_large_arrays
from moelib.planning.lint.facts import Facts, StateArray, Step, Thresholds
from moelib.planning.lint.rules import lint, merged
from moelib.planning.report.collectives import collective_instructions, is_asynchronous
from moelib.train.compiler_options import BY_DEVICE_KIND
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
    device_kind="TPU v6 lite",
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


# -- Collectives ---------------------------------------------------------------------------------


def _gather(shape, groups=OVER_FSDP, dimension=0, where="jit(s)/jvp(decoder)/add"):
    return (
        f"%g = {shape} all-gather(%a), {groups}, dimensions={{{dimension}}}, "
        f'metadata={{op_name="{where}"}}'
    )


def test_a_weight_gathered_in_float32_but_computed_in_bfloat16_is_found():
    assert _found(_gather("f32[1024,4096]{1,0}")) == [("float32 gather of weights", "g")]


@pytest.mark.parametrize(
    ("shape", "where", "facts"),
    [
        ("bf16[1024,4096]{1,0}", "jit(s)/jvp(decoder)/add", FACTS),
        ("f32[1024,4000]{1,0}", "jit(s)/jvp(decoder)/add", FACTS),  # No weight has this shape.
        ("f32[1024,4096]{1,0}", "jit(s)/learner/add", FACTS),  # The update is in float32.
        (
            "f32[1024,4096]{1,0}",
            "jit(s)/jvp()/add",
            dataclasses.replace(FACTS, train_dtype="float32"),
        ),
        (
            "f32[1024,4096]{1,0}",
            "jit(s)/jvp()/add",
            dataclasses.replace(FACTS, state=(dataclasses.replace(WEIGHT, cast=False),)),
        ),
    ],
)
def test_other_gathers_are_no_float32_gathers_of_weights(shape, where, facts):
    assert _found(_gather(shape, where=where), facts=facts) == []


def test_weights_of_all_experts_gathered_over_their_axis_are_found():
    statement = _gather("bf16[16,1024,512]{2,1,0}", OVER_EXPERT)
    assert _found(statement) == [("all-gather for all-to-all", "g")]


@pytest.mark.parametrize(
    ("shape", "groups", "dimension"),
    [
        ("bf16[8,1024,512]{2,1,0}", OVER_FSDP, 1),  # The device's own experts.
        ("bf16[1024,4096]{1,0}", OVER_EXPERT, 0),  # Weights that all tokens need.
    ],
)
def test_gathers_that_every_device_needs_are_no_all_to_all(shape, groups, dimension):
    assert _found(_gather(shape, groups, dimension)) == []


LOOP = """%condition (t: (s32[], bf16[4096,1024], f32[8])) -> pred[] {{
  ROOT %true = pred[] constant(true)
}}

%body (t: (s32[], bf16[4096,1024], f32[8])) -> (s32[], bf16[4096,1024], f32[8]) {{
  %t = (s32[], bf16[4096,1024]{{1,0}}, f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = bf16[4096,1024]{{1,0}} get-tuple-element(%t), index=1
  %x = bf16[4096,1024]{{1,0}} get-tuple-element(%t), index=2
  %c = bf16[4096,1024]{{1,0}} negate(%{operand})
  %g = bf16[8192,1024]{{1,0}} all-gather(%c), replica_groups=[2,2]<=[4], dimensions={{0}}
  ROOT %out = (s32[], bf16[4096,1024]{{1,0}}, f32[8]{{0}}) tuple(%i, %w, %g)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  ROOT %l = (s32[], bf16[4096,1024]{{1,0}}, f32[8]{{0}}) while(%a), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"{iterations}"}}}}
}}
"""  # noqa: E501 (as the compiler writes it)


@pytest.mark.parametrize(
    ("operand", "iterations", "count"),
    [("w", 5, 1), ("x", 5, 0), ("w", 1, 0)],  # What the loop passes on; what it changes; no loop.
)
def test_a_loop_invariant_collective_is_found(operand, iterations, count):
    program = hlo.parse(LOOP.format(operand=operand, iterations=iterations))
    found = [f for f in lint(program, FACTS) if f.rule == "loop-invariant collective"]
    assert len(found) == count
    assert [(f.executions, f.bytes) for f in found] == [(5, 8192 * 1024 * 2)] * count


def test_zeros_that_a_windowed_matmul_passes_on_first_are_no_loop_invariant_collective():
    text = LOOP.format(operand="w", iterations=5)
    zeros = (
        "%zero = bf16[] constant(0)\n  %c = bf16[4096,1024]{1,0} broadcast(%zero), dimensions={}"
    )
    text = text.replace("%c = bf16[4096,1024]{1,0} negate(%w)", zeros)
    assert lint(hlo.parse(text), _all_options_set()) == []


SENT = "%r = bf16[8192,8192]{1,0} reduce-scatter(%a), replica_groups=[2,2]<=[4], dimensions={0}"


def test_a_synchronous_collective_names_the_options_that_are_not_set():
    program = hlo.parse("ENTRY %m (a: f32[8]) -> f32[8] {\n  ROOT " + SENT + "\n}\n")
    (finding,) = lint(program, FACTS)
    assert (finding.rule, finding.config_path) == ("synchronous collective", "compiler_options")
    assert "'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter': 'True'" in (
        finding.advice
    )


def test_a_collective_that_xla_repeats_is_found():
    facts = dataclasses.replace(FACTS, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    gather = (
        "%NAME = bf16[2048,2048]{1,0} all-gather(%a), replica_groups=[2,2]<=[4], dimensions={0}"
    )
    for name, found in (("g", []), ("g.remat", [1]), ("g.12.remat2.1", [1]), ("rematted.3", [])):
        rule = ("repeated collective", name)
        assert _found(gather.replace("NAME", name), facts=facts) == [rule for _ in found]


def _all_options_set(**changes):
    options = BY_DEVICE_KIND["TPU v6 lite"]
    return dataclasses.replace(FACTS, compiler_options=options, **changes)


@pytest.mark.parametrize(
    ("kind", "groups", "count"),
    [
        ("reduce-scatter", OVER_FSDP, 1),  # Such as the gradient of the head.
        ("all-gather", OVER_FSDP, 0),
        ("all-gather", "replica_groups=[1,64]<=[64]", 1),
        ("all-reduce", "replica_groups=[1,64]<=[64]", 0),
    ],
)
def test_a_synchronous_collective_without_an_option_names_the_mesh(kind, groups, count):
    mesh = {"expert": 1, "fsdp": 64} if "64" in groups else {"expert": 2, "fsdp": 2}
    sent = f"%r = bf16[8192,8192]{{1,0}} {kind}(%a), {groups}, dimensions={{0}}"
    given = "ENTRY %m (a: f32[8]) -> f32[8] {\n  %a = f32[8]{0} parameter(0)\n"
    found = lint(hlo.parse(given + "  ROOT " + sent + "\n}\n"), _all_options_set(mesh=mesh))
    assert [(each.rule, each.config_path) for each in found] == [
        ("synchronous collective", "mesh_shape")
    ] * count
    assert all(f"fsdp={mesh['fsdp']}" in each.advice for each in found)


def test_other_synchronous_collectives_are_no_findings():
    assert _found(SENT, facts=dataclasses.replace(FACTS, platform="cpu")) == []
    assert _found(SENT.replace("8192,8192", "1024,1024")) == []  # Too small to wait for.


@pytest.mark.parametrize("synchronous", [True, False])
def test_no_option_is_advised_on_gpus(synchronous):
    facts = dataclasses.replace(FACTS, platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    start = (
        "%r = ((bf16[8]), bf16[8192,8192]{1,0}) all-gather-start(%a), replica_groups=[2,2]<=[4], "
        'dimensions={0}, backend_config={"collective_backend_config":{"is_sync":SYNC}}'
    ).replace("SYNC", str(synchronous).lower())
    assert _found(start, facts=facts) == []
    program = hlo.parse("ENTRY %m (a: f32[8]) -> f32[8] {\n  ROOT " + start + "\n}\n")
    ((_, computation, each),) = collective_instructions(program)
    assert is_asynchronous(computation, each) == (not synchronous)


# -- Arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)",
        "%x = bf16[32768,1024]{1,0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}",
    ],
)
def test_an_activation_of_all_rows_is_found(statement):
    facts = dataclasses.replace(FACTS, platform="cpu")
    assert _found(statement, facts=facts) == [("unsplit activation", "x")]


@pytest.mark.parametrize(
    ("statement", "changes"),
    [
        ("%x = bf16[4,2048,8192]{2,1,0} add(%a, %a)", {}),  # A device's own rows.
        ("%x = bf16[16,2048,64]{2,1,0} add(%a, %a)", {}),  # Small.
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)", {"batch_axes": ()}),
        ("%x = bf16[32768,1024]{1,0} add(%a, %a)", {}),  # Rows that a device sends to experts.
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)",
         {"state": (dataclasses.replace(WEIGHT, shape=(4096, 4096)),)}),  # A quarter of the width.
        ("%x = bf16[16,2048,1024]{2,1,0} add(%a, %a)",
         {"state": (dataclasses.replace(WEIGHT, shape=(4096, 1024)),)}),  # Not of the other side.
    ],
)  # fmt: skip
def test_other_activations_are_no_findings(statement, changes):
    assert _found(statement, facts=dataclasses.replace(FACTS, **changes)) == []


@pytest.mark.parametrize("shape", ["f32[16,1024,4096]", "f32[16,512,4096]"])
def test_stacked_weights_are_no_activations(shape):
    layers = StateArray("w", (16, 1024, 4096), ("layers", "embed", "ffn"), MIB, True, True)
    facts = dataclasses.replace(FACTS, state=(layers,))
    statement = f"%x = {shape}{{2,1,0}} add(%a, %a)"
    assert _found(statement, facts=facts) == []
    assert _found(statement) == [("unsplit activation", "x")]  # No weight of this shape.


LAYERS = StateArray("model/w", (4, 2048, 8, 4, 128), (
    "layers", "embed", None, "kv_heads", "head_dim"), MIB, True, True)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ("bf16[4,1,4096,2048]{3,2,1,0}", False),  # The residual stream of four layers.
        ("f32[1,4,8,128,4096]{4,3,2,1,0}", False),  # Four key heads, transposed.
        ("f32[1,4,4096,1024]{3,2,1,0}", False),
        ("bf16[4,4096,2048]{2,1,0}", True),  # The sequences of all devices.
        ("bf16[4,2048,2048]{2,1,0}", True),
    ],
)
def test_layers_and_heads_as_many_as_the_devices_are_no_batch(shape, found):
    facts = dataclasses.replace(FACTS, batch_size=4, seq_len=4096, state=(LAYERS,), platform="cpu")
    sizes = Thresholds(activation=16 * MIB)
    assert _found(f"%x = {shape} add(%a, %a)", facts=facts, sizes=sizes) == (
        [("unsplit activation", "x")] if found else []
    )


def test_state_that_no_axis_splits_is_found_if_it_is_large():
    whole = dataclasses.replace(WEIGHT, split=False, shard_bytes=64 * MIB)
    assert _found(facts=dataclasses.replace(FACTS, state=(whole,))) == [
        ("replicated state", "model/layer0/up")
    ]
    small = dataclasses.replace(whole, shard_bytes=63 * MIB)
    assert _found(facts=dataclasses.replace(FACTS, state=(small,))) == []
    alone = {"data": 1, "expert": 1, "fsdp": 1}
    assert _found(facts=dataclasses.replace(FACTS, state=(whole,), mesh=alone)) == []


def test_tiles_that_are_mostly_padding_are_found():
    large = "%x = f32[262144,4]{1,0:T(8,128)} add(%a, %a)"
    assert _found(large) == [("padding", "x")]
    assert _found(large.replace("{1,0", "{0,1")) == []  # The large dimension lies innermost.
    assert _found(large.replace("262144", "1024")) == []


def test_large_copies_are_found_and_those_of_a_fusion_are_not():
    copy = "%x = bf16[8192,4096]{1,0} copy(%a)"
    assert _found(copy) == [("copy of a large array", "x")]
    assert _found(copy.replace("8192", "1024")) == []
    assert _found(copy.replace("copy(", "negate(")) == []


def test_memory_that_stays_when_there_are_more_devices_is_found():
    few = make_report(mesh={"data": 1, "fsdp": 2})
    few = dataclasses.replace(
        few, memory=dataclasses.replace(few.memory, arguments=200 * MIB, temporaries=200 * MIB)
    )
    many = dataclasses.replace(
        few,
        mesh={"data": 2, "fsdp": 2},
        memory=dataclasses.replace(few.memory, temporaries=100 * MIB),
    )
    (finding,) = unscaled_memory(few, many)
    assert (finding.instruction, finding.config_path) == ("arguments", "mesh_shape")
    with pytest.raises(ValueError, match=r"4 devices.*2"):
        unscaled_memory(many, few)


def test_memory_far_above_the_estimate_is_found_with_the_largest_temporaries():
    text = "ENTRY %m (a: f32[8]) -> f32[8] {\n"
    for name, size in (("x", 1024), ("y", 4096), ("z", 2048), ("u", 512)):
        text += f'  %{name} = f32[{size},1024]{{1,0}} add(%a, %a), metadata={{op_name="{name}"}}\n'
    step = Step(hlo.parse(text + "  ROOT %end = f32[] constant(0)\n}\n"), FACTS, SourceMap(""))
    report = make_report()
    memory = dataclasses.replace(report.memory, peak=130 * MIB)
    report = dataclasses.replace(report, memory=memory, largest=tuple(largest_temporaries(step)))
    assert memory_above_estimate(report, 100 * MIB) == []
    (finding,) = memory_above_estimate(report, 99 * MIB)
    assert "1.31 times" in finding.advice
    names = ["y f32[4096,1024] of 16 MiB", "z f32[2048,1024] of 8 MiB", "x f32[1024,1024] of 4 MiB"]
    assert all(name in finding.advice for name in names)


# -- Computation ---------------------------------------------------------------------------------


DOT = (
    "%d = f32[1024,1024]{1,0} dot(%l, %l), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
    'metadata={op_name="jit(s)/jvp(decoder)/OP"}'
)
LEFT = "%l = f32[1024,1024]{1,0} parameter(0)"


def test_a_grouped_matmul_that_became_dense_is_found():
    found = _found(LEFT, DOT.replace("OP", "ragged_dot_general"))
    assert found == [("dense grouped matmul", "d")]
    assert _found(LEFT, DOT.replace("OP", "dot_general")) == []
    kernel = '%k = f32[8]{0} custom-call(%l), custom_call_target="tpu_custom_call", metadata={op_name="ragged_dot_general"}'  # noqa: E501 (a TPU has a kernel for it)
    assert _found(LEFT, kernel) == []


@pytest.mark.parametrize(("model_flops", "count"), [(2**29, 1), (2**31, 0), (0, 0)])
def test_far_more_matmuls_than_the_model_counts_are_found(model_flops, count):
    found = _found(LEFT, DOT, model_flops=model_flops)  # 2^31 FLOPs.
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


# -- All together --------------------------------------------------------------------------------


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
