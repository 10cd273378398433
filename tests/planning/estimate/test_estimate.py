"""Estimates are exact for the state, and near compiled and published figures elsewhere."""

import dataclasses
import math

import jax
import pytest

from experiments import gpt_oss
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.planning.estimate.activations import DOTS, FULL, NONE, OWN
from moelib.planning.estimate.candidates import (
    Candidate,
    Mesh,
    candidates,
    current_candidate,
    rules_of,
)
from moelib.planning.estimate.estimate import Estimator
from moelib.planning.estimate.links import Links
from moelib.planning.estimate.memory import Placement
from moelib.planning.estimate.transfers import token_transfers, traffic
from moelib.planning.estimate.workload import read_workload
from moelib.planning.hardware.topologies import describe
from moelib.planning.hlo import program as hlo
from moelib.planning.report.collectives import collectives_by_axes
from moelib.planning.report.step_report import total
from moelib.train.state import abstract_state
from tests.planning import tiny_moe

MIB, GIB = 2**20, 2**30
EIGHT = describe("h100:1x8")


@pytest.fixture(scope="module")
def tiny():
    cfg, work = tiny_moe.config(), tiny_moe.workload()
    return cfg, work, Estimator(work, rules_of(cfg), {})


def _bytes(specs, shardings):
    arrays = jax.tree.leaves(abstract_state(specs, shardings))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def test_parameters_and_optimizer_equal_those_of_the_trainer(tiny):
    cfg, work, estimator = tiny
    by_mesh = {each.mesh: each for each in candidates(cfg, work, EIGHT)}
    assert len(by_mesh) > 10
    for each in list(by_mesh.values())[::8]:
        trainer = each.apply(cfg).instantiate(parent=None)
        specs, shardings = trainer.trainer_state_specs, trainer.trainer_state_shardings
        memory = estimator(each).memory
        assert memory["parameters"] == _bytes(specs.model, shardings.model)
        assert memory["optimizer"] == _bytes(specs.learner, shardings.learner)


@pytest.mark.slow
def test_state_and_batch_are_the_arguments_of_the_compiled_step(tiny):
    cfg, work, estimator = tiny
    each = next(c for c in candidates(cfg, work, EIGHT) if c.mesh.sizes == {"expert": 2, "fsdp": 4})
    trainer = each.apply(cfg).instantiate(parent=None)
    arguments = trainer.compile_train_step().memory_analysis().argument_size_in_bytes
    memory = estimator(each).memory
    state = memory["parameters"] + memory["optimizer"]
    batch = 4 * 4 * work.tokens // 8  # Four arrays of int32 at most.
    assert state <= arguments <= state + batch + 64


@pytest.mark.slow
def test_an_offloaded_optimizer_takes_no_device_memory(tiny):
    cfg, work, _ = tiny
    cfg = cfg.clone()
    cfg.learner.offload_state = True
    held = sum(leaf.size for leaf in read_workload(cfg).optimizer)
    assert 0 < held < 100 < sum(leaf.size for leaf in work.optimizer)


def test_larger_batches_and_less_recomputation_hold_more(tiny):
    cfg, work, estimator = tiny
    found = [estimator(c) for c in candidates(cfg, work, describe("h100:1x2"), mesh="expert=2")]
    held = {
        (e.candidate.remat, e.candidate.batch_per_device): e.memory["activations"] for e in found
    }
    rows = max(rows for _, rows in held)
    assert rows > 1
    assert held[FULL, rows] == pytest.approx(rows * held[FULL, 1])
    assert held[FULL, rows] < held[OWN, rows]  # Which recomputes nothing.


def test_state_falls_as_devices_rise(tiny):
    cfg, work, estimator = tiny
    held = []
    for name in ("h100:1x2", "h100:1x4", "h100:1x8"):
        fsdp = candidates(cfg, work, describe(name), mesh="fsdp=-1")[0]
        held.append(estimator(fsdp).memory["optimizer"])
    assert held[0] > 1.9 * held[1] > 1.9 * 1.9 * held[2]


