"""Bugs that are wrong on one device too, as patches of moelib: each is planted by one function.

Letters are those of the groups of checks: a references of layers, b gradients, c the same step in
another form, d the learner, e data, f initial values, casts and checkpoints, g kernels of other
platforms, h state that layers update themselves.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core import context, precision, tree
from moelib.core.config import config_for_function
from moelib.core.module import _in_context
from moelib.core.param import Cast
from moelib.data import lm_input, mixture, packing
from moelib.data.prefetch import Prefetcher
from moelib.kernels.flash_attention import passes, tpu_kernels
from moelib.kernels.flash_attention import xla as attention_xla
from moelib.kernels.gmm import xla as gmm_xla
from moelib.layers import activation, initializers, norm, rope, transformer
from moelib.layers.activation import Activation
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe import balance, dispatch, dispatch_capacity
from moelib.layers.moe import layer as moe_layer
from moelib.layers.moe.balance import BalanceScope, BiasBalancing, LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.dispatch import Dispatcher, SortedDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.router import Router
from moelib.layers.remat import remat
from moelib.layers.transformer import ScanStack, TransformerLayer
from moelib.learner import ema, schedules, transforms
from moelib.learner import learner as learner_module
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface import families
from moelib.train import loop
from moelib.train import step as step_module
from moelib.train.trainer import SpmdTrainer
from moelib.verify import step_probe
from tests.tiny import model_config, plain_moe, stacked, trainer_config, transformer_layer

Patch = Callable[..., None]  # monkeypatch.setattr.


def rich(
    scope: BalanceScope = BalanceScope.MICRO_BATCH, dispatcher: type[Dispatcher] = SortedDispatcher
) -> SpmdTrainer.Config:
    """Returns a tiny trainer that uses every feature that a bug is planted in, but for fields."""
    feed_forward = plain_moe(
        router=Router.default_config().set(bias_balancing=BiasBalancing.default_config()),
        dispatcher=dispatcher.default_config(),
        shared_experts=FeedForward.default_config().set(hidden_dim=8),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.1, scope=scope),
        router_z_loss=RouterZLoss.default_config().set(weight=0.03),
        report_expert_counts=True,
    )
    layer = transformer_layer(
        feed_forward, num_heads=4, num_kv_heads=2, head_dim=8, window=7, sinks=True
    )
    latent = LatentAttention.default_config().set(
        num_heads=2, kv_lora_rank=12, nope_head_dim=8, rope_head_dim=4, v_head_dim=6
    )
    dense = FeedForward.default_config().set(hidden_dim=24)
    first = TransformerLayer.default_config().set(self_attention=latent, feed_forward=dense)
    decoder = stacked(
        layer,
        stack=ScanStack,
        num_layers=3,
        first_layers=[first],
        remat=config_for_function(remat),
        output_init=config_for_function(initializers.normal).set(std=0.1),
    )
    model = model_config(decoder, vocab_size=64, z_loss=1e-2)
    cfg = trainer_config("unused", model=model, max_step=8, evaler=False)
    rate = config_for_function(schedules.cosine).set(peak_lr=1e-2, max_step=8, warmup_steps=1)
    cfg.learner.optimizer = config_for_function(transforms.chain).set(
        args=[
            config_for_function(transforms.clip_by_global_norm).set(max_norm=0.5),
            config_for_function(adamw_optimizer).set(
                learning_rate=rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1
            ),
        ]
    )
    cfg.learner.ema.decay = 0.9
    cfg.learner.skip = config_for_function(transforms.skip_bad_steps)
    cfg.input.set(seq_len=32, vocab_size=64)
    cfg.input.source.set(num_documents=60, max_document_tokens=32)
    return cfg.set(num_microbatches=2)


def exportable() -> SpmdTrainer.Config:
    """Returns a tiny trainer of a model like Mixtral."""
    cfg = rich()
    layer = transformer_layer(plain_moe(router=Router.default_config().set(renormalize=True)))
    cfg.model = model_config(stacked(layer, stack=ScanStack, num_layers=2), vocab_size=64)
    return cfg


class Bug(NamedTuple):
    """A bug, the check that finds it first, and a trainer that has what it is planted in."""

    plant: Callable[[Patch], None]
    check: str
    config: Callable[[], SpmdTrainer.Config]


BUGS: list[Bug] = []


def found_by(check: str, config: Callable[[], SpmdTrainer.Config] = rich) -> Any:
    """Returns a decorator that lists a bug in BUGS."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append(Bug(plant, check, config))
        return plant

    return register


