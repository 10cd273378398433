"""8-bit weights in estimates: what is gathered, held and multiplied in 8 bits."""

import collections
import dataclasses

import jax
import pytest

from moelib.core.param import is_spec
from moelib.layers.quantization import Quantization
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.planning.estimate.activations import FULL
from moelib.planning.estimate.candidates import current_candidate, rules_of
from moelib.planning.estimate.estimate import Estimator
from moelib.planning.estimate.memory import Placement
from moelib.planning.estimate.transfers import weight_transfers
from moelib.planning.hardware.topologies import describe
from tests.planning import tiny_moe

SCHEMES = (None, Quantization.FP8_BLOCK, Quantization.FP8_TENSOR)


def of_scheme(scheme, cfg=None):
    """Returns a config in bfloat16, whose weights a scheme quantizes, and its workload."""
    cfg = (cfg or tiny_moe.dense()).clone(name="tiny", train_dtype="bfloat16")
    cfg.set(mesh_shape=mesh_shape_from_axes(fsdp=8)).model.quantization = scheme
    return cfg, tiny_moe.workload_of(cfg)


def estimate(cfg, work, topology="h100:1x8"):
    return Estimator(work, rules_of(cfg), {})(current_candidate(cfg, work, describe(topology)))


@pytest.mark.slow
def test_quantized_weights_are_gathered_and_held_in_8_bits():
    plain = estimate(*of_scheme(None, tiny_moe.config()))
    cfg, work = of_scheme(Quantization.FP8_BLOCK, tiny_moe.config())
    quantized = estimate(cfg, work)
    specs = cfg.instantiate(parent=None).trainer_state_specs.model
    elements = sum(s.size for s in jax.tree.leaves(specs, is_leaf=is_spec) if s.quantization)
    assert elements == sum(leaf.size for leaf in work.parameters if leaf.quantized) > 0
    assert quantized.memory["8-bit weights"] == elements / 8
    assert plain.memory["8-bit weights"] == 0
    wide = dataclasses.replace(
        work, parameters=tuple(dataclasses.replace(x, quantized=False) for x in work.parameters)
    )
    saved = estimate(cfg, wide).links_bytes - quantized.links_bytes
    assert saved >= elements * 7 / 8 > 0  # One byte of each, gathered once at least.


def test_8_bit_weights_are_gathered_where_others_are_windowed():
    found = []
    for scheme in (None, Quantization.FP8_BLOCK):
        cfg, work = of_scheme(scheme)
        dense = [x for x in work.parameters if "ffn" in x.axes]
        work = dataclasses.replace(work, parameters=tuple(dense))
        placement = Placement(
            work, current_candidate(cfg, work, describe("v6e:2x4")), rules_of(cfg)
        )
        transfers = weight_transfers(placement, FULL, is_tpu=True, windowed=True)
        sums = collections.Counter[str]()
        for each in transfers:
            sums[each.kind] += each.bytes * each.times
        found.append((sums, sum(x.size for x in dense)))
    (plain, num), (quantized, same) = found
    assert num == same > 0
    assert quantized["all-gather"] == 2 * num  # Bytes: forward, and recomputed with backward.
    assert plain["collective-permute"] > quantized["collective-permute"] > 0  # Sums of gradients.


def test_float8_units_multiply_where_there_is_one_scale_per_array():
    seconds = lambda scheme, name: estimate(*of_scheme(scheme), name).seconds_at_peak["compute"]
    plain, blocks, tensor = (seconds(scheme, "h100:1x8") for scheme in SCHEMES)
    assert tensor < plain == pytest.approx(blocks)
    plain, _, tensor = (seconds(scheme, "v6e:2x4") for scheme in SCHEMES)
    assert tensor == pytest.approx(plain)  # It has no such units.
