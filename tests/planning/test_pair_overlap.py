"""Transfers of one pass of a pair under matmuls of the other, in compiled steps."""

import pytest

from experiments import open_models
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.parallel.pipeline.pair import SCOPES
from moelib.parallel.pipeline.schedule import Schedule
from moelib.planning.compiled.in_subprocess import CompileOptions, compile_in_subprocess
from moelib.planning.hlo.program import parse

_COMPUTE = "fusion", "custom-call"  # Others forward their results.


def _step():
    """Returns the widths of Qwen3-30B-A3B: with less, XLA expects no time to be gained."""
    cfg = open_models.named_trainer_configs()["qwen3-30b-a3b"]()
    cfg.model.decoder.set(num_layers=4, remat=None)
    cfg.model.vocab_size = 4096
    cfg.input.set(seq_len=4096, vocab_size=4096, global_batch_size=8)
    cfg.set(evalers={}, checkpointer=None, mesh_rules=(), dir="unused", num_microbatches=4)
    cfg.mesh_shape = mesh_shape_from_axes(pipeline=2, expert=2)
    return cfg.set(pipeline_schedule=Schedule.DUALPIPE_V)


def _hidden(text):
    """Returns, per pass of a pair, the matmuls of the other pass under each all-to-all."""
    found = {scope: [] for scope in SCOPES}
    scope_of = lambda each: next((scope for scope in SCOPES if scope in each.op_name), None)
    for computation in parse(text).computations.values():
        begun, under = {}, {}
        for each in computation.instructions.values():
            if each.opcode == "ragged-all-to-all-start" and scope_of(each):
                begun[each.name], under[each.name] = scope_of(each), []
            elif each.opcode == "ragged-all-to-all-done" and each.operands[0] in begun:
                found[begun.pop(each.operands[0])].append(under.pop(each.operands[0]))
            elif each.op_name.endswith(("/pallas_call", "/dot_general")):
                for start, scope in begun.items():
                    if each.opcode in _COMPUTE and scope_of(each) not in (None, scope):
                        under[start].append(each.name)
    return found


@pytest.mark.slow
def test_a_pass_of_a_pair_computes_under_the_transfers_of_the_other(tmp_path):
    pytest.importorskip("libtpu")
    options = CompileOptions(dump_dir=str(tmp_path))
    outcome = compile_in_subprocess(_step(), "v6e:2x2", options, name="pair")
    assert outcome.report is not None, outcome.failure
    first, second = _hidden((tmp_path / "hlo_optimized.txt").read_text()).values()
    assert len(first) == len(second) == 3  # All are asynchronous.
    assert sum(map(bool, first)) >= 2  # Those of rows; the third is that of routing weights.
