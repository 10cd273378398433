"""Fusions, kernels and collectives of programs written by hand, whose counts are known."""

from moelib.layers.moe.rows import SUM_ROWS
from moelib.planning.hlo import program as hlo
from moelib.planning.hlo.source import phase
from moelib.planning.report.collectives import collectives_by_axes
from moelib.planning.report.fusions import fusions_by_kind
from moelib.planning.report.kernels import kernels
from moelib.planning.report.step_report import Kernel

# As compilers for GPUs write it: a gemm as a fusion, cuBLAS, kernels, starts that are synchronous.
GPU = r"""HloModule jit_step

%inner (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %exp = f32[8]{0} exponential(%q)
}

%fused_gemm (p.0: bf16[8,4], p.1: bf16[4,16]) -> bf16[8,16] {
  %p.0 = bf16[8,4]{1,0} parameter(0)
  %p.1 = bf16[4,16]{1,0} parameter(1)
  ROOT %dot = bf16[8,16]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_deep (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %in = f32[8]{0} fusion(%p.2), kind=kLoop, calls=%inner
  ROOT %neg = f32[8]{0} negate(%in), metadata={op_name="jit(step)/learner/neg"}
}

%fused_slice (p.3: f32[8]) -> f32[4] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %slice = f32[4]{0} slice(%p.3), slice={[0:4]}
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %part = ((f32[8]{0}), f32[4]{0}, u32[]) fusion-start(%x), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/transpose(jvp(decoder))/rematted_computation/slice"}
  %part.done = f32[4]{0} fusion-done(%part)
  %gather = ((f32[4]{0}), f32[8]{0}) all-gather-start(%part.done), replica_groups=[2,2]<=[4], dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %gather.done = f32[8]{0} all-gather-done(%gather)
  %sum = f32[8]{0} all-reduce-start(%gather.done), replica_groups=[1,4]<=[4], backend_config={"collective_backend_config":{"is_sync":true}}
  %sum.done = f32[8]{0} all-reduce-done(%sum)
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %sum.done)
}

%condition (t.1: (s32[], f32[8])) -> pred[] {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: bf16[8,4], b: bf16[4,16], c: f32[8], n: s32[]) -> f32[8] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,16]{1,0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %n = s32[] parameter(3)
  %gemm = bf16[8,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused_gemm, metadata={op_name="jit(step)/jvp(decoder)/dot_general"}, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %deep = f32[8]{0} fusion(%c), kind=kLoop, calls=%fused_deep
  %cublas = (bf16[8,16]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %fmha = (bf16[8,4]{1,0}, u8[0]{0}) custom-call(%a, %a, %a), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %mpmd_map.6 = bf16[8,4]{1,0} custom-call(%a, %b), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/transpose(jvp())/shard_map/gmm_weight_gradient/mpmd_map"}, backend_config={cost_estimate_json = "{\22flops\22: 640, \22transcendentals\22: 0, \22bytes_accessed\22: 99, \22remote_bytes_transferred\22: 0}", kernel_hash = "x"}
  %start = (s32[], f32[8]{0}) tuple(%n, %deep)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %result = f32[8]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501 (as the compiler writes it)

MESH = {"expert": 2, "fsdp": 2}


def test_fusions_are_counted_by_kind_and_phase():
    assert [tuple(row.values()) for row in fusions_by_kind(hlo.parse(GPU))] == [
        ("loop", "optimizer", 1),  # By what is in it: it has no name of its own.
        ("loop", "recomputed", 1),
        ("triton_nested_gemm_fusion", "forward", 1),
    ]


def test_phases_follow_from_the_transformations_in_a_name():
    assert phase("jit(step)/jvp(decoder)/while/body/mul") == "forward"
    assert phase("jit(step)/transpose(jvp(decoder))/while/body/mul") == "backward"
    assert phase("jit(step)/transpose(jvp())/checkpoint/rematted_computation/mul") == "recomputed"
    assert phase("jit(step)/learner/mul") == "optimizer"
    assert phase("jit(step)/add") == phase("") == "other"


def test_kernels_of_a_gpu_have_names_and_kinds():
    assert kernels(hlo.parse(GPU)) == (
        Kernel("__cublas$lt$matmul", 1, 1, 0, 0, kind="matmul", library="cublas"),
        Kernel(
            "__cudnn$fmhaSoftmaxBackward", 1, 1, 0, 0, without_estimate=1,
            kind="attention gradient", library="cudnn",
        ),
        Kernel(
            "gmm_weight_gradient", 1, 1, 640, 99,
            kind="grouped matmul gradient", library="mosaic gpu",
        ),
    )  # fmt: skip


def test_a_convolution_of_cudnn_is_no_attention():
    found = kernels(hlo.parse(GPU.replace("fmhaSoftmaxBackward", "convForward")))
    assert [(each.name, each.kind) for each in found if each.library == "cudnn"] == [
        ("__cudnn$convForward", "other")
    ]


def test_a_grouped_matmul_that_sums_rows_has_a_kind_of_its_own():
    text = GPU.replace("shard_map/gmm_weight_gradient", f"{SUM_ROWS}/gmm_weight_gradient")
    assert [each.kind for each in kernels(hlo.parse(text))][-1] == "row sum"


def test_a_start_that_a_gpu_runs_at_once_is_synchronous():
    gather, reduce = collectives_by_axes(hlo.parse(GPU), MESH)
    assert (gather.kind, gather.axes) == ("all-gather", ("fsdp",))
    assert (gather.executions, gather.bytes) == (6, 6 * 32)
    assert (gather.asynchronous, reduce.asynchronous) == (1, 0)
