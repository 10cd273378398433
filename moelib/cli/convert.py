"""`moelib convert`: models of Hugging Face to checkpoints, and runs to models of Hugging Face."""

import os
import shutil
from collections.abc import Sequence

from absl import flags

from moelib.launch import UsageError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string("from_hf", None, "Folder of a Hugging Face model, to read.")
    flags.DEFINE_string("to", None, "Folder for the checkpoint that is made of it.")
    flags.DEFINE_string("trainer_dir", None, "Folder of a training run, to read.")
    flags.DEFINE_integer("step", None, "Checkpoint to take; the newest if unset.")
    flags.DEFINE_string("to_hf", None, "Folder for the Hugging Face model that is made of it.")
    flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16", "float16"],
        "Of what is written; if unset, float32 for --to, and as it is for --to_hf.",
    )


def run(args: Sequence[str]) -> None:
    """Converts in the direction that the flags name.

    Raises:
        UsageError: If flags are missing or do not belong together, or what they name cannot be
            converted.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; `moelib convert --help` lists them.")
    ways = {("from_hf", "to"), ("trainer_dir", "to_hf")}
    given = tuple(n for n in ("from_hf", "to", "trainer_dir", "to_hf") if FLAGS[n].value)
    if given not in ways:
        raise UsageError(
            "set --from_hf and --to, or --trainer_dir and --to_hf; "
            f"given: {', '.join('--' + name for name in given) or 'none of them'}."
        )
    from moelib.checkpoint.contents import CheckpointMismatchError, DamagedCheckpointError
    from moelib.checkpoint.safetensors import DamagedTensorsError

    try:
        if "from_hf" in given:
            print(from_hugging_face(FLAGS.from_hf, FLAGS.to, dtype=FLAGS.dtype))
        else:
            made = to_hugging_face(
                FLAGS.trainer_dir, FLAGS.to_hf, step=FLAGS.step, dtype=FLAGS.dtype
            )
            print(made)
    except (
        CheckpointMismatchError,
        DamagedCheckpointError,
        DamagedTensorsError,
        OSError,
        ValueError,
    ) as error:
        raise UsageError(str(error)) from error


def from_hugging_face(folder: str, to: str, *, dtype: str | None = None) -> str:
    """Writes a model of Hugging Face as step 0 of a run that has no data; says what it wrote.

    Args:
        folder: The model's.
        to: Folder of the run, which is made.
        dtype: Of the parameters; float32 if None.

    Raises:
        FileExistsError: If there is a run in `to`.
        Exception: As `load_pretrained`.
    """
    from moelib.checkpoint.checkpointer import Checkpointer
    from moelib.checkpoint.contents import CheckpointRecord
    from moelib.train.identity import CONFIG_FILE
    from moelib.train.pretrained import load_pretrained
    from moelib.train.trainer import SpmdTrainer

    path = os.path.join(to, CONFIG_FILE)
    if os.path.exists(path):
        raise FileExistsError(f"{path} is there already; choose another folder.")
    loaded = load_pretrained(folder, dtype=dtype or "float32")
    os.makedirs(to, exist_ok=True)
    checkpoints = os.path.join(to, "checkpoints")
    writer = Checkpointer.default_config().set(dir=checkpoints).instantiate(parent=None)
    writer.save({"model": loaded.params}, CheckpointRecord(step=0, arrays={}))
    writer.close()
    if writer.last_error is not None:
        raise writer.last_error
    with open(path, "w", encoding="utf-8") as file:
        file.write(SpmdTrainer.default_config().set(model=loaded.cfg).debug_string())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if os.path.exists(source := os.path.join(folder, name)):
            shutil.copy(source, to)
    return f"The {loaded.settings['model_type']} model is in {to}."


def to_hugging_face(
    trainer_dir: str, to: str, *, step: int | None = None, dtype: str | None = None
) -> str:
    """Writes a run's model for transformers; says what it wrote.

    Args:
        trainer_dir: Folder of the run.
        to: Folder of the model, which is made.
        step: Checkpoint to take; the newest if None.
        dtype: What parameters are rounded to; as they are if None.

    Raises:
        Exception: As `load_for_inference` and `save_pretrained`.
    """
    from moelib.cli.generate import load_for_inference
    from moelib.train.pretrained import save_pretrained

    loaded = load_for_inference(trainer_dir, step=step)
    tokenizer = loaded.tokenizer
    settings = {"eos_token_id": tokenizer.eos_id}
    if loaded.seq_len is not None:
        settings["max_position_embeddings"] = loaded.seq_len
    architecture = save_pretrained(
        to,
        loaded.model.config,
        loaded.params,
        dtype=dtype,
        tokenizer_json=tokenizer.to_json(),
        eos_token=tokenizer.config.eos_token,
        more_settings=settings,
        generation={"eos_token_id": tokenizer.eos_id},
    )
    return f"{architecture} is in {to}: {', '.join(sorted(os.listdir(to)))}."
