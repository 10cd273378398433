"""Lint of what a step computes: matmuls that no model asked for, and a remat that keeps nothing."""

from collections.abc import Iterator
from typing import Any

import jax

from moelib.core.config_paths import sub_configs
from moelib.core.module import functional
from moelib.data.input import batch_spec
from moelib.parallel import sharding
from moelib.planning.hlo import values as hlo_values
from moelib.planning.lint.facts import Step
from moelib.planning.report.step_report import Finding

_MANY_TIMES = 2.0  # FLOPs of XLA's matmuls over the model's: recomputing everything gives 4/3.
_NOTHING = (None, "nothing_saveable")  # Policies that are meant to keep nothing.


def dense_grouped_matmuls(step: Step) -> Iterator[Finding]:
    """Grouped matmuls that the compiler computes for every row and every group."""
    for computation, each in step.program.instructions():
        matmul = computation.executions and hlo_values.is_matmul(each)
        if matmul and "ragged_dot" in each.op_name:
            advice = _advice(step)
            yield step.finding(_DENSE, "warning", computation, each, advice=advice)


def dense_grouped_matmuls_traced(step: Step, traced: Any) -> Iterator[Finding]:
    """The same in JAX's own program: but for a TPU, JAX expands them before the compiler.

    Args:
        step: The step under lint.
        traced: The same, a `jax.stages.Traced`.
    """
    if step.facts.platform == "tpu":
        return
    for eqn in _equations(traced.jaxpr.jaxpr):
        if eqn.primitive.name == "ragged_dot_general":
            name, out = str(eqn.source_info.name_stack), eqn.outvars[0].aval
            yield Finding(
                rule=_DENSE,
                severity="warning",
                instruction=f"ragged_dot {out.str_short()}",
                bytes=out.size * out.dtype.itemsize,
                executions=0,
                op_name=name,
                places=(),
                config_path=step.config_path(name),
                advice=_advice(step),
            )


_DENSE = "dense grouped matmul"


def _advice(step: Step) -> str:
    groups = max(step.facts.num_experts, default=0)
    said = f", up to {groups} times the work" if groups else ""
    return (
        "jax.lax.ragged_dot has no kernel here and becomes a matmul of all rows with each group's "
        f"matrix{said}; call moelib.kernels.gmm instead."
    )


def more_matmuls_than_the_model(step: Step, model_flops: int) -> Iterator[Finding]:
    """Matmuls of XLA that are together far above what the model needs, the largest one named."""
    found = [
        (hlo_values.matmul_flops(each, computation) * computation.executions, computation, each)
        for computation, each in step.program.instructions()
        if computation.executions and hlo_values.is_matmul(each)
    ]
    total = sum(flops for flops, *_ in found)
    if model_flops and total > _MANY_TIMES * model_flops:
        flops, computation, each = max(found, key=lambda row: row[0])
        yield step.finding(
            "more FLOPs than the model's", "warning", computation, each,
            advice=f"matmuls take {total / model_flops:.1f} times the FLOPs that the model counts; "
            f"this one takes {100 * flops / total:.0f} % of them: is it computed for experts that "
            "were not chosen, or on every device alike?",
        )  # fmt: skip


def remat_that_keeps_nothing(trainer: Any) -> list[Finding]:
    """Returns a finding for each remat whose policy keeps nothing of the block that it wraps.

    The model is traced once more, forward only.

    Args:
        trainer: A `SpmdTrainer`.
    """
    asked = [
        (f"model.{path}", inside)
        for path, inside in sub_configs(trainer.config.model)
        if path.rpartition(".")[2] == "remat" and _asks(inside)
    ]
    if not asked:
        return []
    wrapped = list(_checkpoints(_forward(trainer).jaxpr))
    idle = [eqn for eqn in wrapped if not _keeps(eqn.params["jaxpr"], eqn.params["policy"])]
    if len(idle) < len(wrapped) or not wrapped:
        return []
    return [
        Finding(
            rule="remat policy that keeps nothing",
            severity="warning",
            instruction=f"{len(idle)} blocks",
            bytes=0,
            executions=0,
            op_name="",
            places=(),
            config_path=path,
            advice="its policy matches no result in the block, so all is computed again, as "
            "without a policy; name points that the block has (keep), or unset it.",
        )
        for path, _ in asked
    ]


def _asks(cfg: Any) -> bool:
    """Returns whether a remat's config says to keep anything."""
    fields = dict(cfg.items())
    if "policy" not in fields:
        return True  # A function of the user's.
    return fields["policy"] not in _NOTHING or bool(fields.get("keep") or fields.get("offload"))


def _forward(trainer: Any) -> Any:
    """Returns the jaxpr of the model's forward pass on the trainer's mesh, nothing computed."""
    cfg = trainer.config
    specs = trainer.trainer_state_specs.model
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, cfg.train_dtype or spec.dtype),
        specs,
        is_leaf=lambda x: hasattr(x, "axes") and hasattr(x, "shape"),
    )
    shapes = batch_spec(cfg.input.global_batch_size // cfg.num_microbatches, cfg.input.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in shapes.items()}

    def forward(params: Any, batch: Any, data: Any) -> Any:
        key = jax.random.wrap_key_data(data)
        outputs, _ = functional(trainer.model, key, params, (batch,), is_training=True)
        return jax.tree.leaves(outputs)

    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    with (
        jax.set_mesh(trainer.mesh()),
        sharding.sharding_rules(cfg.sharding_rules or {}),
    ):
        return jax.make_jaxpr(forward)(params, batch, data)


def _checkpoints(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of `jax.checkpoint`, those inside others too."""
    return (eqn for eqn in _equations(jaxpr) if {"policy", "prevent_cse"} <= eqn.params.keys())


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inside in _inner(eqn):
            yield from _equations(inside)


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


def _keeps(jaxpr: Any, policy: Any) -> bool:
    """Returns whether a policy keeps, on the device or the host, any result of a block."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if _routing(eqn):
            continue  # Kept whatever the policy is.
        avals = [var.aval for var in eqn.invars]
        said = policy(eqn.primitive, *avals, **eqn.params) if policy is not None else False
        if said and type(said).__name__ != "RecomputeType":
            return True
        if any(_keeps(inside, policy) for inside in _inner(eqn)):
            return True
    return False


def _routing(eqn: Any) -> bool:
    return eqn.params.get("name") == "routing"