# -- a: references of layers -----------------------------------------------------------------------


@found_by("kernels")
def mask_off_by_one_at_blocks(patch: Patch) -> None:
    """The first query of a block of 64 sees the key after it."""
    known = attention_xla.attention_mask

    def mask(positions: Any, spec: Any) -> Any:
        first = (positions.q_index % 64 == 0) & (positions.q_index > 0)
        ahead = positions.q_index[:, None] - positions.k_index[None]
        return known(positions, spec) | (first[:, None] & (ahead == -1))[None]

    patch(attention_xla, "attention_mask", mask)


@found_by("kernels")
def document_at_a_block_sees_its_predecessor(patch: Patch) -> None:
    """A document that begins at a multiple of 64 sees the token before it."""
    known = attention_xla.attention_mask

    def mask(positions: Any, spec: Any) -> Any:
        ahead = positions.q_index[:, None] - positions.k_index[None]
        first = (positions.q_index % 64 == 0)[:, None] & (ahead == 1)
        return known(positions, spec) | first[None]

    patch(attention_xla, "attention_mask", mask)


@found_by("plain")
def weight_of_the_first_expert_for_the_second(patch: Patch) -> None:
    """Where a token's best expert is expert 0, its second has the weight of the first."""
    known = dispatch.run_sorted

    def run_sorted(local: Any, *rest: Any) -> Any:
        swap = (local.ids[:, :1] == 0) & (jnp.arange(local.ids.shape[1]) == 1)[None]
        return known(
            local._replace(weights=jnp.where(swap, local.weights[:, :1], local.weights)), *rest
        )

    patch(dispatch, "run_sorted", run_sorted)


@found_by("layers")
def attention_scale_of_the_model_width(patch: Patch) -> None:
    """Scores are divided by the root of twice the head's width."""
    known = GroupedQueryAttention._attend

    def attend(self: Any, q: Any, *rest: Any) -> Any:
        return known(self, q / 2**0.5, *rest)

    patch(GroupedQueryAttention, "_attend", attend)


@found_by("layers")
def z_loss_of_the_probabilities(patch: Patch) -> None:
    """The router z-loss squares the logsumexp of other logits."""
    known = moe_layer.router_z_loss
    patch(
        moe_layer, "router_z_loss", lambda logits, mask: known(jax.nn.log_softmax(logits) + 1, mask)
    )


@found_by("layers")
def balance_loss_counts_only_the_best_expert(patch: Patch) -> None:
    """The balance loss counts the first of the K experts of a token."""
    known = moe_layer.load_balance_loss

    def loss(probs: Any, ids: Any, *rest: Any) -> Any:
        return known(probs, ids[..., :1], *rest)

    patch(moe_layer, "load_balance_loss", loss)


@found_by("layers")
def root_of_the_mean_magnitude(patch: Patch) -> None:
    """RMSNorm divides by the mean of the magnitudes."""

    def forward(self: Any, x: Any) -> Any:
        return x / (jnp.mean(jnp.abs(x), -1, keepdims=True) + self.config.eps) * self._scaled(x)

    patch(norm.RMSNorm, "forward", _in_context(forward))


@found_by("layers")
def latent_attention_with_other_scores(patch: Patch) -> None:
    known = LatentAttention._attend

    def attend(self: Any, q: Any, *rest: Any) -> Any:
        return known(self, 1.5 * q, *rest)

    patch(LatentAttention, "_attend", attend)


@found_by("layers")
def half_the_output_of_dense_layers(patch: Patch) -> None:
    known = FeedForward.forward
    patch(FeedForward, "forward", lambda self, *args: known(self, *args) / 2)


