"""Fine-tuning of a Hugging Face model: the config of its run, and the numbers that are trained."""

import dataclasses
import logging
import math

import jax

from moelib.checkpoint.safetensors import check_tensors
from moelib.core.config import config_for_function
from moelib.core.config_types import did_you_mean
from moelib.core.errors import UserError
from moelib.core.param import specs_by_path
from moelib.huggingface.pretrained import read_config
from moelib.learner import schedules, transforms
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.objective import DirectPreference, Objective, PolicyGradient
from moelib.parallel.mesh import mesh_shape_from_axes, parse_mesh
from moelib.runs.identity import check_accepted
from moelib.runtime.command_line import check_used
from moelib.runtime.table import Table, print_table
from moelib.tasks.fine_tuning import FineTuning
from moelib.tasks.finetune_data import input_of
from moelib.tasks.fit import FitResult, fit
from moelib.tasks.rollout_samples import RolloutSamples
from moelib.train.adapters import add_adapters
from moelib.train.init_from import InitFrom
from moelib.train.trainer import SpmdTrainer

logger = logging.getLogger(__name__)

_DTYPES = "float32", "bfloat16", "float16"
_OF_ADAPTERS = "lora_rank", "targets", "train_router"


def finetune_config(settings: FineTuning) -> SpmdTrainer.Config:
    """Returns the config of a run that fine-tunes a model.

    Examples are packed whole into sequences, and do not see each other; a pair of answers is a
    sequence, and so is an answer with a reward. The learning rate rises over a twentieth of the
    steps, and falls as a cosine. Frozen weights are stored in `dtype`, and trained ones in float32.

    Raises:
        MissingFileError: If there are no data.
        UserError: If the model cannot be read, `targets` matches no layer, or a setting is missing.
    """
    _check_settings(settings)
    model, _ = read_config(settings.model)
    check_tensors(settings.model)
    peak_lr = settings.lr
    if peak_lr is None:
        peak_lr = (2e-4 if settings.objective == "sft" else 1e-5) * (0.1 if settings.full else 1)
    mesh = parse_mesh(settings.mesh) if settings.mesh else mesh_shape_from_axes(fsdp=-1)
    model.objective = _objective(settings)
    cfg = SpmdTrainer.default_config().set(
        name="finetune",
        dir=settings.trainer_dir,
        max_step=settings.max_step,
        mesh_shape=mesh,
        train_dtype=settings.dtype,
        model=model if settings.full else model.set(dtype=settings.dtype),
        init_from=InitFrom.default_config().set(run=settings.model),
        accept_changes=check_accepted(settings.accept_changes) or None,
    )
    schedule = config_for_function(schedules.cosine).set(
        peak_lr=peak_lr, max_step=settings.max_step, warmup_steps=settings.max_step // 20
    )
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    adamw = config_for_function(adamw_optimizer).set(learning_rate=schedule)
    cfg.learner.optimizer = config_for_function(transforms.chain).set(args=[clip, adamw])
    if not settings.full:
        names = {"rank": settings.lora_rank, "train_router": settings.train_router}
        add_adapters(cfg, settings.targets, **names)
    sizes = _sizes(cfg)  # Raises errors of settings before data are prepared, maybe for minutes.
    if not settings.full and sizes["trained"][0] > sizes["frozen"][0]:
        logger.warning(
            "The adapters have more parameters than the model, and save nothing; set lora_rank "
            "(--lora_rank) lower, or full (--full)."
        )
    if settings.objective in ("grpo", "gspo"):
        cfg.watchers["rollouts"] = RolloutSamples.default_config()
    return cfg.set(input=input_of(settings, model))


def _check_settings(settings: FineTuning) -> None:
    """Raises UserError if a setting is missing, has no effect, or is out of range."""
    for name in ("model", "data", "trainer_dir"):
        if not getattr(settings, name):
            raise UserError(f"{name} is not set; set {name} (--{name}).")
    check_used(settings, "the objective", settings.objective)
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in _OF_ADAPTERS:
        if settings.full and getattr(settings, name) != defaults[name]:
            raise UserError(
                f"{name} (--{name}) is of adapters, but full (--full) trains all parameters; "
                "remove one of the two."
            )
    for name in ("lr", "reward_seconds"):
        if (value := getattr(settings, name)) is not None and not 0 < value < math.inf:
            raise UserError(f"{name} (--{name}) is {value}; set it above 0.")
    if settings.dtype not in _DTYPES:
        raise UserError(
            f"dtype (--dtype) is {settings.dtype!r}; {did_you_mean(settings.dtype, _DTYPES)}"
        )


def _objective(settings: FineTuning) -> Objective.Config | None:
    """Returns the loss of an objective; None for the cross-entropy."""
    if settings.objective == "sft":
        return None
    if settings.objective == "dpo":
        return DirectPreference.default_config().set(beta=settings.beta)
    loss = PolicyGradient.default_config()
    if settings.objective == "gspo":  # Distances of arXiv:2507.18071, section 5.1.
        loss.set(ratio="sequence", mean="sequence", clip_below=3e-4, clip_above=4e-4)
    return loss


def _sizes(cfg: SpmdTrainer.Config) -> dict[str, tuple[int, int]]:
    """Returns the numbers of trained and frozen parameters of a run, and their bytes."""
    specs = cfg.model.instantiate(parent=None).create_parameter_specs_recursively()
    learner = cfg.learner.clone(name="learner").instantiate(parent=None, param_specs=specs)
    sizes = {"trained": (0, 0), "frozen": (0, 0)}
    for path, spec in specs_by_path(specs).items():
        name = "trained" if learner.is_updated(path) else "frozen"
        num, size = sizes[name]
        sizes[name] = num + spec.size, size + spec.size * jax.numpy.dtype(spec.dtype).itemsize
    return sizes


def parameter_table(cfg: SpmdTrainer.Config) -> Table:
    """Returns the numbers of trained and frozen parameters of a run, and their bytes."""
    sizes = _sizes(cfg)
    total = sum(num for num, _ in sizes.values())
    rows = [
        (name, f"{num:,}", f"{num / total:.2%}", f"{size / 2**30:.3f}")
        for name, (num, size) in sizes.items()
    ]
    return Table("", ["parameters", "number>", "share>", "GiB>"], rows)


def finetune(settings: FineTuning) -> FitResult:
    """Fine-tunes a model, or resumes its run; prints the numbers of parameters.

    Raises:
        Exception: The errors of `finetune_config` and `moelib.fit`.
    """
    if settings.mesh:
        parse_mesh(settings.mesh, num_devices=jax.device_count(), field="mesh")
    cfg = finetune_config(settings)
    print_table(parameter_table(cfg))
    return fit(cfg)