def test_times_and_prices_go_together(tiny):
    cfg, work, estimator = tiny
    each = estimator(candidates(cfg, work, EIGHT)[0])
    low, high = each.seconds
    assert 0 < low < high
    assert each.tokens_per_second == pytest.approx((work.tokens / 8 / high, work.tokens / 8 / low))
    price = each.candidate.topology.accelerator.dollars_per_hour
    dollars = price * 8 * low / 3600 * 1e9 / work.tokens
    assert each.dollars_per_billion_tokens[0] == pytest.approx(dollars)
    days, whole = each.whole_run(2e9)
    assert whole[0] == pytest.approx(2 * dollars)
    assert days[1] == pytest.approx(high * 2e9 / work.tokens / 86_400)
    cheaper = Estimator(work, rules_of(cfg), {"h100": price / 2})(each.candidate)
    assert cheaper.dollars_per_billion_tokens[0] == pytest.approx(dollars / 2)


def test_recomputation_adds_the_decoders_forward_pass(tiny):
    cfg, work, _ = tiny
    assert work.recomputed_flops(NONE) == 0
    assert work.recomputed_flops(FULL) == work.decoder_flops
    assert 0 < work.recomputed_flops(DOTS) == work.routed_flops < work.decoder_flops
    model = cfg.model.clone(name="model").instantiate(parent=None)
    assert work.model_flops == pytest.approx(model.flops_per_token(seq_len=cfg.input.seq_len))


@pytest.mark.slow
def test_the_published_step_on_four_tpus_is_near_the_compiled_one():
    # Compiled for v6e:2x2: 12.275 GiB at the peak, 9.86 of arguments; all-gathers of 7,173 MiB,
    # reduce-scatters of 1,648.8, ragged all-to-alls of 736 a device.
    cfg = gpt_oss.named_trainer_configs()["gpt-oss-3b-v6e4"]()
    work = read_workload(cfg)
    estimator = Estimator(work, rules_of(cfg), {})
    each = current_candidate(cfg, work, describe("v6e:2x2"))
    found, results = estimator(each), estimator(each).collectives
    assert (each.remat, each.batch_per_device) == (OWN, 1)
    state = found.memory["parameters"] + found.memory["optimizer"]
    assert state / GIB == pytest.approx(9.86, rel=1e-3)
    assert found.bytes_held / GIB == pytest.approx(12.275, rel=0.1)
    assert results["all-gather"] / MIB == pytest.approx(7173, rel=0.02)
    assert results["reduce-scatter"] / MIB == pytest.approx(1648.8, rel=0.001)
    assert results["all-to-all"] / MIB == 8
    assert results["ragged-all-to-all"] / MIB == pytest.approx(736, rel=0.001)
    assert found.model_flops == pytest.approx(4.047e12, rel=0.01)  # MaxText's own count.
    assert found.seconds[0] < 0.182 < found.seconds[1]  # Measured with MaxText.


@pytest.mark.slow
def test_slots_of_a_capacity_are_sent_full_or_not():
    cfg = tiny_moe.config().clone()
    for layer in cfg.model.decoder.block:
        capacity = CapacityDispatcher.default_config().set(capacity_factor=2.0)
        layer.feed_forward.dispatcher = capacity
    work = read_workload(cfg)
    estimator = Estimator(work, rules_of(cfg), {})
    each = Candidate(EIGHT, Mesh((("expert", 8),)), cfg.input.global_batch_size / 8, 1, NONE)
    trainer = each.apply(cfg).instantiate(parent=None)
    program = hlo.parse(trainer.compile_train_step().as_text())
    report = collectives_by_axes(program, dict(trainer.mesh().shape))
    results = estimator(each).collectives
    sent = total(report, "all-to-all")
    assert sent is not None
    assert sent.bytes == results["all-to-all"]  # Embeddings go to their tokens, too.
    assert "ragged-all-to-all" not in results
    # Twice K rows per token; four parts of a sequence have the slots of a whole one each.
    assert (
        estimator(each).memory["dispatch"]
        == each.batch_per_device * work.seq_len * work.block.routed
    )
    apart = Candidate(EIGHT, Mesh((("expert", 2), ("seq", 4))), each.batch_per_device * 4, 1, NONE)
    assert estimator(apart).memory["dispatch"] == 4 * estimator(each).memory["dispatch"]
    # A layer's experts compute twice as many rows as are chosen, forward and backward.
    more = estimator(each).hardware_flops - estimator(each).model_flops
    assert more == pytest.approx(3 * work.routed_flops * work.tokens / 8)