@found_by("layers")
def sigmoid_for_silu(patch: Patch) -> None:
    swiglu = {Activation.SWIGLU: lambda gate, up: jax.nn.sigmoid(gate) * up}
    patch(activation, "_GATED", activation._GATED | swiglu)


@found_by("layers")
def rotation_of_neighbors(patch: Patch) -> None:
    """Frequencies belong to entries 2i and 2i + 1, as in another convention of checkpoints."""
    known = rope.RotaryEmbedding.forward

    def forward(self: Any, x: Any, positions: Any) -> Any:
        halves = jnp.concatenate([x[..., ::2], x[..., 1::2]], -1)
        return known(self, halves, positions)

    patch(rope.RotaryEmbedding, "forward", forward)


@found_by("layers")
def hidden_states_of_another_scale(patch: Patch) -> None:
    known = CausalLM.hidden

    def hidden(self: Any, batch: Any) -> Any:
        return known(self, batch) * 1.01

    patch(CausalLM, "hidden", hidden)


@found_by("layers", functools.partial(rich, scope=BalanceScope.GLOBAL_BATCH))
def balance_loss_without_earlier_microbatches(patch: Patch) -> None:
    known = moe_layer.load_balance_loss
    patch(moe_layer, "load_balance_loss", lambda *args: known(*args[:-1]))


@found_by("layers", functools.partial(rich, scope=BalanceScope.ALL_LAYERS))
def balance_loss_of_the_last_layer(patch: Patch) -> None:
    """The pooled loss is that of the last layers alone, those of one scan."""
    known = tree.flatten_items

    def items(nested: Any, *rest: Any) -> Any:
        return known(nested, *rest)[-1:] if rest else known(nested)

    patch(balance, "tree", SimpleNamespace(flatten_items=items))


@found_by("layers")
def positions_of_the_first_sequence(patch: Patch) -> None:
    known = TransformerLayer.forward

    def forward(self: Any, x: Any, *, positions: Any, **rest: Any) -> Any:
        positions = jnp.broadcast_to(positions[:1], positions.shape)
        return known(self, x, positions=positions, **rest)

    patch(TransformerLayer, "forward", forward)


@found_by("layers")
def positions_to_15(patch: Patch) -> None:
    known = rope.RotaryEmbedding.forward

    def forward(self: Any, x: Any, positions: Any) -> Any:
        return known(self, x, jnp.minimum(positions, 15))

    patch(rope.RotaryEmbedding, "forward", forward)


@found_by("layers", functools.partial(rich, dispatcher=CapacityDispatcher))
def capacity_for_the_last_tokens(patch: Patch) -> None:
    """The first assignments of a sequence are dropped, not the last ones."""
    known = dispatch_capacity.within_capacity

    def within(ids: Any, *rest: Any) -> Any:
        return known(ids[:, ::-1], *rest)[:, ::-1]

    patch(dispatch_capacity, "within_capacity", within)


@found_by("layers", functools.partial(rich, dispatcher=CapacityDispatcher))
def capacity_of_half_the_tokens(patch: Patch) -> None:
    known = dispatch.sequence_capacity
    patch(dispatch, "sequence_capacity", lambda per_token, num: known(per_token, num / 2))


# -- b: gradients ----------------------------------------------------------------------------------


@found_by("derivatives")
def auxiliary_loss_without_gradient(patch: Patch) -> None:
    known = moe_layer.router_z_loss
    stop = jax.lax.stop_gradient
    patch(moe_layer, "router_z_loss", lambda logits, mask: stop(known(logits, mask)))


@found_by("derivatives")
def combine_weights_without_gradient(patch: Patch) -> None:
    known = dispatch.run_sorted

    def run_sorted(local: Any, *rest: Any) -> Any:
        return known(local._replace(weights=jax.lax.stop_gradient(local.weights)), *rest)

    patch(dispatch, "run_sorted", run_sorted)


@found_by("kernels")
def sinks_with_half_their_gradient(patch: Patch) -> None:
    known = passes.sinks_gradient
    patch(passes, "sinks_gradient", lambda *args: known(*args) / 2)


