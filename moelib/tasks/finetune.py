"""Fine-tuning of a Hugging Face model: the config of its run, and the numbers that are trained."""

import dataclasses
import os

import jax

from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.core.param import specs_by_path
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.packing import LongDocuments, Packing
from moelib.data.sources.source_for_path import source_for_path
from moelib.data.tokens.chat.labels import chat_options
from moelib.data.tokens.chat.template import find_template
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import META, TokenStore
from moelib.huggingface.pretrained import read_config
from moelib.huggingface.published_tokenizer import read_tokenizer
from moelib.learner import schedules, transforms
from moelib.learner.optimizers import adamw_optimizer
from moelib.parallel.mesh import mesh_shape_from_axes, parse_mesh
from moelib.runtime.table import Table, print_table
from moelib.tasks.fit import FitResult, fit
from moelib.train.adapters import add_adapters
from moelib.train.init_from import InitFrom
from moelib.train.trainer import SpmdTrainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What to train, and how."""

    model: str  # Folder of a Hugging Face model.
    # Folder of a token store, prepared with the model's tokenizer; or records of conversations,
    # which are prepared into the folder `<trainer_dir>.data`.
    data: str
    chat_template: str | None = None  # As for `find_template`; None for that of the model.
    trainer_dir: str  # Folder of the run.
    lora_rank: int | None = 16  # Rank of the adapters; None trains all parameters.
    targets: str = ".*"  # Regular expression of the layers that are adapted; see `add_adapters`.
    train_router: bool = False  # Whether routers are trained with adapters, and the load balanced.
    max_step: int = 1000
    lr: float | None = None  # Peak learning rate; None for 2e-4, or 2e-5 of all parameters.
    batch_size: int = 16  # Sequences per step.
    seq_len: int = 2048  # Tokens per sequence.
    dtype: str = "bfloat16"  # Dtype of both passes, and of frozen weights.
    mesh: str | None = None  # Sizes of mesh axes, as "fsdp=4,expert=2"; None for FSDP.


def finetune_config(settings: FineTuning) -> SpmdTrainer.Config:
    """Returns the config of a run that fine-tunes a model.

    Examples are packed whole into sequences, and do not see each other. The learning rate rises
    over a twentieth of the steps, and falls as a cosine. Frozen weights are stored in `dtype`, and
    trained ones in float32.

    Raises:
        MissingFileError: If there are no data.
        UserError: If the model cannot be read, or `targets` matches no layer.
    """
    store = _prepared(settings)
    is_lora = settings.lora_rank is not None
    model, _ = read_config(settings.model)
    peak_lr = (2e-4 if is_lora else 2e-5) if settings.lr is None else settings.lr
    mesh = parse_mesh(settings.mesh) if settings.mesh else mesh_shape_from_axes(fsdp=-1)
    cfg = SpmdTrainer.default_config().set(
        name="finetune",
        dir=settings.trainer_dir,
        max_step=settings.max_step,
        mesh_shape=mesh,
        train_dtype=settings.dtype,
        model=model.set(dtype=settings.dtype) if is_lora else model,
        init_from=InitFrom.default_config().set(run=settings.model),
        input=LMInput.default_config().set(
            source=TokenStore.default_config().set(path=store),
            seq_len=settings.seq_len,
            global_batch_size=settings.batch_size,
            packing=Packing.BEST_FIT,
            long_documents=LongDocuments.SPLIT,
            vocab_size=model.vocab_size,
        ),
    )
    schedule = config_for_function(schedules.cosine).set(
        peak_lr=peak_lr, max_step=settings.max_step, warmup_steps=settings.max_step // 20
    )
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    adamw = config_for_function(adamw_optimizer).set(learning_rate=schedule)
    cfg.learner.optimizer = config_for_function(transforms.chain).set(args=[clip, adamw])
    if settings.lora_rank is None:
        return cfg
    return add_adapters(
        cfg, settings.targets, rank=settings.lora_rank, train_router=settings.train_router
    )


def _prepared(settings: FineTuning) -> str:
    """Returns the token store of the data; conversations are prepared now, next to the run.

    Raises:
        UserError: If the data are neither a token store nor records of conversations, or there is
            no chat template.
    """
    data = settings.data
    if os.path.exists(os.path.join(data, META)):
        return data
    records = source_for_path(data, text_field=None).instantiate()
    records.parts()  # Absent files are the first error.
    tokenizer = read_tokenizer(settings.model, published=True)
    template = find_template(settings.model, settings.chat_template, tokenizer)
    if template is None:
        raise UserError(
            f"model={settings.model} has no chat template; set chat_template (--chat_template) to "
            "chatml, llama3, plain or a file of Jinja."
        )
    chat = chat_options(template, records, max_length=settings.seq_len)
    store = settings.trainer_dir.rstrip("/") + ".data"
    prepare(records, tokenizer, store, chat=chat, append_eos=False)
    return store


def parameter_table(cfg: SpmdTrainer.Config) -> Table:
    """Returns the numbers of trained and frozen parameters of a run, and their bytes."""
    model = cfg.model.instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    learner = cfg.learner.clone(name="learner").instantiate(parent=None, param_specs=specs)
    sizes = {True: [0, 0], False: [0, 0]}
    for path, spec in specs_by_path(specs).items():
        counted = sizes[learner.is_updated(path)]
        counted[0] += spec.size
        counted[1] += spec.size * jax.numpy.dtype(spec.dtype).itemsize
    total = sum(num for num, _ in sizes.values())
    rows = [
        (name, f"{num:,}", f"{num / total:.2%}", f"{size / 2**30:.3f}")
        for name, (num, size) in (("trained", sizes[True]), ("frozen", sizes[False]))
    ]
    return Table("", ["parameters", "number>", "share>", "GiB>"], rows)


def finetune(settings: FineTuning) -> FitResult:
    """Fine-tunes a model, or resumes its run; prints the numbers of parameters.

    Raises:
        Exception: The errors of `finetune_config` and `moelib.fit`.
    """
    cfg = finetune_config(settings)
    print_table(parameter_table(cfg))
    return fit(cfg)
