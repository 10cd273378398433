"""Names of topologies, and what is said of those that cannot be."""

import importlib.util

import pytest
from jax.experimental.pallas import tpu as pltpu

from moelib.planning.topologies import GENERATIONS, PlanError, topology
from moelib.train.throughput import peak_tflops


@pytest.mark.parametrize("name", ["v6x:2x2x1", "v6e", "banana:2x2"])
def test_an_unknown_generation_names_those_there_are(name):
    with pytest.raises(PlanError, match=rf"{name}.*v5e, v5p, v6e, tpu7x.*such as v6e:2x2x1"):
        topology(name)


def test_missing_libtpu_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'moelib\[tpu\]'"):
        topology("v6e:2x2x1")


def test_figures_agree_with_those_of_pallas_and_of_training():
    # Pallas says of v5p what one of its two cores has.
    for name, version in (("v5e", "TPU_V5E"), ("v6e", "TPU_V6E"), ("tpu7x", "TPU_7X")):
        info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[version], 1)
        ours = GENERATIONS[name]
        assert ours.flops_per_second == pytest.approx(info.bf16_ops_per_second, rel=0.01)
        assert ours.hbm_bytes_per_second == pytest.approx(info.mem_bw_bytes_per_second, rel=0.01)
    for generation in GENERATIONS.values():
        assert peak_tflops(generation.device_kind) == generation.flops_per_second / 1e12


@pytest.mark.parametrize("name", GENERATIONS)
def test_libtpu_describes_every_generation(name):
    pytest.importorskip("libtpu")
    shape = {"v5e": "2x2"}.get(name, "2x2x1")
    found = topology(f"{name}:{shape}")
    assert len(found.devices) == (8 if name == "tpu7x" else 4)
    assert found.devices[0].device_kind == found.generation.device_kind


def test_a_shape_that_libtpu_refuses_is_said_in_one_line():
    pytest.importorskip("libtpu")
    with pytest.raises(PlanError, match=r"v6e:3x7x1.*not divisible.*as in v6e:2x2x1") as error:
        topology("v6e:3x7x1")
    assert "\n" not in str(error.value)