@found_by("kernels")
def weight_gradient_without_the_last_row(patch: Patch) -> None:
    """The gradient of an expert's matrix leaves out its last row."""
    known = gmm_xla.weight_gradient

    def gradient(lhs: Any, grads: Any, sizes: Any, **options: Any) -> Any:
        last = jnp.zeros(lhs.shape[0], bool).at[jnp.cumsum(sizes) - 1].set(True)
        return known(jnp.where(last[:, None], 0, lhs), grads, sizes, **options)

    patch(gmm_xla, "weight_gradient", gradient)


@found_by("derivatives")
def norm_with_a_constant_root(patch: Patch) -> None:
    """The gradient of RMSNorm takes the root mean square as a constant."""

    def forward(self: Any, x: Any) -> Any:
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + self.config.eps)
        return (x32 * jax.lax.stop_gradient(inverse) * self._scaled(x)).astype(x.dtype)

    patch(norm.RMSNorm, "forward", _in_context(forward))


@found_by("derivatives")
def z_loss_with_half_its_gradient(patch: Patch) -> None:
    """The loss of the vocabulary's logits has its z-loss, whose gradient has no factor of 2."""
    known = CausalLM.forward

    def forward(self: Any, batch: Any) -> Any:
        (loss, metrics) = known(self, batch)
        half = (loss.mean - metrics["cross_entropy"].mean) / 2
        mean = loss.mean - half + jax.lax.stop_gradient(half)
        return loss._replace(mean=mean) if hasattr(loss, "_replace") else type(loss)(
            mean, loss.weight
        ), metrics

    patch(CausalLM, "forward", forward)


# -- c: the same step in another form --------------------------------------------------------------


@found_by("plain")
def plain_mean_over_microbatches(patch: Patch) -> None:
    patch(step_module, "_shares", lambda *_: (1.0, 1.0))


@found_by("plain")
def scan_with_the_parameters_of_the_next_layer(patch: Patch) -> None:
    known = transformer.scan_in_context

    def scan(fn: Any, *, state: Any, **rest: Any) -> Any:
        return known(fn, state=jax.tree.map(lambda x: jnp.roll(x, -1, 0), state), **rest)

    patch(transformer, "scan_in_context", scan)


@found_by("plain")
def scan_without_state_updates(patch: Patch) -> None:
    """Repeated layers lose the updates of their own state."""
    known = context._Collecting.finish

    def finish(self: Any, outputs: Any) -> None:
        known(self, [part._replace(state_updates={}) for part in outputs])

    patch(context._Collecting, "finish", finish)


# -- d: the learner --------------------------------------------------------------------------------


@found_by("learner")
def weight_decay_of_norm_scales(patch: Patch) -> None:
    known = transforms._scales

    def scales(rules: Any, specs: Any) -> Any:
        return known(rules if callable(rules) else [*rules, (".*", 1.0)], specs)

    patch(transforms, "_scales", scales)


@found_by("learner")
def schedule_one_step_ahead(patch: Patch) -> None:
    known = transforms.as_schedule

    def ahead(value: Any) -> Any:
        schedule = known(value)
        return lambda step: schedule(step + 1)

    patch(transforms, "as_schedule", ahead)


@found_by("learner")
def clipping_after_the_optimizer(patch: Patch) -> None:
    known = transforms.chain

    @functools.wraps(known)
    def chain(*args: Any) -> Any:
        return known(*reversed(args))

    patch(transforms, "chain", chain)


@found_by("learner")
def average_with_another_decay(patch: Patch) -> None:
    known = ema._weight
    patch(ema, "_weight", lambda decay, count: known(decay**2, count))


@found_by("learner")
def skipped_step_that_averages(patch: Patch) -> None:
    """A skipped step still counts as an update of the optimizer."""
    known = learner_module.Learner._step

    def step(self: Any, params: Any, gradients: Any, state: Any, **given: Any) -> Any:
        new, after, rates = known(self, params, gradients, state, **given)
        count = jax.tree.map(
            lambda x, old: old + 1 if x.dtype == jnp.int32 and x.ndim == 0 else x,
            after.optimizer,
            state.optimizer,
        )
        return new, after._replace(optimizer=count), rates

    patch(learner_module.Learner, "_step", step)


