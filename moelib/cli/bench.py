"""`moelib bench`: measures on this machine, beside what the machine can do at best.

    moelib bench step   one training step of a 17.6M-parameter Mixture-of-Experts model

Every figure is measured by turns with the rate of a plain matmul in the same process, so that a
busy machine slows both; least and median times are given.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from moelib.launch import UsageError, define_device_flags, set_up_devices

FLAGS = flags.FLAGS

BENCHMARKS = ("step",)


def define_flags() -> None:
    """Defines the flags of the command."""
    define_device_flags()
    flags.DEFINE_integer("repeats", 20, "How often each thing is measured.")
    flags.DEFINE_integer("batch_size", 8, "Rows of a step.")
    flags.DEFINE_integer("seq_len", 256, "Tokens of a row.")
    flags.DEFINE_integer("num_experts", 16, "Experts of each layer.")


def run(args: Sequence[str]) -> None:
    """Runs the benchmark that the argument names."""
    if len(args) != 1 or args[0] not in BENCHMARKS:
        raise UsageError(f"name one benchmark: {', '.join(BENCHMARKS)}.")
    set_up_devices()
    bench_step()


def model_config(num_experts: int) -> Any:
    """Returns the model: 4 layers of width 256, top-2 of the experts of width 256, 8/4 heads."""
    from moelib.layers.attention.grouped_query import GroupedQueryAttention
    from moelib.layers.moe.balance import LoadBalanceLoss
    from moelib.layers.moe.layer import MoELayer
    from moelib.layers.transformer import LoopStack, TransformerLayer
    from moelib.models.causal_lm import CausalLM

    moe = MoELayer.default_config().set(
        hidden_dim=256,
        num_experts=num_experts,
        num_experts_per_token=2,
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.01),
    )
    attention = GroupedQueryAttention.default_config().set(num_heads=8, num_kv_heads=4)
    layer = TransformerLayer.default_config().set(self_attention=attention, feed_forward=moe)
    decoder = LoopStack.default_config().set(num_layers=4, block=[layer])
    return CausalLM.default_config().set(vocab_size=8192, dim=256, decoder=decoder)


def learner_config() -> Any:
    """Returns AdamW with gradients clipped at a norm of 1."""
    from moelib.core.config import config_for_function
    from moelib.learner import transforms
    from moelib.learner.learner import Learner
    from moelib.learner.optimizers import adamw_optimizer

    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    adamw = config_for_function(adamw_optimizer).set(learning_rate=3e-4, weight_decay=0.1)
    chain = config_for_function(transforms.chain).set(args=[clip, adamw])
    return Learner.default_config().set(optimizer=chain)


def bench_step() -> None:
    """Prints tokens a second, FLOP/s and the share of the machine's matmul rate."""
    import jax

    from moelib.models.cost import model_cost
    from moelib.train.state import init_state
    from moelib.train.step import make_train_step

    model = model_config(FLAGS.num_experts).instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    learner = learner_config().instantiate(parent=None, param_specs=specs)
    cost = model_cost(model, seq_len=FLAGS.seq_len)
    state = init_state(model, learner, 0, None)
    batch = _random_batch(8192)
    begin = time.perf_counter()
    step = jax.jit(make_train_step(model, learner), donate_argnums=0).lower(state, batch).compile()
    compile_seconds = time.perf_counter() - begin

    def one_step() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics.vector

    matmul, matmul_flops = _matmul()
    times = interleaved({"step": one_step, "matmul": matmul}, FLAGS.repeats)
    tokens = FLAGS.batch_size * FLAGS.seq_len
    flops = cost.train_flops_per_token * tokens
    print(
        f"{cost.total_parameters / 1e6:.1f}M parameters, {cost.active_parameters / 1e6:.1f}M "
        f"active; {FLAGS.batch_size} x {FLAGS.seq_len} tokens, float32; "
        f"compiled in {compile_seconds:.1f} s"
    )
    for name, pick in (("best", min), ("median", statistics.median)):
        seconds, at_most = pick(times["step"]), matmul_flops / pick(times["matmul"])
        rate = flops / seconds
        print(
            f"{name:<7}{1e3 * seconds:8.1f} ms a step {tokens / seconds:10,.0f} tokens/s "
            f"{rate / 1e9:8.1f} GFLOP/s, {rate / at_most:.0%} of a plain matmul's "
            f"{at_most / 1e9:.0f}"
        )


def _random_batch(vocab_size: int) -> dict[str, Any]:
    import jax
    import numpy as np

    shape = (FLAGS.batch_size, FLAGS.seq_len)
    ids = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return jax.device_put(
        {
            "input_ids": ids,
            "target_labels": np.roll(ids, -1, 1),
            "segment_ids": np.ones_like(ids),
            "positions": positions,
        }
    )


def _matmul() -> tuple[Callable[[], Any], float]:
    """Returns a plain float32 matmul of [4096, 1024] x [1024, 1024], and its FLOPs."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (4096, 1024)), jax.random.normal(keys[1], (1024, 1024))
    multiply = jax.jit(jnp.matmul).lower(x, w).compile()
    return lambda: multiply(x, w), 2.0 * 4096 * 1024 * 1024


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each run, all taken by turns; the first turn is not counted."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, fn in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(fn())
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times
