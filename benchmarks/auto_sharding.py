"""Traced and hand-written shardings compared: `python -m benchmarks.auto_sharding [NAME ...]`.

Each model of `benchmarks.sharding_models` is a list of arrays without names. Its loss and gradient
are compiled for eight CPU devices with the traced specs, those from shapes alone and those written
by hand; the table counts their collectives. With `--gradients`, the gradients under the
traced specs are compared with those of one device on meshes of 1 x 8, 2 x 4 and 4 x 2 (FSDP x TP).
With `--topology=v5e:2x4`, the programs are compiled for described TPUs instead. Below the table is
the CPU time of the trace and the integer program for 80 layers that are not in a scan.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import sharding_models
from benchmarks.sharding_models import Model
from moelib.core import tree
from moelib.parallel.auto_sharding.constrain import constrain_at_use
from moelib.parallel.auto_sharding.specs import AutoShardings, auto_partition_specs
from moelib.planning.choose_specs import Candidate, choose_specs, compile_candidate
from moelib.runtime.command_line import flag, run_command
from moelib.runtime.simulated import simulate_devices
from moelib.runtime.table import Table, print_table

_AXES = ("fsdp", "model")
_GRADIENT_MESHES = ((1, 8), (2, 4), (4, 2))
_SHORT = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    gradients: bool = flag(False, "Compare gradients with those of one device on three meshes.")
    topology: str | None = flag(None, "Compile for these described TPUs, such as v5e:2x4.")


@contextlib.contextmanager
def foreign_models() -> Iterator[None]:
    """Allows the promotions of ranks and dtypes that models of other libraries need."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def without_names(model: Model) -> Model:
    """Returns the model with a list of arrays as its parameters."""
    leaves, structure = jax.tree.flatten(model.params)

    def loss(leaves: Any, *batch: Any) -> jax.Array:
        return model.loss(jax.tree.unflatten(structure, leaves), *batch)

    return model._replace(loss=loss, params=leaves, hand=None)


def hand_specs(model: Model) -> list[PartitionSpec]:
    """Returns the hand-written specs, in the order of the parameters' leaves."""
    paths = [path for path, _ in tree.flatten_items(model.params)]
    default = PartitionSpec()
    return list(tree.match_rules(paths, model.hand or (), default=default, field="hand").values())


def gradient_error(model: Model, found: AutoShardings, mesh: jax.sharding.Mesh) -> float:
    """Returns the largest error of a sharded gradient, relative to the largest entry of its array.

    The reference is the gradient on one device. An array whose gradient is zero but for rounding,
    such as the bias of keys, is measured by a hundredth of the largest entry of all arrays.
    """
    step = jax.grad(constrain_at_use(model.loss, found.use_specs))
    expected = jax.jit(jax.grad(model.loss))(model.params, *model.batch)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), found.specs)
    with jax.set_mesh(mesh):
        grads = jax.jit(step, out_shardings=shardings)(
            jax.device_put(model.params, shardings), *model.batch
        )
    largest = [np.max(np.abs(each)) for each in expected]
    return max(
        float(np.max(np.abs(np.asarray(a) - b)) / max(size, 1e-2 * max(largest)))
        for a, b, size in zip(grads, expected, largest, strict=True)
    )


def _collectives(candidate: Candidate | None) -> str:
    if candidate is None:
        return "-"
    found: dict[str, tuple[int, int]] = {}
    for each in candidate.collectives:
        count, size = found.get(each.kind, (0, 0))
        found[each.kind] = count + each.count, size + each.bytes
    return " + ".join(
        f"{_SHORT.get(kind, kind)} {count} ({size / 1e6:.2f})"
        for kind, (count, size) in sorted(found.items())
    )


def cpu_seconds(model: Model) -> float:
    """Returns the CPU seconds of the trace and the integer program for 8 shards."""
    start = time.process_time()
    auto_partition_specs(model.loss, model.params, *model.batch, num_shards=8)
    return time.process_time() - start


def compare(named: Model, mesh: jax.sharding.Mesh, *, gradients: bool) -> list[str]:
    """Returns a row of the table."""
    model, by_hand = without_names(named), hand_specs(named)
    choice = choose_specs(model.loss, model.params, *model.batch, mesh=mesh)
    found = {each.name: each for each in choice.candidates}
    if named.hand:
        found["hand"] = compile_candidate(
            "hand", model.loss, model.params, *model.batch, mesh=mesh, specs=by_hand
        )
    equal = sum(a == b for a, b in zip(choice.traced.specs, by_hand, strict=True))
    row = [
        named.name,
        *(_collectives(found.get(name)) for name in ("traced", "shapes", "hand")),
        f"{equal}/{len(by_hand)}" if named.hand else "-",
        min(found.values(), key=lambda each: each.cost).name,
    ]
    if gradients:
        for shape in _GRADIENT_MESHES:
            other = jax.make_mesh(shape, _AXES, axis_types=(AxisType.Auto,) * 2)
            specs = auto_partition_specs(
                model.loss,
                model.params,
                *model.batch,
                num_shards=shape[1],
                fsdp_shards=shape[0],
            )
            row.append(f"{gradient_error(model, specs, other):.1e}")
    return row


def run(flags: Flags, names: Sequence[str]) -> None:
    """Prints the table of the models whose names contain one of the arguments; of all without."""
    jax.config.update("jax_platforms", "cpu")  # No accelerator is used.
    if flags.topology:
        from moelib.planning.hardware.topologies import topology

        devices = np.array(topology(flags.topology).devices).reshape(1, -1)
        mesh = jax.sharding.Mesh(devices, _AXES, axis_types=(AxisType.Auto,) * 2)
    else:
        simulate_devices(8)
        mesh = jax.make_mesh((1, 8), _AXES, axis_types=(AxisType.Auto,) * 2)
    columns = ["model", "traced", "shapes", "hand", "equal specs", "cheapest"]
    if flags.gradients:
        columns += [f"error {a}x{b}>" for a, b in _GRADIENT_MESHES]
    rows = []
    with foreign_models():
        deep = without_names(sharding_models.llama("Llama", layers=80))
        seconds = f"{len(deep.params)} arrays of 80 layers: {cpu_seconds(deep):.1f} s of CPU time"
        for build in sharding_models.models():
            model = build()
            if not names or any(part.lower() in model.name.lower() for part in names):
                rows.append(compare(model, mesh, gradients=flags.gradients))
    title = "Collectives, number (and MB of results), per step"
    print_table(Table(title, columns, rows, [seconds]))


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.auto_sharding", Flags, run, sys.argv[1:], __doc__ or ""))
