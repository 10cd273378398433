"""A trainer's step over several slices."""

import pytest

from experiments import flame_moe
from moelib.parallel.mesh import HybridMeshShape, mesh_shape_from_axes
from tests.parallel.slices import two_slices


@pytest.mark.slow
def test_a_step_lowers_for_two_slices():
    pytest.importorskip("libtpu")
    cfg = flame_moe.tiny().set(
        dir="unused",
        mesh_shape=HybridMeshShape(
            ici=mesh_shape_from_axes(expert=2, fsdp=2), dcn=mesh_shape_from_axes(data=2)
        ),
    )
    trainer = cfg.instantiate(parent=None, devices=two_slices())
    with trainer.on_mesh():
        text = trainer.trace_train_step().lower().as_text()
    assert '"data"=2, "expert"=2, "fsdp"=2' in text
    rows = trainer.batch_sharding.devices_indices_map((8, 128))
    by_slice = {0: set(), 1: set()}
    for device, (where, _) in rows.items():
        by_slice[device.slice_index].add(where.start)
    assert by_slice == {0: {None, 1, 2, 3}, 1: {4, 5, 6, 7}} or by_slice[0] == {0, 1, 2, 3}
