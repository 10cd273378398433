"""Tasks as plain calls: the config of a run, evaluation, predictions."""

import contextlib
import functools
import inspect
import math
import numbers
import os
import typing
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, Literal, cast

import jax
import numpy as np
import optax

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.checkpoint.restore import restore_params_only
from moelib.core import config_types, tree
from moelib.core.config import (
    REQUIRED,
    InstantiableConfig,
    config_for_function,
    maybe_instantiate,
)
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.data.batches.lm_input import InputMode
from moelib.parallel import sharding
from moelib.parallel.mesh import MESH_AXIS_NAMES, create_device_mesh, parse_mesh
from moelib.parallel.sharding import abstract_arrays
from moelib.runs.folder import RunFolder
from moelib.runs.identity import AcceptedChange
from moelib.tasks.evaler import ExampleEvaler
from moelib.tasks.input import TaskInput
from moelib.tasks.task import Task
from moelib.train.shardings import shard_external_layers
from moelib.train.trainer import SpmdTrainer

# A sequence of examples, or a function that returns it (`TaskInput.Config.examples`).
Examples = Sequence[Any] | Callable[..., Any] | InstantiableConfig


def task_trainer_config(
    task: Task.Config,
    examples: Examples,
    *,
    optimizer: Any,
    batch_size: config_types.PositiveInt,
    max_step: int | None = None,
    num_epochs: float | None = None,
    eval_examples: Examples | None = None,
    save_every: int | None = None,
    best_metric: str | None = None,
    best_mode: Literal["min", "max"] = "min",
    num_microbatches: int = 1,
    mesh: str = "data=-1",
    params: Any = None,
    seed: int = 0,
    accept_changes: Sequence[AcceptedChange] | None = None,
) -> SpmdTrainer.Config:
    """Returns the config of a run of a task, whose fields may be changed before it is trained.

    Args:
        task: The task.
        examples: Examples of training, or a function that returns them.
        optimizer: An optimizer of Optax or moelib, or its config, whose learning rate is logged:
            config_for_function(adamw_optimizer).set(learning_rate=1e-3).
        batch_size: Examples per step, over all devices.
        max_step: Number of steps.
        num_epochs: Number of epochs, instead of max_step.
        eval_examples: Examples of the evaluation "validation"; None for none.
        save_every: Number of steps between checkpoints, and between evaluations; None for an epoch,
            or for all steps if the examples depend on the epoch.
        best_metric: Metric whose best checkpoint is kept, such as "validation/accuracy".
        best_mode: Whether the least or the largest metric is the best.
        num_microbatches: Parts of a batch computed one after the other.
        mesh: Devices per mesh axis, such as "fsdp=4,model=2".
        params: Initial parameters, instead of the task's `init`.
        seed: Seed of initial parameters, dropout and the order of examples.
        accept_changes: Accepted differences from the run that is resumed, such as ["config"].

    Raises:
        UserError: If there are no examples, or an argument is missing or invalid.
    """
    if "MultiSteps" in (settings := function_settings(optimizer)):
        raise UserError("optimizer is optax.MultiSteps; pass the one inside, and num_microbatches.")
    if isinstance(optimizer, optax.GradientTransformation):
        held = config_for_function(_optimizer_of_optax).set(given=optimizer)
        optimizer = held.set(settings=settings)
    training = _input(task, examples, batch_size).set(seed=seed)
    num_examples = training.instantiate().num_examples  # 0 if they depend on the epoch.
    length = num_epochs if max_step is None else max_step
    if (max_step is None) == (num_epochs is None) or not 0 < cast(float, length) < math.inf:
        raise UserError(
            f"max_step={max_step}, num_epochs={num_epochs}: set one of them, above 0 and finite."
        )
    if max_step is None and not num_examples:
        raise UserError("num_epochs: the examples depend on the epoch; set max_step instead.")
    # 1.1 * 100 / 10 is 11.000000000000002.
    steps = max_step or math.ceil(round(cast(float, num_epochs) * num_examples / batch_size, 6))
    if save_every is None:
        save_every = max(1, num_examples // batch_size) if num_examples else steps
    policy = config_for_function(every_n_steps_and_last_policy).set(n=save_every)
    cfg = SpmdTrainer.default_config().set(
        model=_with_params(task, params),
        input=training,
        max_step=steps,
        num_microbatches=num_microbatches,
        mesh_shape=parse_mesh(mesh),
        prng_seed=seed,
        accept_changes=accept_changes,
        skip_kernel_check=True,  # A task calls no kernel of ours.
    )
    if isinstance(optimizer, int | float):
        raise UserError(f"optimizer is {optimizer}; pass one, such as optax.adam({optimizer}).")
    cfg.learner.optimizer = optimizer
    cfg.checkpointer = Checkpointer.default_config().set(
        save_policy=policy,
        best_metric=best_metric,
        best_mode=best_mode,
        keep_best_n=int(best_metric is not None),
    )
    if eval_examples is not None:
        evaluation = _input(task, eval_examples, batch_size).set(mode=InputMode.EVALUATE)
        cfg.evalers = {
            "validation": ExampleEvaler.default_config().set(input=evaluation, eval_policy=policy)
        }
    return cfg


_PLAIN = {int, float, str, NoneType}  # Types of arguments that are checked.


def check_arguments(name: str, function: Callable[..., Any], *given: Any, **settings: Any) -> None:
    """Checks the arguments of a plain call by a signature: names, and types of numbers and texts.

    Raises:
        UserError: If one is missing, unknown or of another type.
    """
    signature = inspect.signature(function)
    config_types.refuse_unknown(f"{name} of a task", settings, signature.parameters)
    try:
        signature.bind(*given, **settings)
    except TypeError as error:
        raise UserError(f"{name} of a task: {error}.") from None
    for field, annotation in typing.get_type_hints(function).items():
        kinds = {config_types.without_limits(x) for x in config_types.options(annotation)}
        value = config_types.convert_value(settings.get(field), annotation)
        if field in settings and kinds <= _PLAIN and not config_types.fits(value, annotation):
            kind = config_types.describe_annotation(annotation)
            raise UserError(f"{field}={value!r}: pass {kind}.")


def _optimizer_of_optax(given: optax.GradientTransformation, settings: str) -> Any:
    """Returns the optimizer itself; `settings` identify it in the config of the run."""
    del settings
    return given


def function_settings(value: Any, outer: tuple[int, ...] = ()) -> str:
    """Returns the values that an optimizer's functions enclose, such as its learning rate, as text.

    Objects that are neither functions, numbers nor containers of them are named by their types.
    """
    if id(value) in outer:
        return "..."
    inside = functools.partial(function_settings, outer=(*outer, id(value)))
    if isinstance(value, functools.partial):
        return f"partial{inside((value.func, value.args, value.keywords))}"
    if inspect.ismethod(value):
        return f"{type(value.__self__).__name__}.{value.__name__}"
    if inspect.isfunction(function := inspect.unwrap(value) if callable(value) else value):
        enclosed = inspect.getclosurevars(function).nonlocals
        return f"{function.__qualname__.partition('.<')[0]}{inside(enclosed) if enclosed else ''}"
    if isinstance(value, dict):
        return f"({', '.join(f'{key}={inside(x)}' for key, x in value.items())})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(inside, value))})"
    if isinstance(value, np.ndarray | jax.Array) and value.size == 1:
        value = value.item()
    if hasattr(value, "shape"):
        return tree.array_text(value)
    return repr(value) if isinstance(value, numbers.Number | str | None) else type(value).__name__


def _input(task: Task.Config, examples: Any, batch_size: int) -> TaskInput.Config:
    given = examples if callable(examples) or isinstance(examples, InstantiableConfig) else None
    return TaskInput.default_config().set(
        examples=given or (lambda: examples), collate=task.collate, global_batch_size=batch_size
    )


def _with_params(task: Task.Config, params: Any) -> Task.Config:
    """Returns the task with these initial parameters, if given.

    Raises:
        UserError: If their names or shapes are not those of the task's own.
    """
    if params is None:
        return task
    if task.init is not REQUIRED:
        like = jax.eval_shape(maybe_instantiate(task.init), jax.random.key(0))
        if (difference := tree.mismatch(params, like)) is not None:
            raise UserError(f"params: {difference}, as init returns; pass a tree like that.")
        params = tree.from_nested(tree.to_nested(params), like)
    return task.clone(init=lambda key: params)


@contextlib.contextmanager
def _ready(
    task: Task.Config,
    examples: Any,
    *,
    trainer_dir: str | os.PathLike[str] | None = None,
    params: Any = None,
    step: int | None = None,
    batch_size: config_types.PositiveInt = 64,
    mesh: str = "data=-1",
    seed: int = 0,
) -> Iterator[tuple[ExampleEvaler, Any, jax.sharding.Mesh]]:
    """Sets the mesh; yields an evaler, the parameters, and the mesh."""
    if not isinstance(task, Task.Config):
        raise UserError(f"task is {task!r:.80}; pass the config of a task.")
    if (trainer_dir is None) == (params is None):
        raise UserError("trainer_dir and params: set one of them to what is evaluated.")
    if step is not None and params is not None:
        raise UserError(f"step={step}: a checkpoint of trainer_dir, not of params; remove it.")
    model = _with_params(task, params).clone(name="task").instantiate(parent=None)
    source = _input(task, examples, batch_size).set(mode=InputMode.EVALUATE)
    cfg = ExampleEvaler.default_config().set(name="evaluation", input=source, prng_seed=seed)
    evaler = cfg.instantiate(parent=None, model=model)
    devices = create_device_mesh(parse_mesh(mesh, num_devices=jax.device_count()), MESH_AXIS_NAMES)
    axes = sharding.mesh_axes("batch", dict(devices.shape))
    if batch_size % (parts := math.prod(devices.shape[axis] for axis in axes)):
        raise UserError(
            f"batch_size={batch_size} does not divide over {parts} groups of devices (mesh "
            f"{mesh!r}, axes {', '.join(axes)}); set it to a multiple of {parts}. The number of "
            "examples may be any."
        )
    with jax.set_mesh(devices):
        batch = source.instantiate().abstract_batch
        shard_external_layers(model, dict(devices.shape), batch)
        arrays = abstract_arrays(model.create_parameter_specs_recursively(), devices)
        if trainer_dir is not None:
            folder = RunFolder(trainer_dir).checkpoints
            held = restore_params_only(folder, arrays, step=step).state
        else:
            shardings = jax.tree.map(lambda x: x.sharding, arrays)
            held = jax.device_put(tree.to_nested(params), shardings)
        yield evaler, held, devices


def evaluate_task(task: Task.Config, examples: Examples, **settings: Any) -> Scalars:
    """Returns the loss and the metrics of a task over all examples.

    `settings` are the arguments of `predict`.
    """
    check_arguments("moelib.evaluate", _ready, task, examples, **settings)
    with _ready(task, examples, **settings) as (evaler, params, mesh):
        return evaler.evaluate(params, mesh)


def predict(task: Task.Config, examples: Examples, **settings: Any) -> list[Any]:
    """Returns the result of each example, in their order.

    Args:
        task: The task, with a function `predict`.
        examples: The examples, or a function that returns them.
        settings: `trainer_dir`, the folder of the task's run, and `step`, that of its checkpoint
            (the newest); or `params`, the parameters themselves. `batch_size`, the examples per
            call of the function, over all devices (64); `mesh`, such as "fsdp=4,model=2" (all
            devices along "data"); and `seed` of the keys that the function gets, one per batch (0).

    Raises:
        UserError: If an argument is invalid, or there are no examples.
        DamagedCheckpointError: If no checkpoint can be read.
    """
    check_arguments("moelib.predict", _ready, task, examples, **settings)
    with _ready(task, examples, **settings) as (evaler, params, mesh):
        return evaler.predictions(params, mesh)
