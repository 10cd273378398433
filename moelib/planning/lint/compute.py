"""Lint of computation: matmuls beyond those of the model, and remats that save nothing."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config_text import sub_configs
from moelib.core.jaxpr import abstract_parameters, forward_pass, walk
from moelib.data.batches.input import batch_spec
from moelib.planning.hlo import values
from moelib.planning.lint.facts import Facts, Step, is_shard
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


def traced_large_arrays(step: Step, traced: Any) -> Iterator[Finding]:
    """Finds whole attention scores, whole logits, and large matmuls in float32.

    A trace has the sizes of all devices outside of `jax.shard_map`, where the bytes reported are
    those of an array that every axis splits.
    """
    kernels = ("shard_map", "pallas_call")
    for eqn, _ in walk(traced.jaxpr, opaque=kernels):
        sites = [(eqn, math.prod(step.facts.mesh.values()))]
        if eqn.primitive.name == "shard_map":
            sites = [(each, 1) for each, _ in walk(eqn.params["jaxpr"], opaque=kernels)]
        for each, parts in sites:
            yield from _large_array(step, each, parts)


def _large_array(step: Step, eqn: Any, parts: int) -> Iterator[Finding]:
    """Finds what the result of an equation is, if it is large; `parts` devices share it."""
    out: Any = eqn.outvars[0].aval if eqn.outvars else None
    facts = step.facts
    if not jnp.issubdtype(getattr(out, "dtype", bool), jnp.floating):
        return
    size = out.size * out.dtype.itemsize // parts
    if size < step.thresholds.activation or not out.ndim:
        return
    name, is_whole = str(eqn.source_info.name_stack), parts > 1
    length = facts.seq_len // (1 if is_whole else facts.mesh.get("seq", 1))
    tokens = facts.batch_size * length // (1 if is_whole else facts.batch_parts)
    vocab = [[size] for size in facts.sizes_of("vocab")]
    by_token = math.prod(out.shape[:-1]) == tokens
    rule, advice = "", ""
    if out.ndim > 3 and out.shape[-2:] == (length, facts.seq_len):
        rule = "dense attention scores"
        advice = "all scores are computed at once; call moelib.kernels.flash_attention instead."
    elif (
        by_token
        and eqn.primitive.name == "dot_general"
        and any(is_shard([out.shape[-1]], each, facts.mesh) for each in vocab)
    ):
        if _is_of_cross_entropy(eqn):  # A single chunk, which its kernel has chosen.
            return
        rule = "whole logits"
        advice = "the logits of all tokens are held; call moelib.kernels.cross_entropy instead."
    elif by_token and facts.train_dtype == "bfloat16" and _is_float32_matmul(eqn, facts):
        rule = "matmul in float32"
        advice = "both operands are float32, although the step computes in bfloat16: cast them."
    if rule:
        text, path = f"{eqn.primitive.name} {out.str_short()}", step.config_path(name)
        yield Finding(rule, "warning", text, path, advice, bytes=size, op_name=name)


def _is_of_cross_entropy(eqn: Any) -> bool:
    """Returns whether the kernel of the loss traced an equation."""
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return any("/moelib/kernels/cross_entropy/" in frame.file_name for frame in frames)


def _is_float32_matmul(eqn: Any, facts: Facts) -> bool:
    """Returns whether both operands are float32, and the matmul is not that of a router."""
    if eqn.primitive.name != "dot_general":
        return False
    sizes = {size for var in eqn.invars for size in var.aval.shape}
    is_router = bool(sizes & facts.num_experts)
    return not is_router and all(var.aval.dtype == jnp.float32 for var in eqn.invars)


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