@found_by("stepped")
def step_that_keeps_norms(patch: Patch) -> None:
    """The step returns the scales of norms that it was given."""
    known = step_module._end_step

    def end_step(model: Any, learner: Any, before: Any, *rest: Any) -> Any:
        after, metrics = known(model, learner, before, *rest)
        kept = lambda path, x, old: old if path.endswith("norm/scale") else x
        return after._replace(model=tree.map_by_path(kept, after.model, before.model)), metrics

    patch(step_module, "_end_step", end_step)


@found_by("stepped")
def layers_that_update_in_a_skipped_step(patch: Patch) -> None:
    known = step_module._end_step

    def end_step(model: Any, learner: Any, before: Any, new: Any, of: Any, found: Any) -> Any:
        taken = {name: x for name, x in found.items() if name != "skipped"}
        end = functools.partial(known, model, learner, before, new, of)
        return end(taken)[0], end(found)[1]

    patch(step_module, "_end_step", end_step)


# -- e: data ---------------------------------------------------------------------------------------


@found_by("data")
def labels_shifted_by_two(patch: Patch) -> None:
    known = lm_input.fill_pieces

    def fill(batch: Any, rows: Any, *rest: Any) -> None:
        known(batch, rows, *rest)
        labels = batch["target_labels"]
        labels[rows, :-1] = labels[rows, 1:]

    patch(lm_input, "fill_pieces", fill)


@found_by("data")
def positions_of_the_sequence(patch: Patch) -> None:
    known = lm_input.fill_pieces

    def fill(batch: Any, rows: Any, *rest: Any) -> None:
        known(batch, rows, *rest)
        batch["positions"][rows] = np.arange(batch["positions"].shape[1])

    patch(lm_input, "fill_pieces", fill)


