"""Metrics of a step: one vector on the devices, names and numbers on the host.

Hundreds of small arrays per step would cost more than the step of a small model; one does not.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.context import is_aux_loss
from moelib.core.metrics import Metric, Scalars, WeightedScalar, is_metric, weighted

NON_FINITE = "non_finite"  # Metric: 1 if training cannot continue from the state, else 0.


@functools.partial(jax.tree_util.register_dataclass, data_fields=["vector"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class PackedMetrics:
    """Metrics packed into one array."""

    vector: Any  # float32 [number of values].
    layout: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape), in the order of the vector.


def pack(metrics: dict[str, Any]) -> PackedMetrics:
    """Packs metrics, scalars or arrays by name."""
    names = sorted(metrics)
    layout = tuple((name, jnp.shape(metrics[name])) for name in names)
    values = [jnp.ravel(jnp.asarray(metrics[name], jnp.float32)) for name in names]
    return PackedMetrics(jnp.concatenate(values), layout)


def unpack(packed: PackedMetrics) -> Scalars:
    """Returns numbers by name, those of arrays as "name/0", "name/1"; waits for the step."""
    values = np.asarray(packed.vector).tolist()
    scalars: Scalars = {}
    start = 0
    for name, shape in packed.layout:
        size = math.prod(shape)
        for i in range(size):
            scalars[f"{name}/{i}" if shape else name] = values[start + i]
        start += size
    return scalars


def as_metric(value: Any, weight: Any = 1.0) -> Any:
    """Returns a metric in float32; any other value becomes a WeightedScalar with the weight."""
    if is_metric(value):
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), value)
    value = jnp.asarray(value, jnp.float32)
    return WeightedScalar(value, jnp.broadcast_to(jnp.asarray(weight, jnp.float32), value.shape))


def collect(
    loss: WeightedScalar, metrics: Any, collection: Any, batch: Any, aux_loss: WeightedScalar
) -> dict[str, Metric]:
    """Returns all metrics of a forward pass by name.

    `loss` (nats per token) excludes auxiliary losses; `aux_loss` is their weighted sum;
    `bytes_per_token` is the mean length of a target in bytes of text. Each auxiliary loss,
    unweighted, and each summary of a layer has its path as name, and is a mean over the tokens of
    `aux_loss` unless it has its own number.
    """
    found: dict[str, Metric] = {"loss": loss, "aux_loss": aux_loss}
    for name, value in tree.flatten_items(metrics, is_leaf=is_metric):
        found[name] = as_metric(value, loss.weight)
    for name, value in tree.flatten_items(collection.summaries, is_leaf=is_metric):
        found[name] = as_metric(value, aux_loss.weight)
    for name, value in tree.flatten_items(collection.aux_losses, is_leaf=is_aux_loss):
        weight = aux_loss.weight if value.num_tokens is None else value.num_tokens
        found[name] = as_metric(value.value, weight)
    if "target_num_bytes" in batch:
        num_bytes = jnp.sum(batch["target_num_bytes"].astype(jnp.float32))
        found["bytes_per_token"] = weighted(num_bytes / jnp.maximum(loss.weight, 1.0), loss.weight)
    return found


def language_metrics(scalars: Scalars) -> Scalars:
    """Returns `perplexity`, and `bits_per_byte` if the bytes of the targets are known.

    Both derive from the mean nats per token: `cross_entropy`, or `loss` if there is none.
    """
    nats = scalars.get("cross_entropy", scalars["loss"])
    derived = {"perplexity": math.exp(min(nats, 700.0)) if math.isfinite(nats) else nats}
    if num_bytes := scalars.get("bytes_per_token"):
        derived["bits_per_byte"] = nats / math.log(2) / num_bytes
    return derived
