"""`moelib finetune`: fine-tunes a Hugging Face model with adapters (LoRA), or all of it.

moelib finetune --model=MODEL --data=STORE --trainer_dir=RUN
moelib finetune --model=MODEL --data=STORE --trainer_dir=RUN --full --lr=1e-5
"""

import dataclasses
from collections.abc import Sequence

from moelib.core.errors import UsageError
from moelib.launch import DeviceFlags
from moelib.runtime.command_line import flag, no_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags):
    """Flags of the command."""

    model: str | None = flag(None, "Folder of the Hugging Face model.")
    data: str | None = flag(
        None, "Token store, prepared with the model's tokenizer, or records of conversations."
    )
    chat_template: str | None = flag(
        None, "Chat template: a file of Jinja, chatml, llama3 or plain; by default the model's."
    )
    trainer_dir: str | None = flag(None, "Folder of the run, which an existing run resumes from.")
    lora_rank: int = flag(16, "Rank of the adapters; each expert's is a K-th of it.", lower_bound=1)
    targets: str = flag(".*", "Regular expression of the config paths of the adapted layers.")
    train_router: bool = flag(False, "Whether routers are trained, too.")
    full: bool = flag(False, "Whether all parameters are trained, instead of adapters.")
    max_step: int = flag(1000, "Number of steps to train for.", lower_bound=1)
    lr: float | None = flag(None, "Peak learning rate; by default 2e-4, or 2e-5 with --full.")
    batch_size: int = flag(16, "Sequences per step.", lower_bound=1)
    seq_len: int = flag(2048, "Tokens per sequence.", lower_bound=1)
    dtype: str = flag("bfloat16", "Dtype of both passes, and of frozen weights.")
    mesh: str | None = flag(None, "Sizes of mesh axes, such as fsdp=4,expert=2.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints the numbers of trained parameters, and trains."""
    no_arguments(arguments, Flags)
    if not (flags.model and flags.data and flags.trainer_dir):
        raise UsageError("--model, --data and --trainer_dir are required.")
    flags.set_up()
    from moelib.tasks.finetune import FineTuning, finetune

    settings = FineTuning(
        model=flags.model,
        data=flags.data,
        chat_template=flags.chat_template,
        trainer_dir=flags.trainer_dir,
        lora_rank=None if flags.full else flags.lora_rank,
        targets=flags.targets,
        train_router=flags.train_router,
        max_step=flags.max_step,
        lr=flags.lr,
        batch_size=flags.batch_size,
        seq_len=flags.seq_len,
        dtype=flags.dtype,
        mesh=flags.mesh,
    )
    result = finetune(settings)
    print(f"Step {result.step}; loss {result.metrics.get('loss', float('nan')):.4f}.")
