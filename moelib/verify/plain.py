"""The model in its plainest form: a loop of layers, dense dispatch, reference kernels, in float64.

Nothing is quantized: a float64 that rounds to another entry of 8 bits moves more than tolerances.

Layers are called one after another, without recomputation, and micro-batches are summed by a few
lines of NumPy. Nothing is differentiated: gradients are checked by finite differences.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config_text import sub_configs
from moelib.core.context import is_aux_loss
from moelib.core.metrics import MaxScalar, is_metric
from moelib.core.module import Module, functional
from moelib.core.param import specs_by_path
from moelib.core.tree import Batch, Nested
from moelib.kernels.backend import BACKENDS, kernel_backends
from moelib.layers.base import BaseLayer
from moelib.layers.moe.dispatch import DenseDispatcher, Dispatcher
from moelib.layers.quantization import Quantization
from moelib.layers.transformer import BaseStack, LoopStack, ScanStack
from moelib.models.causal_lm import CausalLM
from moelib.train.metrics import as_metric
from moelib.verify.float64 import in_float64


class Values(NamedTuple):
    """The results of a forward pass over a batch."""

    terms: dict[str, Any]  # Terms of the objective: the loss, and weighted auxiliary losses.
    weights: dict[str, Any]  # Weights of the auxiliary losses, by path.
    metrics: dict[str, Any]  # Metrics by path, arrays in float64.
    params: Nested  # Parameters with the layers' updates of their state.
    updates: list[Nested]  # These updates, of each micro-batch.
    margins: dict[str, float]  # Margins of routers, by scope: see `in_float64`.


class Plain:
    """A trainer's model in its plain form, except for the parts to keep."""

    def __init__(self, trainer: Any, keep: tuple[str, ...] = ()) -> None:
        """Builds the model; compiles nothing.

        `keep` may have "stack" and "dispatcher".
        """
        self._trainer = trainer
        cfg = trainer.config.model.clone(name="model")
        self.unquantized = _without_quantization(cfg)  # Paths and schemes left out; "" if none.
        # The innermost configs first: a replaced stack takes over its layers.
        for holder in reversed([cfg, *(inside for _, inside in sub_configs(cfg))]):
            for name, value in list(holder.items()):
                if isinstance(value, BaseStack.Config) and "stack" not in keep:
                    fields = {n: x for n, x in value.items() if n != "klass"} | {"remat": None}
                    loop = LoopStack if value.klass is ScanStack else value.klass
                    holder.set(**{name: loop.default_config().set(**fields)})
                klass = getattr(value, "klass", object)
                if issubclass(klass, Dispatcher) and "dispatcher" not in keep:
                    holder.set(**{name: DenseDispatcher.default_config()})
        self.model = cfg.instantiate(parent=None)
        self._run: Any = None

    def layers_apart(self, values: Nested) -> Nested:
        """Returns parameters of the trainer's layers, nested by the names that layers have here."""
        return _layers_apart(self._trainer.model, self.model, values)

    def by_layer(self, values: Nested) -> dict[str, Any]:
        """Returns parameters of the trainer's layers by path, in forward order."""
        return self.in_order(tree.by_path(self.layers_apart(values)))

    def experts_apart(self, values: Nested) -> dict[str, Any]:
        """Returns parameters of the trainer's layers by layer and expert, in forward order."""
        specs, found = specs_by_path(self.model.create_parameter_specs_recursively()), {}
        for path, x in self.by_layer(values).items():
            if "experts" not in (axes := specs[path].axes):
                found[path] = x
                continue
            for i, part in enumerate(np.moveaxis(x, axes.index("experts"), 0)):
                found[f"{path}, expert {i}"] = part
        return found

    def metrics(self, scalars: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Returns the metrics of a step as arrays by layer, in forward order."""
        found: dict[str, dict[int, float]] = {}
        for name, value in scalars.items():
            if any(name.startswith(f"{other}/") for other in scalars):
                continue  # Of the learner: learning_rate/rule0, next to learning_rate.
            array, _, index = name.rpartition("/")
            array, index = (array, int(index)) if index.isdigit() else (name, 0)
            found.setdefault(array, {})[index] = value
        values = {name: np.array([x[i] for i in sorted(x)]) for name, x in found.items()}
        nested = tree.unflatten(values)
        nested = _layers_apart(self._trainer.model, self.model, nested, flat=True)
        return self.in_order(tree.by_path(nested))

    def in_order(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values by path in the order of a forward pass."""
        return dict(sorted(values.items(), key=lambda item: _forward_order(self.model, item[0])))

    def __call__(self, state: Any, batch: Batch, updates: Sequence[Nested] | None = None) -> Values:
        """Returns the results of a forward pass in micro-batches.

        Args:
            state: State before the step, with the parameters of each layer apart.
            batch: The whole batch, of NumPy arrays.
            updates: Updates of the layers' state in each micro-batch, instead of their own.
        """
        num = self._trainer.config.num_microbatches
        key = jax.random.fold_in(jax.random.wrap_key_data(state.prng_key), state.step)
        keys = [jax.random.fold_in(key, i) for i in range(num)]
        parts = [jax.tree.map(lambda x, i=i: np.asarray(x)[i::num], batch) for i in range(num)]
        if self._run is None:
            with kernel_backends(dict.fromkeys(BACKENDS, "reference")):
                self._run = in_float64(self._forward, state.model, keys[0], parts[0])
        params, outs, found = state.model, [], []
        with jax.enable_x64(True):
            for i, (key, part) in enumerate(zip(keys, parts, strict=True)):
                out, margins = jax.device_get(self._run(wide(params), key, part))
                outs.append(out)
                found.append(margins)
                params = tree.merge(params, updates[i] if updates else out["updates"])
        least = {scope: min(float(each[scope]) for each in found) for scope in found[0]}
        return self._mean(outs, parts, params)._replace(margins=least)

    def _forward(self, params: Nested, key: Any, batch: Batch) -> dict[str, Any]:
        (loss, metrics), found = functional(self.model, key, params, (batch,), is_training=True)
        return {
            "loss": as_metric(loss),
            "aux_losses": tree.by_path(found.aux_losses, is_aux_loss),
            "metrics": tree.by_path(metrics, is_metric) | tree.by_path(found.summaries, is_metric),
            "updates": found.state_updates,
        }

    def _mean(self, outs: list[Any], parts: list[Batch], params: Nested) -> Values:
        """Returns means over micro-batches, weighted by their tokens."""
        weights = {path: x.weight for path, x in outs[0]["aux_losses"].items()}
        labels = np.array([float(out["loss"].weight) for out in outs])
        tokens = np.array(list(map(self._num_tokens, parts, outs)))
        loss = _weighted([out["loss"].mean for out in outs], labels)
        terms, metrics = {"loss": loss}, {"loss": loss}
        for path, weight in weights.items():
            losses, share = [out["aux_losses"][path] for out in outs], 1.0
            counts = tokens
            if losses[0].num_tokens is not None:
                counts = np.array([loss.num_tokens for loss in losses])
                if self.model.token_counts(parts[0]) is not None:
                    share = counts.sum(0) / max(tokens.sum(), 1.0)
            value = _weighted([loss.value for loss in losses], counts)
            terms[path], metrics[path] = np.sum(value * weight * share), value
        for path, first in outs[0]["metrics"].items():
            found = [out["metrics"][path] for out in outs]
            if isinstance(first, MaxScalar):
                metrics[path] = np.max([each.value for each in found], 0)
            elif is_metric(first):
                counts = np.array([each.weight for each in found])
                metrics[path] = _weighted([each.mean for each in found], counts)
            else:
                metrics[path] = _weighted(found, tokens)
        metrics["objective"] = sum(terms.values())
        return Values(terms, weights, metrics, params, [out["updates"] for out in outs], {})

    def _num_tokens(self, batch: Batch, out: Any) -> float:
        """Returns the number of tokens that auxiliary losses are means over."""
        if isinstance(self.model, CausalLM):
            return float((batch["segment_ids"] > 0).sum())
        counts = self.model.token_counts(batch)
        return float(out["loss"].weight if counts is None else counts[1])


def _without_quantization(cfg: Any) -> str:
    """Removes the schemes of a model's config, and returns them and their paths as text."""
    found = []
    for path, inside in [("", cfg), *sub_configs(cfg)]:
        if (scheme := dict(inside.items()).get("quantization")) is not None:
            inside.quantization = None
            if scheme is not Quantization.NONE:
                found.append(f"{path}.quantization={scheme.name}".lstrip("."))
    return ", ".join(found)


def _layers_apart(layer: Module, plain: Any, values: Nested, *, flat: bool = False) -> Nested:
    """Returns nested arrays with each copy of a stacked layer under its own name in the plain form.

    With `flat`, arrays have one dimension, in which those of the copies follow one another.
    """
    out: Nested = {}
    for name, value in values.items():
        child, same = layer.children.get(name), plain.children.get(name)
        if not isinstance(value, dict) or child is None:
            out[name] = value
            continue
        copies = layer.copies(name) if same is None and isinstance(layer, BaseLayer) else None
        if copies is None:
            out[name] = value if same is None else _layers_apart(child, same, value, flat=flat)
            continue
        shape = (len(copies), -1)
        stacked = jax.tree.map(lambda x, shape=shape: x.reshape(shape), value) if flat else value
        for i, copy in enumerate(copies):
            one = jax.tree.map(operator.itemgetter(i), stacked)
            out[copy] = _layers_apart(child, plain.children[copy], one, flat=flat)
    return out


def _forward_order(module: Module, path: str) -> tuple[int, ...]:
    first, _, rest = path.partition("/")
    if first not in module.children:  # Of the layer itself: after the layers inside.
        return (len(module.children),)
    return (list(module.children).index(first), *_forward_order(module.children[first], rest))


def wide(params: Any) -> Any:
    """Returns parameters with float32 as float64."""
    return jax.tree.map(lambda x: np.float64(x) if x.dtype == np.float32 else x, params)


def _weighted(values: Sequence[Any], weights: np.ndarray) -> Any:
    """Returns the mean of values or arrays, one per micro-batch; 0 without any weight."""
    total = np.sum([np.multiply(v, w) for v, w in zip(values, weights, strict=True)], 0)
    return np.where(weights.sum(0) > 0, total / np.maximum(weights.sum(0), 1e-30), 0.0)
