"""Shapes, groups of devices and FLOPs against values worked out by hand, and against NumPy."""

import pytest

from moelib.planning.hlo import program as hlo
from moelib.planning.hlo import values
from moelib.planning.hlo.program import Instruction


def _instruction(opcode, shape, attributes="", operands=()):
    return Instruction("x", shape, opcode, operands, "", attributes)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[]", 4),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("(s32[4]{0}, pred[3]{0}, u32[]{:S(2)})", 23),
        ("f8e4m3fn[10]", 10),
        ("s4[10]{0}", 5),
        ("f32[<=16]{0}", 64),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, expected):
    assert values.shape_bytes(shape) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[16,256]{1,0:T(8,128)(2,1)}", 16 * 256 * 2),
        ("f32[2048,4]{1,0:T(8,128)}", 2048 * 128 * 4),
        ("f32[2048,4]{0,1:T(8,128)}", 2048 * 8 * 4),  # The first dimension lies innermost.
        ("s32[3,5,130]{2,1,0:T(8,128)S(1)}", 3 * 8 * 256 * 4),
        ("f32[100]{0:T(1024)}", 1024 * 4),
        ("bf16[3,5]{1,0}", 30),  # In no tiles.
        ("(f32[2048,4]{1,0:T(8,128)}, s32[])", 0),
    ],
)
def test_bytes_with_the_padding_of_tiles(shape, expected):
    assert values.padded_bytes(shape) == expected


def test_elements_of_nested_tuples():
    assert values.tuple_elements("((f32[2]{0}, s32[3]), bf16[4,4]{1,0}, u32[])") == [
        "(f32[2], s32[3])",
        "bf16[4,4]",
        "u32[]",
    ]
    assert values.tuple_elements("f32[2]{0}") == ["f32[2]"]


def test_the_result_of_a_start_is_that_of_its_done():
    gather = _instruction("all-gather-start", "(bf16[4,8]{1,0}, bf16[8,8]{1,0})")
    assert values.result_shape(gather) == "bf16[8,8]"
    reduce = _instruction("all-reduce-start", "(f32[2]{0}, f32[3]{0})")
    assert values.shape_bytes(values.result_shape(reduce)) == 20
    reduce = _instruction("all-reduce-start", "((f32[2]{0}), f32[2]{0})")
    assert values.result_shape(reduce) == "f32[2]"
    assert values.result_shape(_instruction("all-gather", "f32[2]{0}")) == "f32[2]{0}"


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4], dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", [[0, 2], [1, 3]]),
        ("replica_groups=[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=1] {'a'}, dimensions={0}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, dimensions={0}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, dimensions={0}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}, dimensions={0}", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups={}, to_apply=%add", []),
        ("dimensions={0}", []),
    ],
)
def test_groups_of_devices(attributes, expected):
    assert values.device_groups(_instruction("all-gather", "f32[2]", attributes)) == expected


def test_groups_lie_along_the_axes_in_which_their_devices_differ():
    mesh = {"data": 1, "expert": 2, "fsdp": 2}
    assert values.axes_of_groups([[0, 1], [2, 3]], mesh) == ("fsdp",)
    assert values.axes_of_groups([[0, 2], [1, 3]], mesh) == ("expert",)
    assert values.axes_of_groups([[0, 1, 2, 3]], mesh) == ("expert", "fsdp")
    assert values.axes_of_groups([], mesh) == ("expert", "fsdp")


@pytest.mark.parametrize(
    ("target", "transfer_type", "kind", "num"),
    [
        ('"{1,2,3,4}x{0:3}"', "ALL_REDUCE", "all-reduce", 4),
        ("{{100000,300000},{200000,400000}}", "ALL_GATHER", "all-gather", 2),
        # A group of four devices on two slices.
        (
            "{{1000000,1000001,1100000,1100001}}",
            "RAGGED_ALL_TO_ALL",
            "ragged-all-to-all",
            2,
        ),
        ("{{100000->200000},{200000->100000}}", "ONE_TO_ONE", "collective-permute", 2),
    ],
)
def test_a_transfer_between_slices_is_a_collective_over_the_network(
    target, transfer_type, kind, num
):
    attributes = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{transfer_type}"'
    recv = _instruction("recv", "(f32[2,4]{1,0}, u32[]{:S(2)}, token[])", attributes)
    assert values.collective_kind(recv) == kind
    assert values.group_of(recv, {"data": 2}) == (("network",), num)
    assert values.result_shape(recv) == "f32[2,4]"
    assert values.collective_kind(_instruction("send", recv.shape, attributes)) == ""
    assert values.collective_kind(_instruction("recv", recv.shape, "is_host_transfer=true")) == ""


def _flops(statement):
    text = f"ENTRY %main (a: f32[1]) -> f32[1] {{\n{statement}\n}}\n"
    computation = hlo.parse(text).computations["main"]
    return values.matmul_flops(list(computation.instructions.values())[-1], computation)


def test_flops_of_a_dot_are_two_for_each_product():
    assert _flops(
        "  %a = f32[3,5,7]{2,1,0} parameter(0)\n"
        "  %b = f32[3,7,11]{2,1,0} parameter(1)\n"
        "  ROOT %c = f32[3,5,11]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    ) == 2 * (3 * 5 * 7 * 11)


def test_flops_of_a_matmul_of_cublas():
    assert _flops(
        "  %a = bf16[64,32]{1,0} parameter(0)\n  %b = bf16[32,16]{1,0} parameter(1)\n"
        "  ROOT %c = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    ) == 2 * (64 * 32 * 16)


def test_flops_of_a_plain_matmul_written_as_a_convolution():
    assert _flops(
        "  %a = bf16[64,32]{1,0} parameter(0)\n  %b = bf16[32,16]{1,0} parameter(1)\n"
        "  ROOT %c = bf16[64,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    ) == 2 * (64 * 32 * 16)


def test_flops_of_a_batched_matmul_whose_window_is_mostly_padding():
    """The batch of 8 is a window of 8 taps, of which one meets each output's own matrix."""
    assert _flops(
        "  %a = bf16[8,64,32]{2,1,0} parameter(0)\n  %b = bf16[8,32,16]{2,1,0} parameter(1)\n"
        "  ROOT %c = bf16[8,64,16]{2,1,0} convolution(%a, %b), "
        "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf"
    ) == 2 * (8 * 64 * 32 * 16)


def test_flops_of_a_convolution_exclude_padding():
    # 5 outputs of 3 taps, one padding at each end.
    assert _flops(
        "  %a = f32[2,5,7]{2,1,0} parameter(0)\n  %b = f32[3,7,4]{2,1,0} parameter(1)\n"
        "  ROOT %c = f32[2,5,4]{2,1,0} convolution(%a, %b), "
        "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    ) == 2 * (2 * 4 * 7) * (5 * 3 - 2)
