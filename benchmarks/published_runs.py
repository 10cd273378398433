"""Published runs: measurements by others, with their hardware and settings.

The mesh is that of the run. Batch sizes, recomputation and schedules of pipelines that were not
published are guesses, and noted as such.
"""

import dataclasses

from moelib.layers.quantization import Quantization
from moelib.parallel.pipeline.schedule import Schedule
from moelib.planning.estimate.activations import DOTS, FULL, NONE

_MAXTEXT = "MaxText's published recipes"
_AUTOMODEL = "NeMo Automodel, performance summary"
_PITHTRAIN = "PithTrain, thesis, tables 4.3 and 4.4"
_PITHTRAIN_NOTE = "DualPipeV is PithTrain's; Megatron's schedule and the batch size guessed"


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A measured run."""

    system: str
    config: str  # Named config of the model, after its module and a colon.
    topology: str
    inside: dict[str, int]  # Sizes of mesh axes inside a slice.
    batch_per_device: int  # Sequences per device and micro-batch.
    seq_len: int  # Tokens per sequence.
    tokens_per_second: tuple[float, float]  # Per device: lowest and highest of similar runs.
    source: str
    across: dict[str, int] = dataclasses.field(default_factory=dict)  # Sizes across slices.
    num_microbatches: int = 1
    remat: str = FULL  # A name of `Workload.saved`.
    schedule: Schedule | None = None  # Of a pipeline.
    quantization: Quantization | None = None  # Scheme of the matmuls of layers.
    note: str = ""  # Settings that were not published, or differ.


# A device of tpu7x is half a chip: rates per chip are halved.
PUBLISHED_RUNS = (
    PublishedRun(
        "MaxText", "experiments.gpt_oss:gpt-oss-3b-v6e4",
        "v6e:2x2", {"expert": 2, "fsdp": 2}, 1, 1024,
        (5640, 5640), "the post on MaxText's GPT-OSS job for four v6e (182 ms per step)",
    ),
    PublishedRun(
        "MaxText", "experiments.open_models:mixtral-8x7b",
        "v6e:16x16", {"fsdp": 256}, 8, 4096,
        (3645, 3899), "tpu-recipes, Trillium, Mixtral-8x7B (8.4 to 9.0 s per step)",
        note="drops tokens beyond 1.25 times the even load; batch size and recomputation guessed",
    ),
    PublishedRun(
        "MaxText", "experiments.open_models:mixtral-8x22b",
        "v6e:16x16", {"fsdp": 256}, 4, 4096,
        (1326, 1326), _MAXTEXT, note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "MaxText", "experiments.open_models:mixtral-8x7b",
        "v5p:4x8x8", {"fsdp": 256}, 8, 4096,
        (2909, 2909), _MAXTEXT, remat=DOTS, note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "MaxText", "experiments.open_models:deepseek-v3",
        "v5p:8x8x8", {"fsdp": 512}, 4, 4096,
        (542, 542), _MAXTEXT, note="chips, batch size and recomputation guessed",
    ),
    PublishedRun(
        "MaxText", "experiments.open_models:deepseek-v3",
        "tpu7x:4x8x8", {"fsdp": 512}, 4, 4096,
        (1213, 1223), _MAXTEXT, note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "MaxText", "experiments.open_models:qwen3-235b-a22b",
        "tpu7x:4x8x8", {"fsdp": 512}, 4, 4096,
        (2123, 2123), _MAXTEXT, note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "MaxText", "experiments.gpt_oss:gpt-oss-120b",
        "tpu7x:4x4x4", {"fsdp": 128}, 4, 8192,
        (4786, 4791), _MAXTEXT, note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "Automodel", "experiments.open_models:qwen3-30b-a3b",
        "h100:1x8", {"expert": 8}, 4, 4096,
        (12_040, 12_040), _AUTOMODEL, num_microbatches=16,
        note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "Automodel", "experiments.gpt_oss:gpt-oss-20b",
        "h100:1x8", {"expert": 8}, 4, 4096,
        (13_058, 13_058), _AUTOMODEL, num_microbatches=8,
        note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "Automodel", "experiments.gpt_oss:gpt-oss-120b",
        "h100:8x8", {"expert": 8}, 2, 4096,
        (7626, 7626), _AUTOMODEL, across={"expert": 8}, num_microbatches=4,
        note="batch size and recomputation guessed",
    ),
    PublishedRun(
        "Automodel", "experiments.open_models:deepseek-v3",
        "h100:32x8", {"expert": 8}, 4, 4096,
        (1002, 1002), _AUTOMODEL, across={"pipeline": 4, "expert": 8}, num_microbatches=16,
        schedule=Schedule.INTERLEAVED, note="schedule, batch size and recomputation guessed",
    ),
    PublishedRun(
        "Megatron, PithTrain", "experiments.open_models:qwen3-30b-a3b",
        "h100:2x8", {"expert": 8}, 1, 2048,
        (7806, 7919), _PITHTRAIN, across={"pipeline": 2}, num_microbatches=128,
        remat=NONE, schedule=Schedule.DUALPIPE_V, note=_PITHTRAIN_NOTE,
    ),
    PublishedRun(
        "Megatron, PithTrain", "experiments.open_models:qwen3-30b-a3b",
        "h100:4x8", {"expert": 8}, 1, 4096,
        (8253, 8750), _PITHTRAIN, across={"pipeline": 4}, num_microbatches=128,
        remat=NONE, schedule=Schedule.DUALPIPE_V, note=_PITHTRAIN_NOTE,
    ),
    PublishedRun(
        "Megatron, PithTrain", "experiments.open_models:deepseek-v2-lite",
        "h100:1x8", {"pipeline": 2, "expert": 4}, 1, 2048,
        (13_413, 14_325), _PITHTRAIN, num_microbatches=256,
        remat=NONE, schedule=Schedule.DUALPIPE_V, note=_PITHTRAIN_NOTE,
    ),
    PublishedRun(
        "Megatron, PithTrain", "experiments.gpt_oss:gpt-oss-20b",
        "b200:1x8", {"pipeline": 2, "expert": 4}, 1, 8192,
        (16_188, 17_613), _PITHTRAIN, num_microbatches=256,
        remat=NONE, schedule=Schedule.DUALPIPE_V, note=_PITHTRAIN_NOTE,
    ),
    PublishedRun(
        "Megatron, PithTrain", "experiments.open_models:qwen3-30b-a3b",
        "b200:1x8", {"pipeline": 2, "expert": 4}, 1, 8192,
        (13_275, 16_813), _PITHTRAIN, num_microbatches=256,
        remat=NONE, schedule=Schedule.DUALPIPE_V, quantization=Quantization.FP8_BLOCK,
        note=f"FP8, estimated at the rate of bfloat16; {_PITHTRAIN_NOTE}",
    ),
)  # fmt: skip

EXCLUDED = {
    "Megatron-Bridge, DeepSeek-V3 on GB200 and GB300": "MXFP8, which moelib does not support",
    "Megatron-Bridge, Qwen3-30B-A3B on 16 H100": "published as 299 TFLOP/s, counted differently",
    "Llama 4 on v5p, and Marin's own model": "models without a config in moelib",
    "TorchTitan on H100, in PithTrain's tables, both in BF16": (
        "not tuned: 90.5K tokens per second of qwen3-30b-a3b on 2x8 and 74.1K of deepseek-v2-lite "
        "on 1x8 are a third below the others on similar hardware"
    ),
}
