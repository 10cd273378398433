"""The settings of fine-tuning: what to train, on what, and how."""

import dataclasses
from typing import Literal

from moelib.runtime.command_line import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """The settings of fine-tuning, which are flags of its command too."""

    model: str = flag("", "Folder of the Hugging Face model.")
    data: str = flag(
        "",
        "Token store, prepared with the model's tokenizer, or records: of conversations; of pairs "
        "(prompt, chosen, rejected) for dpo; of prompts for grpo and gspo.",
    )
    trainer_dir: str = flag("", "Folder of the run, which an existing run resumes from.")
    accept_changes: tuple[str, ...] = flag(
        (), "Changes to a run: schedule, train_dtype, config, data, tokenizer.", split=True
    )
    skip_bad_lines: bool = flag(
        False, "Whether broken records are skipped and counted rather than errors."
    )
    objective: Literal["sft", "dpo", "grpo", "gspo"] = flag(
        "sft",
        "Supervised fine-tuning; preferences (DPO); or rewards of the model's own answers (GRPO, "
        "GSPO).",
    )
    chat_template: str | None = flag(
        None, "Chat template: a file of Jinja, chatml, llama3 or plain; by default the model's."
    )
    full: bool = flag(False, "Whether all parameters are trained, instead of adapters.")
    lora_rank: int = flag(16, "Rank of the adapters; each expert's is a K-th of it.", lower_bound=1)
    targets: str = flag(".*", "Regular expression of the config paths of the adapted layers.")
    train_router: bool = flag(
        False, "Whether routers are trained with adapters, and the load balanced."
    )
    max_step: int = flag(1000, "Number of steps to train for.", lower_bound=1)
    lr: float | None = flag(
        None,
        "Peak learning rate; by default 2e-4 for sft and 1e-5 else, or a tenth of it with --full.",
    )
    batch_size: int = flag(16, "Sequences per step: packed, pairs, or answers.", lower_bound=1)
    seq_len: int = flag(2048, "Tokens per sequence; both answers of a pair.", lower_bound=1)
    dtype: str = flag("bfloat16", "Dtype of both passes, and of frozen weights.")
    mesh: str | None = flag(None, "Sizes of mesh axes, such as fsdp=4,expert=2; by default FSDP.")
    beta: float = flag(0.1, "Strength of the tie to the model before training.", of=("dpo",))
    reward: str | None = flag(
        None,
        "Python function, as module:function, of prompts, completions and the records' other "
        "fields, which returns a number for each completion.",
        of=("grpo", "gspo"),
    )
    group_size: int = flag(8, "Answers to a prompt.", of=("grpo", "gspo"))
    max_new_tokens: int = flag(
        256, "Maximum number of tokens of an answer.", lower_bound=1, of=("grpo", "gspo")
    )
    reward_seconds: float = flag(
        300.0, "Seconds that the reward of a rollout may take.", of=("grpo", "gspo")
    )
    steps_per_rollout: int = flag(
        1, "Steps on the same answers, each on a part.", lower_bound=1, of=("grpo", "gspo")
    )
    replay_routing: bool = flag(
        True,
        "Whether tokens go to the experts that they visited when they were generated.",
        of=("grpo", "gspo"),
    )
