"""Lint of computation: matmuls beyond those of the model, and remats that save nothing."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config_paths import sub_configs
from moelib.core.jaxpr import abstract_parameters, forward_pass, walk
from moelib.data.input import batch_spec
from moelib.planning.hlo import values
from moelib.planning.lint.facts import Step
from moelib.planning.report.step_report import Finding

# FLOPs of XLA's matmuls, as a multiple of the model's; full recomputation gives 4/3.
_MAX_FLOPS = 2.0
_SAVE_NOTHING = (None, "nothing_saveable")  # Policies that save nothing on purpose.
_DENSE = "dense grouped matmul"


def dense_grouped_matmuls(step: Step) -> Iterator[Finding]:
    """Finds grouped matmuls that the compiler computes for every row and every group."""
    for computation, each in step.program.instructions():
        matmul = computation.executions and values.is_matmul(each)
        if matmul and "ragged_dot" in each.op_name:
            advice = _dense_advice(step)
            yield step.finding(_DENSE, "warning", computation, each, advice=advice)


def traced_dense_grouped_matmuls(step: Step, traced: Any) -> Iterator[Finding]:
    """Finds them in the traced step: except on TPUs, JAX expands them before the compiler."""
    for eqn, _ in walk(traced.jaxpr) if step.facts.platform != "tpu" else ():
        if eqn.primitive.name == "ragged_dot_general":
            name, out = str(eqn.source_info.name_stack), eqn.outvars[0].aval
            yield Finding(
                _DENSE,
                "warning",
                f"ragged_dot {out.str_short()}",
                step.config_path(name),
                _dense_advice(step),
                bytes=out.size * out.dtype.itemsize,
                op_name=name,
            )


def _dense_advice(step: Step) -> str:
    groups = max(step.facts.num_experts, default=0)
    cost = f", up to {groups} times the work" if groups else ""
    return (
        "jax.lax.ragged_dot has no kernel here and multiplies all rows with each group's matrix"
        f"{cost}; call moelib.kernels.gmm instead."
    )


def more_flops_than_the_model(step: Step, model_flops: int) -> Iterator[Finding]:
    """Finds XLA matmuls far beyond those that the model counts, and names the largest."""
    found = [
        (values.matmul_flops(each, computation) * computation.executions, computation, each)
        for computation, each in step.program.instructions()
        if computation.executions and values.is_matmul(each)
    ]
    total = sum(flops for flops, *_ in found)
    if model_flops and total > _MAX_FLOPS * model_flops:
        flops, computation, each = max(found, key=lambda row: row[0])
        yield step.finding(
            "more FLOPs than the model", "warning", computation, each,
            advice=f"matmuls take {total / model_flops:.1f} times the FLOPs that the model counts, "
            f"{100 * flops / total:.0f}% of them here; check that it does not compute experts "
            "without tokens, or the same on every device.",
        )  # fmt: skip


def remats_that_save_nothing(trainer: Any) -> list[Finding]:
    """Returns a finding for each remat whose policy saves nothing of the block that it wraps.

    The forward pass of the trainer's model is traced for this.
    """
    cfg = trainer.config
    remats = [
        f"model.{path}"
        for path, inside in sub_configs(cfg.model)
        if path.rpartition(".")[2] == "remat" and _should_save(inside)
    ]
    if not remats:
        return []
    params = abstract_parameters(trainer.trainer_state_specs.model, cfg.train_dtype)
    shapes = batch_spec(cfg.input.global_batch_size // cfg.num_microbatches, cfg.input.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    with trainer.on_mesh():
        trace = jax.make_jaxpr(forward_pass(trainer.model))(params, batch)
    wrapped = [eqn for eqn, _ in walk(trace) if {"policy", "prevent_cse"} <= eqn.params.keys()]
    idle = [eqn for eqn in wrapped if not _saves(eqn.params["jaxpr"], eqn.params["policy"])]
    if len(idle) < len(wrapped) or not wrapped:
        return []
    advice = (
        "its policy matches no result in the block, so that everything is recomputed; list "
        "activations of the block in `keep`, or remove the policy."
    )
    rule = "remat policy that saves nothing"
    blocks = f"{len(idle)} blocks"
    return [Finding(rule, "warning", blocks, path, advice) for path in remats]


def _should_save(cfg: Any) -> bool:
    """Returns whether a remat's config is meant to save anything."""
    fields = dict(cfg.items())
    if "policy" not in fields:
        return True  # A function of the user's own.
    saves = fields.get("keep") or fields.get("offload")
    return fields["policy"] not in _SAVE_NOTHING or bool(saves)


def _saves(jaxpr: Any, policy: Any) -> bool:
    """Returns whether a policy saves any result of a block, on the device or the host."""
    for eqn, _ in walk(jaxpr):
        if policy is None or eqn.params.get("name") == "routing":
            continue  # Routing is saved with any policy.
        decision = policy(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
        if decision and type(decision).__name__ != "RecomputeType":
            return True
    return False