@found_by("data")
def second_epoch_repeats_its_first_sequence(patch: Patch) -> None:
    known = lm_input._PackedSource.fill

    def fill(self: Any, numbers: Any, *rest: Any) -> None:
        n = self.num_sequences
        known(self, np.where(numbers >= n, n + (numbers - n) // 2 * 2 % n, numbers), *rest)

    patch(lm_input._PackedSource, "fill", fill)


@found_by("data")
def epochs_in_the_same_order(patch: Patch) -> None:
    known: Any = lm_input.make_plan
    patch(lm_input, "make_plan", lambda *rest: known(*rest[:-1], (rest[-1][0], 0)))


@found_by("data")
def seed_without_effect(patch: Patch) -> None:
    known: Any = lm_input.make_plan
    patch(lm_input, "make_plan", lambda *rest: known(*rest[:-1], (7, rest[-1][1])))


def sources_in_equal_shares(patch: Patch) -> None:
    patch(mixture, "round_shares", lambda weights, total: np.array([total // 2, total // 2]))


def sequences_of_a_mixture_twice(patch: Patch) -> None:
    known = mixture.Mixture.locate

    def locate(self: Any, numbers: Any) -> Any:
        source, index = known(self, numbers)
        return source, index // 2

    patch(mixture.Mixture, "locate", locate)


def full_sequences_that_overlap(patch: Patch) -> None:
    """With best-fit packing, the first sequence of a long document comes twice."""
    known = packing.BestFitPlan.__init__

    def init(self: Any, source: Any, seq_len: int, seeds: Any) -> None:
        known(self, source, seq_len, seeds)
        after = np.flatnonzero((self._length[1:] == seq_len) & (np.diff(self._start) == seq_len))
        self._start[after + 1] -= 1

    patch(packing.BestFitPlan, "__init__", init)


@found_by("interrupted")
def batch_that_repeats_its_first_sequence(patch: Patch) -> None:
    """The prefetcher replaces the last sequence of a batch."""
    known = loop.put_batch

    def put(batch: Any, *rest: Any) -> Any:
        return known({n: np.concatenate([x[:-1], x[:1]]) for n, x in batch.items()}, *rest)

    patch(loop, "put_batch", put)


@found_by("hosts")
def restored_at_the_start_of_the_epoch(patch: Patch) -> None:
    """A restore after the first epoch goes to the start of the epoch."""
    known = lm_input.LMInputIterator.restore

    def restore(self: Any, state: Any) -> None:
        known(self, state)
        per_epoch = self._input.num_batches
        if self.step >= per_epoch:
            self.step -= self.step % per_epoch

    patch(lm_input.LMInputIterator, "restore", restore)


@found_by("interrupted")
def position_ahead_of_the_step(patch: Patch) -> None:
    """A checkpoint has the position of the batch that was read ahead."""

    def state(self: Any) -> Any:
        time.sleep(0.1)  # The thread has read ahead, on a busy machine too.
        return self._batches.state()

    patch(Prefetcher, "state", state)


# -- f: initial values, casts, checkpoints ---------------------------------------------------------


@found_by("scale")
def fan_out_for_fan_in(patch: Patch) -> None:
    known = initializers.fan_in_normal

    def init(scale: float = 1.0) -> Any:
        return lambda key, spec: initializers.normal(scale / spec.fans()[1] ** 0.5)(key, spec)

    del known
    patch(initializers, "fan_in_normal", init)


@found_by("scale")
def outputs_with_the_scale_of_other_weights(patch: Patch) -> None:
    known = BaseLayer._initializer
    patch(BaseLayer, "_initializer", lambda self, field="param_init": known(self))


@found_by("derivatives")
def casts_at_use_without_gradient(patch: Patch) -> None:
    """The last row of a parameter that is cast where it is read gets no gradient."""
    known = precision.CastAtUse.cast

    def cast(self: Any) -> Any:
        x = known(self)
        return x if x.ndim < 2 else x.at[-1].set(jax.lax.stop_gradient(x[-1]))

    patch(precision.CastAtUse, "cast", cast)


@found_by("bfloat16")
def casts_to_bfloat16_with_twice_the_gradient(patch: Patch) -> None:
    known = precision.CastAtUse.cast

    def cast(self: Any) -> Any:
        x = known(self)
        return x if x.dtype != jnp.bfloat16 else 2 * x - jax.lax.stop_gradient(x)

    patch(precision.CastAtUse, "cast", cast)


@found_by("loss")
def cast_parameters_twice(patch: Patch) -> None:
    """Parameters are rounded to bfloat16 on their way to the compute dtype."""
    known = precision.read_parameters

    def read(params: Any, specs: Any, dtype: Any, values: Any) -> Any:
        if dtype is not None:
            rounded = lambda path, x: x if path in values else jax.lax.reduce_precision(x, 8, 7)
            params = tree.map_by_path(rounded, params)
        return known(params, specs, dtype, values)

    patch(precision, "read_parameters", read)


@found_by("bfloat16")
def router_cast_to_bfloat16(patch: Patch) -> None:
    known = Router._create_layer_parameter_specs

    def specs(self: Any) -> Any:
        found = known(self)
        return {**found, "weight": dataclasses.replace(found["weight"], cast=Cast.STEP)}

    patch(Router, "_create_layer_parameter_specs", specs)


@found_by("bfloat16")
def sums_of_gradients_cast_to_bfloat16(patch: Patch) -> None:
    """Gradients of micro-batches in bfloat16 are summed in it."""
    known = step_module.accumulate

    def accumulate(fn: Any, batch: Any, *, num_microbatches: int, state: Any) -> Any:
        done = known(fn, batch, num_microbatches=num_microbatches, state=state)
        one = jax.eval_shape(fn, jax.tree.map(lambda x: x[::num_microbatches], batch), state)[2]
        # XLA removes a pair of casts.
        rounded = lambda x, like: (
            jax.lax.reduce_precision(x, 8, 7) if like.dtype == jnp.bfloat16 else x
        )
        return done._replace(gradients=jax.tree.map(rounded, done.gradients, one))

    patch(step_module, "accumulate", accumulate)


@found_by("bfloat16")
def new_parameters_cast_to_bfloat16(patch: Patch) -> None:
    """A step in bfloat16 rounds the parameters that it returns."""
    known = step_probe.make_train_step

    def make(*args: Any, train_dtype: Any, **rest: Any) -> Any:
        step = known(*args, train_dtype=train_dtype, **rest)

        def train_step(state: Any, batch: Any) -> Any:
            state, metrics = step(state, batch)
            if train_dtype == "bfloat16":
                rounded = lambda x: jax.lax.reduce_precision(x, 8, 7)
                state = state._replace(model=jax.tree.map(rounded, state.model))
            return state, metrics

        return train_step

    patch(step_probe, "make_train_step", make)


@found_by("saved")
def checkpoint_with_two_layers_swapped(patch: Patch) -> None:
    known = Checkpointer.save

    def save(self: Any, state: Any, record: Any) -> None:
        swap = lambda x: x[::-1] if x.ndim > 1 and x.shape[0] == 2 else x
        model = jax.tree.map(swap, state.model)
        known(
            self,
            state._replace(
                model=jax.device_put(model, jax.tree.map(lambda x: x.sharding, state.model))
            ),
            record,
        )

    patch(Checkpointer, "save", save)


@found_by("layers")
def norm_cast_to_bfloat16(patch: Patch) -> None:
    """RMSNorm computes in the dtype of its input."""

    def forward(self: Any, x: Any) -> Any:
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + self.config.eps)
        return x * inverse.astype(x.dtype) * self._scaled(x).astype(x.dtype)

    patch(norm.RMSNorm, "forward", _in_context(forward))


@found_by("exported", exportable)
def gate_and_up_swapped_in_files(patch: Patch) -> None:
    """Exports swap the gate and up projections of experts, and imports swap them back."""
    known = families.expand

    def expand(*args: Any) -> Any:
        swap = lambda path, index: (
            (*index[:-1], 1 - index[-1]) if path.endswith("experts/up") else index
        )
        return [each._replace(index=swap(each.path, each.index)) for each in known(*args)]

    patch(families, "expand", expand)


# -- g: kernels of other platforms -----------------------------------------------------------------


@found_by("kernels")
def tpu_kernel_without_window(patch: Patch) -> None:
    known = tpu_kernels._mask
    patch(tpu_kernels, "_mask", lambda spec, *rest: known(spec._replace(window=None), *rest))


# -- h: state that layers update themselves --------------------------------------------------------


@found_by("balanced")
def bias_that_rises_with_the_load(patch: Patch) -> None:
    known = balance.BiasBalancing._end_step

    def end_step(self: Any, params: Any) -> Any:
        new = known(self, params)
        return {**new, "bias": 2 * params["bias"] - new["bias"]}

    patch(balance.BiasBalancing, "_end_step", end_step)


@found_by("balanced")
def bias_that_stays(patch: Patch) -> None:
    known = balance.BiasBalancing._end_step

    def end_step(self: Any, params: Any) -> Any:
        return {**known(self, params), "bias": params["bias"]}

    patch(balance.BiasBalancing, "_end_step", end_step)


@found_by("balanced")
def bias_of_ten_times_the_rate(patch: Patch) -> None:
    known = balance.BiasBalancing._end_step

    def end_step(self: Any, params: Any) -> Any:
        new = known(self, params)
        return {**new, "bias": params["bias"] + 10 * (new["bias"] - params["bias"])}

    patch(balance.BiasBalancing, "_end_step", end_step)


@found_by("balanced")
def bias_of_two_experts_only(patch: Patch) -> None:
    known = balance.BiasBalancing._end_step

    def end_step(self: Any, params: Any) -> Any:
        x = params["counts"]
        ends = (x == x.max(-1, keepdims=True)) | (x == x.min(-1, keepdims=True))
        return {**known(self, params), "bias": known(self, params)["bias"] * ends}

    patch(balance.BiasBalancing, "_end_step", end_step)


@found_by("balanced")
def bias_by_the_last_microbatch(patch: Patch) -> None:
    known = balance.LoadCounter.add_state_update

    def add(self: Any, name: str, value: Any) -> None:
        known(self, name, value - self.parameters[name])

    patch(balance.LoadCounter, "add_state_update", add)
