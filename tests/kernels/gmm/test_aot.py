"""Compiles for every generation of TPU, in one process of its own: libtpu needs an environment."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import pytest

_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("name", _TOPOLOGIES)
def test_forward_and_gradients_compile_with_tiles_chosen_and_the_largest_that_fit(name):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    # The cache of compiled programs cannot read what was compiled for a TPU.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, __file__, _TOPOLOGIES[name]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 6
    assert [case for case, error in found.items() if error] == [], found


def _main(topology: str) -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from moelib.kernels.gmm.aot import legal_tiles
    from moelib.kernels.gmm.tiles import Job, candidates, choose, current_chip, vmem_bytes

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):
        chip = current_chip()
    jobs = [
        Job(4096, 2048, 2048, 8, 2, 2),
        Job(4096, 2048, 2048, 8, 2, 2, parts=2, saves=True),
        Job(4096, 2880, 2880, 4, 2, 2),
        Job(300, 200, 72, 3, 4, 4),
    ]
    jobs += [dataclasses.replace(job, weight_gradient=True) for job in (jobs[0], jobs[2])]
    found = {}
    for job in jobs:
        fitting = [t for t in candidates(job) if vmem_bytes(job, t) <= chip.vmem_bytes // 2]
        tiles = {choose(job, chip), max(fitting, key=lambda t: vmem_bytes(job, t))}
        for each, error in legal_tiles(job, device, sorted(tiles, key=str)).items():
            found[f"{job} {each}"] = error
    # One that cannot fit is told.
    huge = dataclasses.replace(choose(jobs[0], chip), m=16384)
    (error,) = legal_tiles(dataclasses.replace(jobs[0], m=65536), device, [huge]).values()
    assert "vmem" in str(error).lower(), error
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])
