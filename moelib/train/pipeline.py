"""The gradients of a step whose layers are spread over pipeline ranks.

The parts of the model before, inside and after the repeated blocks of its `ScanStack` are functions
of their own (`moelib.models.model.StackedModel`, `moelib.parallel.pipeline.engine`).
"""

import functools
import logging
import operator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moelib.core import tree
from moelib.core.context import (
    InvocationContext,
    OutputCollection,
    OutsideError,
    fold_name,
    names_below,
)
from moelib.core.errors import UserError
from moelib.core.metrics import combine, empty, is_metric, weighted
from moelib.core.module import functional
from moelib.core.param import specs_by_path
from moelib.core.precision import gradient_dtype, read_parameters
from moelib.core.tree import Batch, Nested
from moelib.layers.carry import carry_names
from moelib.layers.moe.balance import BalanceScope
from moelib.layers.moe.layer import MoELayer
from moelib.layers.quantization import quantized_weights
from moelib.layers.transformer import ScanStack
from moelib.learner.accumulation import Accumulated, split_batch
from moelib.learner.learner import Learner
from moelib.models.model import Model, StackedModel
from moelib.parallel.pipeline.engine import Functions, Layout, run_pipeline
from moelib.parallel.pipeline.schedule import Schedule
from moelib.train.metrics import as_metric, collect
from moelib.train.placement import StagePlacement
from moelib.train.state import updated

logger = logging.getLogger(__name__)


def stack_of(model: Model) -> ScanStack:
    """Returns the stack whose blocks a pipeline spreads over its ranks.

    Raises:
        UserError: If the model has no such stack, or a layer that looks at all layers.
    """
    stack = model.stack if isinstance(model, StackedModel) else None
    if not isinstance(stack, ScanStack) or not stack.num_blocks:
        raise UserError(
            f"mesh axis pipeline: {model.name} has no stack of repeated layers; make its decoder a "
            "ScanStack, or set pipeline=1."
        )
    if type(model).forward is not StackedModel.forward:
        raise UserError(
            f"mesh axis pipeline: {type(model).__qualname__} overrides forward, which a pipeline "
            "does not call; override before and after, or set pipeline=1."
        )
    for layer, _ in model.walk():
        if names := carry_names(layer):
            raise UserError(
                f"mesh axis pipeline: {layer._title()} ({type(layer).__qualname__}) carries "
                f"{', '.join(names)} from layer to layer, which a pipeline does not send; set "
                "pipeline=1."
            )
        loss = layer.config.load_balance_loss if isinstance(layer, MoELayer) else None
        if loss is not None and loss.scope is BalanceScope.ALL_LAYERS:
            raise UserError(
                f"{layer._title()}.load_balance_loss.scope is ALL_LAYERS, but the layers of a "
                "pipeline are on different devices; set another scope, or pipeline=1."
            )
    return stack


