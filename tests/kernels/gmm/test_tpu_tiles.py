import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moelib.kernels.gmm.tpu_tiles import (
    Chip,
    Job,
    candidates,
    choose,
    current_chip,
    modelled_seconds,
    vmem_bytes,
)
from tests.kernels.gmm.cases import rows_computed_over_routed

_CHIPS = {
    version.name: Chip(
        info.vmem_capacity_bytes,
        float(info.bf16_ops_per_second),
        float(info.mem_bw_bytes_per_second),
        info.num_cores,
    )
    for version, cores in (
        (pltpu.ChipVersion.TPU_V5E, 1),
        (pltpu.ChipVersion.TPU_V5P, 2),
        (pltpu.ChipVersion.TPU_V6E, 1),
        (pltpu.ChipVersion.TPU_7X, 1),
    )
    for info in [pltpu.get_tpu_info_for_chip(version, cores)]
}


@pytest.mark.parametrize(("chip", "parts"), [*((chip, 1) for chip in _CHIPS), ("TPU_V6E", 2)])
def test_at_256_rows_per_expert_at_most_1_3_are_computed_for_each_routed(chip, parts):
    job = Job(4096, 2048, 2048, 8, 2, parts)  # Half of the rows are a worst case's.
    tiles = choose(job, _CHIPS[chip])
    rng = np.random.default_rng(0)
    groups = rng.multinomial(2048, np.full(8, 1 / 8), size=200)
    ratios = [rows_computed_over_routed(sizes.tolist(), 4096, tiles) for sizes in groups]
    assert np.mean(ratios) <= 1.3


@pytest.mark.parametrize("chip", _CHIPS)
def test_a_groups_matrix_stays_in_vmem_where_it_fits(chip):
    assert choose(Job(2048, 2048, 2048, 8, 2), _CHIPS[chip]).k == 2048


@pytest.mark.parametrize("chip", _CHIPS)
@pytest.mark.parametrize("weight_gradient", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n", "g", "dtype_bytes"),
    [
        (2048, 2048, 2048, 8, 2),
        (65536, 7168, 2048, 32, 2),
        (65536, 2048, 7168, 32, 2),
        (4096, 2880, 2880, 4, 2),  # GPT-OSS: no power of two.
        (13, 20, 12, 5, 4),
        (1, 128, 128, 1, 2),
        (512, 100001, 128 * 1009, 2, 4),
    ],
)
def test_what_is_chosen_is_legal_and_the_fastest_that_fits(
    chip, weight_gradient, m, k, n, g, dtype_bytes
):
    job = Job(m, k, n, g, dtype_bytes, weight_gradient=weight_gradient)
    tiles = choose(job, _CHIPS[chip])
    assert tiles.m % 16 == 0
    assert tiles.m % tiles.sub_m == 0
    for side, size in ((tiles.k, k), (tiles.n, n)):
        assert side == size or side % 128 == 0
        assert size % 128 or size % side == 0
    limit = _CHIPS[chip].vmem_bytes // 2
    assert vmem_bytes(job, tiles) <= limit
    times = [
        modelled_seconds(job, other, _CHIPS[chip])
        for other in candidates(job)
        if vmem_bytes(job, other) <= limit
    ]
    assert modelled_seconds(job, tiles, _CHIPS[chip]) == min(times)
    # No faster than a chip that wastes nothing.
    flops = 2 * m * k * n / (_CHIPS[chip].flops_per_second * _CHIPS[chip].num_cores)
    assert min(times) >= flops


def test_two_cores_get_a_tile_each():
    tiles = choose(Job(2048, 2048, 2048, 8, 2), _CHIPS["TPU_V5P"])
    assert tiles.n <= 1024


def test_an_unknown_chip_has_the_least_vmem():
    assert current_chip().vmem_bytes == min(chip.vmem_bytes for chip in _CHIPS.values())
