"""Shardings of parameters without logical axes, and a table of the shardings of all."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from moelib.core import tree
from moelib.core.context import names_below
from moelib.core.errors import UserError
from moelib.core.jaxpr import forward_pass
from moelib.core.param import ParameterSpec, is_spec
from moelib.core.tree import Batch
from moelib.layers.external import ExternalLayer
from moelib.models.model import Model
from moelib.parallel import sharding
from moelib.parallel.auto_sharding.specs import ShardingReport, auto_partition_specs
from moelib.parallel.mesh import describe_mesh
from moelib.runtime.progress import format_bytes
from moelib.runtime.table import Table
from moelib.train.settings import rules_of

logger = logging.getLogger(__name__)


def shard_external_layers(
    model: Model, mesh_shape: Mapping[str, int], example_batch: Callable[[], Batch]
) -> ShardingReport | None:
    """Shards the parameters of `ExternalLayer`s over the mesh axes "model" and "fsdp".

    Parameters with logical axes keep the table's shardings, and those computed with them follow; so
    do those that rules of `axes` keep whole. Parameters must not exist yet.

    Args:
        model: A model, which may itself be an `ExternalLayer`.
        mesh_shape: Sizes of the mesh axes.
        example_batch: Function that returns the batch of one data-parallel replica, as
            `jax.ShapeDtypeStruct`s; called if the mesh has an axis "model".

    Returns:
        The report of the trace; None if there was none.

    Raises:
        UserError: The errors of `auto_partition_specs`.
    """
    below = lambda layer: "/".join(names_below(model, layer) or ())
    layers = {below(layer): layer for layer, _ in model.walk() if isinstance(layer, ExternalLayer)}
    path_of = lambda prefix, name: f"{prefix}/{name}" if prefix else name
    used: dict[str, PartitionSpec] = {}
    shapes: dict[str, ParameterSpec] = {}
    report = None
    if layers and (num_shards := mesh_shape.get("model", 1)) > 1:
        specs, sizes = model.create_parameter_specs_recursively(), {"model": num_shards}
        loss = lambda params, batch: forward_pass(model)(params, batch)[0][0]
        shapes = tree.by_path(specs, is_spec)
        ruled = {path_of(prefix, name) for prefix, layer in layers.items() for name in layer.ruled}
        overrides = [
            (
                re.escape(path),
                sharding.partition_spec(each.axes, sizes, shape=each.shape, array=path),
            )
            for path, each in shapes.items()
            if path in ruled and (model.is_auto_sharded or {*each.axes} <= {None, "layers"})
        ]
        try:
            found = auto_partition_specs(
                loss, specs, example_batch(), num_shards=num_shards, overrides=overrides
            )
        except UserError as error:
            raise type(error)(str(error).replace("overrides:", f"{model.name}: axes:")) from error
        used = tree.by_path(found.use_specs, lambda x: isinstance(x, PartitionSpec))
        report = found.report
        logger.info("Shardings of %s:\n%s", model.name, report)
        for line in report.unknown_lines():
            logger.warning("Shardings of %s: %s.", model.name, line)
    for prefix, layer in layers.items():
        of_layer = {}
        for name, spec in tree.by_path(layer.layer_parameter_specs(), is_spec).items():
            path = path_of(prefix, name)
            if (split := used.get(path)) is not None:
                copies = len(shapes[path].shape) - len(spec.shape)  # Leading dimensions.
                of_layer[name] = PartitionSpec(*tuple(split)[copies:])
        layer.set_shardings(of_layer, mesh_shape)
    return report


def shardings_table(trainer: Any) -> Table:
    """Returns the sharding of every parameter of an `SpmdTrainer`, its bytes per device, and why.

    No device is used, unless a size of the mesh is -1.
    """
    mesh, report = trainer.mesh_sizes, trainer.sharding_report
    rows, total = [], 0
    with sharding.sharding_rules(rules_of(trainer.config)):
        for path, spec in tree.by_path(trainer.trainer_state_specs.model, is_spec).items():
            split = sharding.partition_spec(spec.axes, mesh, shape=spec.shape, array=path)
            entries = sharding.mesh_axes_of(split)
            parts = math.prod(mesh[axis] for entry in entries for axis in entry)
            held = tree.count_bytes(spec) // parts
            total += held
            named = {a: name for name in spec.axes if name for a in sharding.mesh_axes(name, mesh)}
            reasons = [
                f"[{dim}] {', '.join({named[axis]: 0 for axis in axes})} over {', '.join(axes)}"
                for dim, axes in enumerate(entries)
                if axes
            ]
            whole = {**report.whole, **report.small}.get(path) if report else None
            shape = ", ".join(map(str, spec.shape))
            why = "; ".join(reasons) or whole or "no dimension has a rule for this mesh"
            rows.append(
                (path, f"{spec.dtype}[{shape}]", str(tuple(split)), format_bytes(held), why)
            )
    footnotes = [f"{format_bytes(total)} of parameters per device on {describe_mesh(mesh)}"]
    columns = ("parameter", "shape", "sharding", "per device>", "why")
    return Table("", columns, rows, footnotes + (str(report).splitlines() if report else []))
