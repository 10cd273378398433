"""Bugs that are wrong on one device too: each replaces one function of moelib.

Letters are those of the groups of checks: a references of layers, b gradients, c the same step in
another form, d the learner, e data, f casts and checkpoints; g bugs that the oracles find.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core import context, precision, tree
from moelib.core.config import config_for_function
from moelib.core.param import Cast
from moelib.data.batches import lm_input, mixture, packing
from moelib.data.batches.prefetch import Prefetcher
from moelib.huggingface import tensor_mapping
from moelib.layers import initializers, norm, rope, transformer
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe import dispatch
from moelib.layers.moe import layer as moe_layer
from moelib.layers.moe.balance import BiasBalancing, LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.dispatch import SortedDispatcher
from moelib.layers.moe.router import Router
from moelib.layers.remat import remat
from moelib.layers.transformer import ScanStack, TransformerLayer
from moelib.learner import schedules, transforms
from moelib.learner.optimizers import adamw_optimizer
from moelib.models import loss as loss_module
from moelib.models import multi_token_prediction
from moelib.models.causal_lm import CausalLM
from moelib.train import step as step_module
from moelib.train import trainer as trainer_module
from moelib.train.trainer import SpmdTrainer
from moelib.verify import step_probe
from tests.tiny import model_config, plain_moe, stacked, trainer_config, transformer_layer
from tests.verify.bugs import Bug, replaces


def rich() -> SpmdTrainer.Config:
    """Returns a tiny trainer that uses every feature that a bug is planted in."""
    feed_forward = plain_moe(
        router=Router.default_config().set(bias_balancing=BiasBalancing.default_config()),
        dispatcher=SortedDispatcher.default_config(),
        shared_experts=FeedForward.default_config().set(hidden_dim=8),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.1),
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


# -- a: references of layers -----------------------------------------------------------------------


@replaces(dispatch, "run_sorted", "plain")
def weight_of_the_first_expert_for_the_second(known, local, *rest):
    """Where a token's best expert is expert 0, its second has the weight of the first."""
    swap = (local.ids[:, :1] == 0) & (jnp.arange(local.ids.shape[1]) == 1)[None]
    weights = jnp.where(swap, local.weights[:, :1], local.weights)
    return known(local._replace(weights=weights), *rest)


# -- b: gradients ----------------------------------------------------------------------------------


@replaces(moe_layer, "router_z_loss", "derivatives")
def auxiliary_loss_without_gradient(known, logits, mask):
    return jax.lax.stop_gradient(known(logits, mask))


@replaces(dispatch, "run_sorted", "derivatives")
def combine_weights_without_gradient(known, local, *rest):
    return known(local._replace(weights=jax.lax.stop_gradient(local.weights)), *rest)


@replaces(norm.RMSNorm, "forward", "derivatives")
def norm_with_a_constant_root(known, self, x):
    """The gradient of RMSNorm takes the root mean square as a constant."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + self.config.eps)
    return (x32 * jax.lax.stop_gradient(inverse) * self._scaled(x)).astype(x.dtype)


@replaces(CausalLM, "forward", "derivatives")
def z_loss_with_half_its_gradient(known, self, batch):
    """The loss of the vocabulary's logits has its z-loss, whose gradient has no factor of 2."""
    loss, metrics = known(self, batch)
    half = (loss.mean - metrics["cross_entropy"].mean) / 2
    return loss._replace(mean=loss.mean - half + jax.lax.stop_gradient(half)), metrics


# -- c: the same step in another form --------------------------------------------------------------


@replaces(step_module, "_shares", "plain")
def plain_mean_over_microbatches(known, *args):
    return 1.0, 1.0


@replaces(transformer, "scan_in_context", "plain")
def scan_with_the_parameters_of_the_next_layer(known, fn, *, state, **rest):
    return known(fn, state=jax.tree.map(lambda x: jnp.roll(x, -1, 0), state), **rest)


@replaces(context._Collecting, "finish", "plain")
def scan_without_state_updates(known, self, outputs):
    """Repeated layers lose the updates of their own state."""
    known(self, [part._replace(state_updates={}) for part in outputs])


@replaces(step_module, "collect", "plain")
def metrics_of_layers_are_lost(known, loss, metrics, collection, *rest):
    return known(loss, metrics, collection._replace(summaries={}), *rest)