def test_slots_are_distinguished_from_tokens():
    cfg = tiny_moe.config().clone()
    layer = cfg.model.decoder.block[0].feed_forward
    layer.set(num_experts=128, num_experts_per_token=8)  # A sequence of the trace has 128 tokens.
    layer.dispatcher = CapacityDispatcher.default_config().set(capacity_factor=1.0)
    found = read_workload(cfg).block.routed
    layer.dispatcher.capacity_factor = 2.0
    # Choices themselves are no slots.
    assert read_workload(cfg).block.routed / found == pytest.approx(2, rel=0.02)


def test_routed_rows_do_not_depend_on_the_receive_capacity(tiny):
    cfg, work, _ = tiny
    cfg = cfg.clone()
    cfg.model.decoder.block[0].feed_forward.dispatcher.buffer_factor = 0.5
    read = read_workload(cfg)
    assert read.block == work.block
    each = Candidate(EIGHT, Mesh((("expert", 8),)), 1, 1, NONE)
    whole = Placement(work, each, rules_of(cfg)).memory(each)["dispatch"]
    held = Placement(read, each, rules_of(cfg)).memory(each)["dispatch"]
    assert held / whole == 0.5 / 1.25  # A round holds 1.25 times K rows.


def test_the_receive_capacity_grows_with_devices_beyond_the_blocks_of_experts(tiny):
    cfg, work, _ = tiny
    work = dataclasses.replace(
        work,
        moe=dataclasses.replace(work.moe, buffer_factor=1.5, buffer_blocks=2, round_factor=None),
    )
    held = {}
    for n in (1, 2, 4, 8):
        each = Candidate(describe(f"h100:1x{n}"), Mesh((("expert", n),)), 1, 1, NONE)
        held[n] = Placement(work, each, rules_of(cfg)).memory(each)["dispatch"]
    assert [held[n] / held[1] for n in (2, 4, 8)] == [1.5, 3, 6]


def test_weights_of_layers_are_gathered_for_each_pass():
    cfg = tiny_moe.config().clone()
    cfg.model.decoder.block = cfg.model.decoder.first_layers
    cfg.model.decoder.first_layers = []
    work = read_workload(cfg)
    assert work.moe is None
    inside = [leaf for leaf in work.parameters if leaf.in_decoder and "embed" in leaf.axes]
    outside = [leaf for leaf in work.parameters if leaf.axes == ("embed", "vocab")]
    size = lambda leaves: sum(leaf.size * leaf.compute_itemsize for leaf in leaves)
    estimator = Estimator(work, rules_of(cfg), {})
    for remat, times in ((FULL, 3), (DOTS, 3), (NONE, 2)):
        each = Candidate(EIGHT, Mesh((("fsdp", 8),)), 1, 1, remat)
        found = estimator(each).collectives["all-gather"]
        assert found == times * size(inside) + size(outside)


def test_ring_attention_sends_keys_and_values_and_once_their_gradients(tiny):
    cfg, work, _ = tiny
    sent = {}
    for sizes in ({"seq": 2}, {"seq": 2, "model": 2}, {"model": 2}):
        topology = describe(f"h100:1x{math.prod(sizes.values())}")
        each = Candidate(topology, Mesh(tuple(sizes.items())), 1, 1, NONE)
        transfers = token_transfers(Placement(work, each, rules_of(cfg)), is_tpu=False)
        links = Links(topology, each.mesh)
        sent[tuple(sizes)] = traffic(transfers, links, recomputed=False).links_bytes
    # Twice in the dtype of the computation and once in float32, each in two turns of the ring.
    elements = 2 * work.num_layers * work.kv_width
    alone = elements * (2 * work.compute_itemsize + 4)
    assert sent["seq",] == pytest.approx(alone)
    assert sent["seq", "model"] - sent["model",] == pytest.approx(alone / 2)
