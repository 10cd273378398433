"""Bytes of instructions written by hand."""

import pytest

from moelib.planning.hlo.program import parse
from moelib.planning.report.hbm import hbm_bytes

FUSED = """
%read_slice (a: f32[16,1024], i: s32[]) -> f32[1,1024] {
  %a = f32[16,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[16,1024]{1,0} bitcast(%a)
  ROOT %s = f32[1,1024]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,1024}
}

%negated (d: f32[16,1024]) -> f32[16,1024] {
  %d = f32[16,1024]{1,0} parameter(0)
  ROOT %n = f32[16,1024]{1,0} negate(%d)
}

%write_slice (c: f32[16,1024], u: f32[1,1024], j: s32[]) -> f32[16,1024] {
  %c = f32[16,1024]{1,0} parameter(0)
  %u = f32[1,1024]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %w = f32[16,1024]{1,0} dynamic-update-slice(%c, %u, %j, %j)
}
"""
CUBLAS = (
    'f32[16,16]{1,0} custom-call(%stack, %stack), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}'
)
CALLED = (
    "((f32[16,1024]{1,0}), f32[16,1024]{1,0}, u32[]{:S(2)}) call-start(%stack), to_apply=%negated"
)
ROW, STACK, INDEX = 4 * 1024, 4 * 16 * 1024, 4


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        # A fusion reads the slice that it takes, and writes it.
        ("f32[1,1024]{1,0} fusion(%stack, %index), kind=kLoop, calls=%read_slice", 2 * ROW + INDEX),
        # One that updates a stack in place reads the update and writes it.
        ("f32[16,1024]{1,0} fusion(%stack, %row, %index), kind=kLoop, calls=%write_slice",
         2 * ROW + INDEX),
        ("f32[16,1024]{1,0} negate(%stack)", 2 * STACK),
        ("f32[16,1024]{1,0:S(1)} negate(%stack)", STACK),  # The result is in VMEM.
        ("(f32[16,1024]{1,0:S(1)}, f32[16,1024]{1,0}, u32[]{:S(2)}) copy-start(%stack)", STACK),
        ("f32[1,1024]{1,0} dynamic-slice(%stack, %index, %index)", 2 * ROW),
        ("f32[16,1024]{1,0} dynamic-update-slice(%stack, %row, %index, %index)", 2 * ROW),
        ("f32[16,1024]{1,0} bitcast(%stack)", 0),
        ("f32[16,1024]{1,0:S(7)} negate(%stack)", 2 * STACK),  # In memory that GPUs share.
        ("(f32[1,1024]{1,0}, f32[16,1024]{1,0:S(1)}) all-gather-start(%row), dimensions={0}", ROW),
        ('f32[16,1024]{1,0} custom-call(), custom_call_target="AllocateBuffer"', 0),
        # The computation of a start reads and writes; a send returns its operand.
        (CALLED, 2 * STACK),
        ("(f32[16,1024]{1,0}, u32[]{:S(2)}, token[]) send(%stack, %token)", STACK),
        # A matmul of cuBLAS, without an estimate of its own.
        (CUBLAS, 2 * STACK + 4 * 16 * 16),
    ],
)  # fmt: skip
def test_an_instruction_moves_what_it_reads_and_writes(instruction, expected):
    text = (
        f"HloModule step\n{FUSED}\nENTRY %main (x: f32[16,1024]) -> f32[16,1024] {{\n"
        "  %stack = f32[16,1024]{1,0} parameter(0)\n  %row = f32[1,1024]{1,0} parameter(1)\n"
        f"  %index = s32[] parameter(2)\n  ROOT %y = {instruction}\n}}\n"
    )
    assert hbm_bytes(parse(text)) == expected
