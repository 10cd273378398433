"""The sweep: order of rows, prices, and how long it takes."""

import pytest

from experiments import flame_moe, gpt_oss, open_models
from moelib.core.errors import UserError
from moelib.parallel.mesh import create_device_mesh
from moelib.planning.estimate.sweep import read_prices, sweep
from moelib.planning.hardware.topologies import describe, topology, torus_devices
from tests.kernels.tpu_topology import needs_libtpu
from tests.planning import tiny_moe

TOPOLOGIES = ("v6e:2x2", "h100:1x8")


@pytest.fixture(scope="module")
def found():
    return sweep(tiny_moe.config(), TOPOLOGIES)


def test_rows_are_sorted_by_cost_the_best_of_each_topology_first(found):
    first = [each.candidate.topology.name for each in found.rows[:2]]
    assert sorted(first) == sorted(TOPOLOGIES)
    for part in (found.rows[:2], found.rows[2:]):
        costs = [each.middle_dollars for each in part]
        assert costs == sorted(costs)
    meshes = [(each.candidate.topology.name, each.candidate.mesh) for each in found.rows]
    assert len(set(meshes)) == len(meshes) < found.num_candidates
    for each in found.rows:
        best = next(r for r in found.rows if r.candidate.topology == each.candidate.topology)
        assert best.middle_dollars <= each.middle_dollars


def test_prices_change_the_order(found):
    assert found.rows[0].candidate.topology.name == "v6e:2x2"
    turned = sweep(tiny_moe.config(), TOPOLOGIES, prices={"v6e": 1e3})
    assert turned.rows[0].candidate.topology.name == "h100:1x8"


def test_a_topology_that_cannot_take_the_mesh_leaves_the_others():
    found = sweep(tiny_moe.config(), TOPOLOGIES, mesh="fsdp=8")
    assert {each.candidate.topology.name for each in found.rows} == {"h100:1x8"}
    (reason,) = found.refused
    assert "topology v6e:2x2: mesh fsdp=8 takes 8 devices, but there are 4" in reason


def test_errors_of_the_traced_model_are_plan_errors():
    cfg = tiny_moe.config().clone()
    cfg.model.decoder.block[0].feed_forward.set(shared_gate=True, shared_experts=None)
    with pytest.raises(UserError, match=r"shared_gate=True without shared_experts"):
        sweep(cfg, TOPOLOGIES)


@pytest.mark.slow
def test_candidates_that_do_not_fit_come_last_nearest_first():
    cfg = tiny_moe.config().clone()
    cfg.model.set(vocab_size=2**24, dim=2**10)
    cfg.input.vocab_size = 2**24
    rows = sweep(cfg, ["v6e:2x2"]).rows
    missing = [each.bytes_held - each.capacity for each in rows if not each.fits]
    assert missing
    assert missing == sorted(missing)
    assert [each.fits for each in rows] == sorted((each.fits for each in rows), reverse=True)
    assert {each.limit for each in rows if not each.fits} == {"memory"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "JSON"),
        ('{"v6x": 1}', r"'v6x'.*'v6e'"),
        ('{"v6e": NaN}', "'v6e': nan"),
        ('{"v6e": true}', "'v6e': True"),
        ('{"v6e": -1}', "'v6e': -1"),
        ("{", "prices.json"),
    ],
)
def test_prices_are_read_and_what_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "prices.json"
    path.write_text('{"v6e": 1.5}')
    assert read_prices(str(path)) == {"v6e": 1.5}
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_prices(str(path))


@pytest.mark.slow
def test_large_topologies_have_thousands_of_candidates():
    cfg = open_models.named_trainer_configs()["qwen3-30b-a3b"]()
    assert sweep(cfg, ["v6e:8x8", "v5p:4x4x4", "h100:8x8"]).num_candidates > 10_000


CONFIGS = {
    **flame_moe.named_trainer_configs(),
    **gpt_oss.named_trainer_configs(),
    **open_models.named_trainer_configs(),
}
_TORI = ["v6e:4x4", "v5e:8x8", "v6e:16x16", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "tpu7x:4x4x4"]
_SLICES = ["2*v6e:4x8", "4*v5p:2x2x4"]


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("config", CONFIGS)
def test_the_best_meshes_of_a_named_config_can_be_built(config):
    cfg = CONFIGS[config]()
    found = sweep(cfg, [*_TORI, *_SLICES]).rows
    for name in (*_TORI, *_SLICES):
        rows = [row for row in found if row.candidate.topology.name == name][:10]
        devices = topology(name).devices if name in _SLICES else torus_devices(describe(name))
        for row in rows:
            shape = row.candidate.apply(cfg).mesh_shape
            mesh = create_device_mesh(shape, cfg.mesh_axis_names, devices)
            sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
            assert sizes == row.candidate.mesh.sizes
    assert len({row.candidate.topology.name for row in found}) >= 3