def stage_sizes(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Returns the blocks of each stage; those in the middle have one more, if some have."""
    small, more = divmod(num_blocks, num_stages)
    first = (num_stages - more) // 2
    return tuple(small + (first <= i < first + more) for i in range(num_stages))


class _Cut:
    """The functions of a model that is cut around its blocks; their parameters have whole paths.

    Args:
        model: The model.
        learner: Its learner, which knows what layers may update.
        placement: Where the parameters of blocks are.
        dtype: The compute dtype.
        uniform: Whether ranks compute blocks that they do not have, and drop the results.
    """

    def __init__(
        self,
        model: Model,
        learner: Learner,
        placement: StagePlacement,
        dtype: Any,
        *,
        uniform: bool,
    ) -> None:
        self.model, self.learner, self.stack = model, learner, stack_of(model)
        self.specs, self.dtype, self.uniform = placement.specs, dtype, uniform
        self.names = names_below(model, self.stack) or ()
        self.placement = placement

    def is_block(self, path: str) -> bool:
        """Returns whether a parameter belongs to the repeated blocks."""
        *above, child = path.split("/")[: len(self.names) + 1]
        return (*above,) == self.names and self.stack.copies(child) is not None

    def _within(self, nested: Nested) -> Nested:
        return functools.reduce(lambda inside, name: inside.get(name, {}), self.names, nested)

    def _whole(self, nested: Nested) -> Nested:
        return tree.unflatten({"/".join(self.names): nested}) if nested else {}

    def _run(self, method: str, outer: Nested, constants: Any, micro: Any, *inputs: Any) -> Any:
        """Returns (results, outputs) of a part of the model."""
        params = tree.merge(constants["fixed"], outer)
        params = read_parameters(params, self.specs, self.dtype, constants["quantized"])
        return functional(self.model, micro["key"], params, inputs, is_training=True, method=method)

    def updated_before(self, outer: Nested, constants: Any, micro: Any) -> set[str]:
        """Returns the paths of the parameters that are updated before the blocks."""
        run = functools.partial(self._run, "before_blocks")
        _, outputs = jax.eval_shape(run, outer, constants, micro, micro["batch"])
        return set(tree.by_path(outputs.state_updates))

    def first(self, outer: Nested, beginning: Nested, constants: Any, micro: Any) -> Any:
        """Returns (input of the first block, auxiliary losses), (outputs, `beginning` after)."""
        constants = constants | {"fixed": tree.merge(constants["fixed"], beginning)}
        (x, side_inputs), outputs = self._run(
            "before_blocks", outer, constants, micro, micro["batch"]
        )
        for name, value in side_inputs.items():
            if any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(value)):
                raise UserError(
                    f"mesh axis pipeline: {self.stack._title()} gets {name!r}, an array of floats, "
                    "whose gradient a pipeline does not compute; set pipeline=1."
                )
        beginning = updated(beginning, outputs.state_updates, outer, self.learner)
        outputs = outputs._replace(state_updates={}, module_outputs={})
        total = outputs.total_aux_loss(micro["num_tokens"])
        return (x, total * micro["shares"][1]), (outputs, beginning)

    def stage(
        self, params: Any, x: jax.Array, fixed: Any, constants: Any, micro: Any, blocks: Any
    ) -> Any:
        """Returns the output of some blocks, their auxiliary losses, outputs and updates."""
        outer = constants["outer"]
        (_, side_inputs), _ = self._run("before", outer, constants, micro, micro["batch"])
        key = functools.reduce(fold_name, self.names, micro["key"])
        run = functools.partial(self._block, key, side_inputs, micro["num_tokens"])
        # The values that a conditional saves include weights, unless it is recomputed.
        in_branch = run if self.stack.config.remat else jax.checkpoint(run)

        def skip(x: jax.Array, params: Nested, fixed: Nested, block: Any) -> Any:
            _, outputs, _ = jax.eval_shape(run, x, params, fixed, block)
            nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), outputs)
            return (x, jnp.zeros(())), nothing, fixed

        def each(carry: Any, given: Any, *, always: bool = True) -> Any:
            (x, total), (own, other, block) = carry, given
            given = x, own, other, block
            if always:
                done = run(*given)
            elif self.uniform:
                choose = functools.partial(jnp.where, block[0] >= 0)
                done = jax.tree.map(choose, run(*given), skip(*given))
            else:
                done = lax.cond(block[0] >= 0, in_branch, skip, *given)
            (x, loss), kept, after = done
            return (x, total + loss), (kept, after)

        # Blocks that all stages have are a loop; others end the stage, one after another.
        num, given = self.placement.num_always, (params, fixed, blocks)
        part = lambda *at: jax.tree.map(operator.itemgetter(*at), given)
        carry, made = lax.scan(each, (x, jnp.zeros(())), part(slice(num)))
        for i in range(num, len(blocks[0])):
            carry, last = each(carry, part(i), always=False)
            append = lambda a, b: jnp.concatenate([a, b[None]])
            made = jax.tree.map(append, made, last)
        x, total = carry
        return (x, total * micro["shares"][1]), made

    def _block(
        self,
        key: jax.Array,
        side_inputs: dict[str, Any],
        num_tokens: jax.Array,
        x: jax.Array,
        params: Nested,
        fixed: Nested,
        block: Any,
    ) -> Any:
        """Returns ((output, auxiliary losses), outputs, `fixed` after the block).

        `block` is its number and its quantized weights, by path.
        """
        number, quantized = block
        # Otherwise XLA sums the gradients of some weights into whole arrays on each device.
        place = lambda path, a: lax.with_sharding_constraint(a, self.placement.of_block(path))
        params = tree.map_by_path(place, params)
        read = read_parameters(tree.merge(fixed, params), self.specs, self.dtype, quantized)
        inputs = x, number, key, side_inputs
        run = functools.partial(functional, self.stack, method="forward_block", is_training=True)
        try:
            x, found = run(None, self._within(read), inputs)
        except OutsideError as error:
            raise UserError(
                f"mesh axis pipeline: a layer of {self.stack._title()} uses a module outside it: "
                f"{str(error).partition(';')[0]}; set pipeline=1."
            ) from error
        found = OutputCollection(*map(self._whole, found))
        after = updated(fixed, found.state_updates, params, self.learner)
        kept = found._replace(state_updates={}, module_outputs={})
        return (x, found.total_aux_loss(num_tokens)), kept, after

    def last(self, outer: Nested, x: jax.Array, ending: Nested, constants: Any, micro: Any) -> Any:
        """Returns the objective after the blocks, and (outputs, `ending` after the pass)."""
        constants = constants | {"fixed": tree.merge(constants["fixed"], ending)}
        (loss, metrics), outputs = self._run("after", outer, constants, micro, x, micro["batch"])
        ending = updated(ending, outputs.state_updates, outer, self.learner)
        outputs = outputs._replace(state_updates={}, module_outputs={})
        loss = as_metric(loss)
        total = outputs.total_aux_loss(micro["num_tokens"])
        objective = jnp.stack([loss.mean, total]) @ micro["shares"]
        return objective, ((loss, metrics, outputs), ending)


class PipelineConfig(NamedTuple):
    """How a step runs in a pipeline."""

    schedule: Schedule
    num_ranks: int
    uniform: bool = False  # On CPUs; see `run_pipeline`.


def layout_of(model: Model, pipeline: PipelineConfig) -> Layout:
    """Returns the stages of a model."""
    schedule, num_ranks = pipeline.schedule, pipeline.num_ranks
    sizes = stage_sizes(stack_of(model).num_blocks, num_ranks * schedule.num_chunks)
    return Layout(schedule, num_ranks, sizes)


def warn_empty_stages(model: Model, pipeline: PipelineConfig) -> None:
    """Logs a warning if a model has fewer blocks than there are stages, some of which then idle."""
    sizes = layout_of(model, pipeline).sizes
    if not all(sizes):
        logger.warning(
            "pipeline_schedule is %s, which has %d stages on %d ranks, but the model has %d "
            "repeated blocks: %d stages have none; set a smaller mesh axis pipeline.",
            pipeline.schedule.name,
            len(sizes),
            pipeline.num_ranks,
            sum(sizes),
            sizes.count(0),
        )


def accumulate_in_pipeline(
    pipeline: PipelineConfig,
    model: Model,
    learner: Learner,
    params: Nested,
    train_dtype: str | None,
    batch: Batch,
    key: jax.Array,
    num_microbatches: int,
) -> Accumulated:
    """Returns the results of all micro-batches of a step; their state has what is not trained.

    The arguments are those of `make_train_step` and of its step; the model has `token_counts`.

    Raises:
        UserError: If the model cannot be cut, the schedule needs more micro-batches, or the batch
            has experts to replay.
    """
    if "expert_ids" in batch:
        raise UserError(
            "mesh axis pipeline: the batch has expert_ids, which a pipeline does not give to its "
            "layers; set replay_routing to False, or pipeline=1."
        )
    layout, uniform = layout_of(model, pipeline), pipeline.uniform
    specs = specs_by_path(model.create_parameter_specs_recursively())
    quantized = quantized_weights(params, specs, train_dtype)  # For all micro-batches.
    low = lambda path, x: x.astype(gradient_dtype(specs[path], train_dtype))
    trained, fixed = tree.split(tree.map_by_path(low, params), learner.is_updated)
    placement = StagePlacement(layout, specs)
    cut = _Cut(model, learner, placement, train_dtype, uniform=uniform)
    blocks, outer = tree.split(trained, cut.is_block)
    fixed_blocks, fixed_outer = tree.split(fixed, cut.is_block)
    to_stages = functools.partial(tree.map_by_path, placement.to_stages)
    to_layers = functools.partial(tree.map_by_path, placement.to_layers)
    of_blocks, of_outer = tree.split(quantized, cut.is_block)
    layers = (
        np.array(layout.rows, np.int32),
        {path: placement.quantized_to_stages(path, x) for path, x in of_blocks.items()},
    )
    micro = split_batch(batch, num_microbatches)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_microbatches))
    counts = lambda batch: jnp.stack(cast(StackedModel, model).token_counts(batch))  # [2]
    of_each = jax.vmap(counts)(micro)  # [M, 2]
    shares = of_each / jnp.maximum(counts(batch), 1.0)[None]
    constants = {"fixed": fixed_outer, "outer": outer, "quantized": of_outer}
    of_micro = {"batch": micro, "shares": shares, "num_tokens": of_each[:, 1], "key": keys}
    before = cut.updated_before(outer, constants, jax.tree.map(lambda a: a[0], of_micro))
    updatable = tree.select(fixed_outer, lambda path: not specs[path].trainable)
    beginning, ending = tree.split(updatable, before.__contains__)
    done = run_pipeline(
        Functions(cut.first, cut.stage, cut.last),
        layout,
        to_stages(blocks),
        to_stages(fixed_blocks),
        outer,
        beginning,
        ending,
        constants,
        of_micro,
        layers=layers,
        uniform=uniform,
    )
    # [chunks, M, blocks, ...] -> [M, all blocks, ...]
    of_blocks = jax.tree.map(jax.vmap(placement.in_order, in_axes=1), done.stages)

    def metrics_of(each: Any) -> Any:
        batch, shares, num_tokens, before, blocks, (loss, metrics, after) = each
        context = InvocationContext(model, None, None, True)
        for part in (before, blocks, after):  # A module may give outputs in several.
            context.merge(part)
        outputs = context.outputs
        aux_loss = weighted(outputs.total_aux_loss(num_tokens), num_tokens)
        metrics = collect(loss, metrics, outputs, batch, aux_loss)
        return metrics, jnp.stack([loss.mean, aux_loss.mean]) @ shares

    parts = micro, shares, of_each[:, 1], done.first, of_blocks, done.last
    found, objectives = jax.vmap(metrics_of)(parts)
    first = jax.tree.map(lambda a: a[0], found)
    start = jax.tree.map(empty, first, is_leaf=is_metric)
    add = lambda sum, new: (jax.tree.map(combine, sum, new, is_leaf=is_metric), None)
    metrics, _ = lax.scan(add, start, found)
    gradients = tree.merge(to_layers(done.params), done.outer)
    state = tree.merge(fixed, to_layers(done.fixed), done.beginning, done.ending)
    return Accumulated(jnp.sum(objectives), jnp.ones(()), gradients, metrics, state)
