"""The program of a training step: its trace without data, its checks, and its compilation.

The functions take an `SpmdTrainer`, whose methods call them.
"""

from typing import Any

import jax

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.param import is_spec
from moelib.data.batches.prefetch import row_sharding
from moelib.kernels.backend import warn_unused_backends
from moelib.parallel import sharding
from moelib.parallel.pipeline.schedule import check_microbatches
from moelib.train.compiler_options import compile_with
from moelib.train.no_gradient import warn_without_gradient
from moelib.train.pipeline import PipelineConfig, stack_of, warn_empty_stages
from moelib.train.settings import schedule_on, warn_unused_schedule
from moelib.train.step import TrainStep, make_own_train_step, make_train_step
from moelib.train.watchers import gradient_noise


def pipeline_of(trainer: Any) -> PipelineConfig | None:
    """Returns the pipeline of a step; see `SpmdTrainer.pipeline`."""
    cfg, num_ranks = trainer.config, trainer.mesh_sizes.get("pipeline", 1)
    schedule = schedule_on(cfg, trainer.mesh_sizes)
    if schedule is None:
        return None
    stack_of(trainer.model)
    check_microbatches(schedule, num_ranks, cfg.num_microbatches)
    gradient_noise.check(cfg.log_gradient_noise, cfg.num_microbatches, in_pipeline=True)
    on_cpus = trainer.mesh().devices.flat[0].platform == "cpu"
    return PipelineConfig(schedule, num_ranks, uniform=on_cpus)


def trace_step(trainer: Any, batch: Any, pipeline: PipelineConfig | None) -> jax.stages.Traced:
    """Returns the step in a pipeline, or without one, as a jaxpr.

    `batch` is that of `SpmdTrainer.trace_train_step`.
    """
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=row_sharding(trainer.batch_sharding, len(x.shape))
        ),
        trainer.abstract_batch() if batch is None else batch,
    )
    shardings = trainer.trainer_state_shardings
    state = sharding.abstract_state(trainer.trainer_state_specs, shardings)
    step = _step_function(trainer, pipeline)
    replicated = jax.sharding.NamedSharding(trainer.mesh(), jax.sharding.PartitionSpec())
    with trainer.on_mesh():
        jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(shardings, replicated))
        traced = jitted.trace(state, batch)
    trainer.check_sharding_rules()
    return traced


def _step_function(trainer: Any, pipeline: PipelineConfig | None) -> TrainStep:
    cfg = trainer.config
    if not trainer.model.has_own_step:
        return make_train_step(
            trainer.model,
            trainer.learner,
            train_dtype=cfg.train_dtype,
            num_microbatches=cfg.num_microbatches,
            pipeline=pipeline,
            log_gradient_noise=cfg.log_gradient_noise,
            # Saves the memory of a micro-batch's gradients. On GPUs only: a CPU's compiler rounds
            # some sums otherwise, by a bit, and steps of TPUs were not compiled with it.
            sum_by_layer=trainer.mesh().devices.flat[0].device_kind.startswith("NVIDIA"),
        )
    if cfg.num_microbatches > 1 or cfg.train_dtype is not None:
        raise UserError(
            f"num_microbatches={cfg.num_microbatches}, train_dtype={cfg.train_dtype}: a model with "
            "its own train_step uses neither; leave them unset."
        )
    return make_own_train_step(trainer.model, trainer.learner)


def compile_step(trainer: Any, batch: Any) -> jax.stages.Compiled:
    """Returns the compiled step, after warnings of settings without an effect.

    See `SpmdTrainer.compile_train_step`.
    """
    cfg, model, pipeline = trainer.config, trainer.model, trainer.pipeline
    warn_unused_schedule(cfg, trainer.mesh_sizes)
    traced = trainer.trace_train_step(batch)
    warn_unused_backends(cfg.kernel_backends)
    trained = tree.select(trainer.trainer_state_specs.model, trainer.learner.is_updated)
    if not trained and not model.has_own_step:
        raise UserError(
            "no parameter is trained: all are integers, booleans, `fixed` or frozen; give the "
            "model one array of floats, or, for a task, set train_step."
        )
    # Gradients that a pipeline sums in its loop are no constants; those of a plain step are.
    plain = traced
    if pipeline is not None:
        warn_empty_stages(model, pipeline)
        plain = trace_step(trainer, batch, None)
    warn_without_gradient(plain.jaxpr, len(tree.by_path(trained, is_spec)))
    with trainer.on_mesh():
        lowered = traced.lower()
    compiled = compile_with(lowered, trainer.compiler_options())
    if trainer.on_compiled is not None:
        trainer.on_compiled(traced, lowered, compiled)
    return compiled