# -- d: the learner --------------------------------------------------------------------------------


@replaces(step_module, "_end_step", "stepped")
def step_that_keeps_norms(known, model, learner, before, *rest):
    """The step returns the scales of norms that it was given."""
    after, metrics = known(model, learner, before, *rest)
    kept = lambda path, x, old: old if path.endswith("norm/scale") else x
    return after._replace(model=tree.map_by_path(kept, after.model, before.model)), metrics


@replaces(step_module, "_end_step", "stepped")
def layers_that_update_in_a_skipped_step(known, *args):
    *args, found = args
    taken = {name: x for name, x in found.items() if name != "skipped"}
    return known(*args, taken)[0], known(*args, found)[1]


# -- e: data ---------------------------------------------------------------------------------------


@replaces(lm_input, "fill_pieces", "data")
def labels_shifted_by_two(known, batch, rows, *rest):
    known(batch, rows, *rest)
    labels = batch["target_labels"]
    labels[rows, :-1] = labels[rows, 1:]


@replaces(lm_input, "fill_pieces", "data")
def positions_of_the_sequence(known, batch, rows, *rest):
    known(batch, rows, *rest)
    batch["positions"][rows] = np.arange(batch["positions"].shape[1])


@replaces(lm_input._PackedSource, "fill")
def second_epoch_repeats_its_first_sequence(known, self, numbers, *rest):
    n = self.num_sequences
    known(self, np.where(numbers >= n, n + (numbers - n) // 2 * 2 % n, numbers), *rest)


@replaces(lm_input, "make_plan")
def epochs_in_the_same_order(known, *args):
    *args, seeds = args
    return known(*args, (seeds[0], 0))


@replaces(lm_input, "make_plan")
def seed_without_effect(known, *args):
    *args, seeds = args
    return known(*args, (7, seeds[1]))


@replaces(mixture, "round_shares")
def sources_in_equal_shares(known, weights, total):
    return np.array([total // 2, total // 2])


@replaces(mixture.Mixture, "locate")
def sequences_of_a_mixture_twice(known, self, numbers):
    source, index = known(self, numbers)
    return source, index // 2


@replaces(packing.BestFitPlan, "__init__")
def full_sequences_that_overlap(known, self, source, seq_len, seeds):
    """With best-fit packing, the first sequence of a long document comes twice."""
    known(self, source, seq_len, seeds)
    after = np.flatnonzero((self._length[1:] == seq_len) & (np.diff(self._start) == seq_len))
    self._start[after + 1] -= 1


@replaces(trainer_module, "put_batch", "interrupted")
def batch_that_repeats_its_first_sequence(known, batch, *rest):
    """The prefetcher replaces the last sequence of a batch."""
    return known({n: np.concatenate([x[:-1], x[:1]]) for n, x in batch.items()}, *rest)


@replaces(lm_input.LMInputIterator, "restore", "hosts")
def restored_at_the_start_of_the_epoch(known, self, state):
    """A restore after the first epoch goes to the start of the epoch."""
    known(self, state)
    per_epoch = self.source.num_batches
    if self.step >= per_epoch:
        self.step -= self.step % per_epoch


@replaces(Prefetcher, "state", "interrupted")
def position_ahead_of_the_step(known, self):
    """A checkpoint has the position of the batch that was read ahead."""
    time.sleep(0.1)  # The thread has read ahead, on a busy machine too.
    return self._batches.state()


# -- f: casts, checkpoints -------------------------------------------------------------------------


@replaces(precision.CastAtUse, "cast", "derivatives")
def casts_at_use_without_gradient(known, self):
    """The last row of a parameter that is cast where it is read gets no gradient."""
    x = known(self)
    return x if x.ndim < 2 else x.at[-1].set(jax.lax.stop_gradient(x[-1]))


@replaces(precision.CastAtUse, "cast", "bfloat16")
def casts_to_bfloat16_with_twice_the_gradient(known, self):
    x = known(self)
    return x if x.dtype != jnp.bfloat16 else 2 * x - jax.lax.stop_gradient(x)


@replaces(precision, "read_parameters", "loss")
def cast_parameters_twice(known, params, specs, dtype, values):
    """Parameters are rounded to bfloat16 on their way to the compute dtype."""
    if dtype is not None:
        rounded = lambda path, x: x if path in values else jax.lax.reduce_precision(x, 8, 7)
        params = tree.map_by_path(rounded, params)
    return known(params, specs, dtype, values)


@replaces(norm.RMSNorm, "_scaled", "bfloat16")
def scale_without_gradient_in_bfloat16(known, self, x):
    scale = known(self, x)
    return jax.lax.stop_gradient(scale) if x.dtype == jnp.bfloat16 else scale


@replaces(Router, "_create_layer_parameter_specs", "bfloat16")
def router_cast_to_bfloat16(known, self):
    specs = known(self)
    return {**specs, "weight": dataclasses.replace(specs["weight"], cast=Cast.STEP)}


@replaces(step_module, "accumulate", "bfloat16")
def sums_of_gradients_cast_to_bfloat16(known, fn, batch, *, num_microbatches, state, sums):
    """Gradients of micro-batches in bfloat16 are summed in it."""
    done = known(fn, batch, num_microbatches=num_microbatches, state=state, sums=sums)
    rows = jax.tree.map(lambda x: x[::num_microbatches], batch)
    one = jax.eval_shape(lambda *args: fn(*args, None), rows, state)[2]
    # XLA removes a pair of casts.
    rounded = lambda x, like: jax.lax.reduce_precision(x, 8, 7) if like.dtype == jnp.bfloat16 else x
    return done._replace(gradients=jax.tree.map(rounded, done.gradients, one))


@replaces(step_probe, "make_train_step", "bfloat16")
def new_parameters_cast_to_bfloat16(known, *args, train_dtype, **rest):
    """A step in bfloat16 rounds the parameters that it returns."""
    step = known(*args, train_dtype=train_dtype, **rest)

    def train_step(state, batch):
        state, metrics = step(state, batch)
        if train_dtype == "bfloat16":
            rounded = lambda x: jax.lax.reduce_precision(x, 8, 7)
            state = state._replace(model=jax.tree.map(rounded, state.model))
        return state, metrics

    return train_step


@replaces(Checkpointer, "save", "saved")
def checkpoint_with_two_layers_swapped(known, self, state, record):
    swap = lambda x: x[::-1] if x.ndim > 1 and x.shape[0] == 2 else x
    swapped = lambda x: jax.device_put(swap(x), x.sharding)
    known(self, state._replace(model=jax.tree.map(swapped, state.model)), record)


# -- g: of layers, losses, schedules and names; found by tests against oracles ---------------------


@replaces(rope.YarnRotaryEmbedding, "frequencies")
def fastest_pair_slowed_too(known, self, dim):
    return known(self, dim).at[:, 0].divide(self.config.factor)


@replaces(loss_module, "cross_entropy")
def z_loss_of_half_its_weight(known, *args, z_loss, **rest):
    return known(*args, z_loss=z_loss / 2, **rest)


@replaces(moe_layer, "router_z_loss")
def router_z_loss_of_padding_too(known, logits, mask):
    return known(logits, jnp.ones_like(mask))


@replaces(moe_layer, "load_balance_loss")
def balance_of_this_micro_batch_alone(known, probs, ids, mask, *unused):
    return known(probs, ids, mask)


@replaces(multi_token_prediction, "_ahead")
def every_depth_predicts_the_second_token(known, x, num):
    return known(x, min(num, 1))


@replaces(schedules, "wsd")
def rate_of_the_step_before(known, *args, **options):
    return lambda step: known(*args, **options)(step - 1)


@replaces(FeedForward, "_create_layer_parameter_specs")
def fan_out_for_fan_in(known, self):
    swapped = lambda axes: dataclasses.replace(axes, in_axis=axes.out_axis, out_axis=axes.in_axis)
    changed = lambda spec: dataclasses.replace(spec, fan_axes=swapped(spec.fan_axes))
    return {name: changed(spec) for name, spec in known(self).items()}


@replaces(tensor_mapping, "layer_numbers")
def layers_in_the_order_of_their_names(known, decoder):
    for name, numbers in known(decoder):
        yield name, sorted(numbers, key=str)


BUGS = [each for each in list(globals().values()) if isinstance(each, Bug) and each.expected]
