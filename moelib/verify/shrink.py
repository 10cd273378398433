"""A config made small: the same layers, wired and sharded alike, with a few thousand weights.

Sizes are found by the names of fields, in every nested config, a user's own layers included. Each
size keeps its greatest common divisor with the number of devices, which decides over which meshes
it can be split. Equal sizes stay equal, and different sizes stay different.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core.config import REQUIRED, ConfigBase
from moelib.core.config_text import sub_configs
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import LongDocuments
from moelib.data.batches.synthetic import SyntheticTokens
from moelib.layers.mixers.delta_net import DeltaNet
from moelib.layers.mixers.mamba2 import Mamba2
from moelib.learner.moments import MomentFormat
from moelib.parallel.pipeline.schedule import Schedule
from moelib.verify.batches import vocab_size

_WIDTHS = ("dim", "input_dim", "output_dim", "hidden_dim", "embedding_dim", "model_dim",
           "q_lora_rank", "kv_lora_rank", "rank", "latent_dim")  # fmt: skip
_VOCABULARIES = ("vocab_size", "num_embeddings")
# With few rotary pairs, the ramp of YaRN would begin at the first one whatever `beta_fast`.
_HEAD_DIMS = {"head_dim": 8, "nope_head_dim": 8, "rope_head_dim": 16, "v_head_dim": 6,
              "key_head_dim": 8, "value_head_dim": 6, "state_dim": 8, "index_dim": 24}  # fmt: skip
_STATE_EPS = 0.1
# Fields of the heads of a layer, and of what they share.
_HEADS = (
    ("num_heads", "num_kv_heads", "num_groups"),
    ("num_value_heads", "num_key_heads"),
)
_WINDOW, _SEQ_LEN, _MAX_STEP = 7, 32, 8
_NUM_CHOSEN = 16  # Keys of sparse attention: with fewer, many queries have two of nearly one score.
_SMALL_WIDTH = 32  # Widths up to this stay.


class Change(NamedTuple):
    """A field that has another value in the small config."""

    path: str
    before: Any
    after: Any


def shrink(cfg: Any, num_devices: int) -> tuple[Any, list[Change]]:
    """Returns a small copy of a trainer's config, in float32 on synthetic data, and the changes.

    Every kind of layer and every setting other than sizes is kept: two blocks of repeated layers,
    three in a pipeline, and one of several equal layers of a block, or before the blocks. The copy
    can be split over up to `num_devices` devices.
    """
    small = cfg.clone()
    _fewer_layers(small, num_blocks=2 if cfg.pipeline_schedule is None else 3)
    for holder in _configs(small.model):
        for names in _HEADS:
            _smaller_heads(holder, num_devices, *names)
        _fewer_experts(holder, num_devices)
    _smaller_widths(small.model, num_devices)
    _larger_eps(small.model)
    _smaller(small.model, _VOCABULARIES, lambda size: _with_same_divisors(size, num_devices, 64))
    _smaller(small.model, ("window",), lambda _: _WINDOW)
    _smaller(small.model, ("num_chosen",), lambda _: _NUM_CHOSEN)
    _make_runnable(small)
    _synthetic_data(small, num_devices)
    return small, _changes(cfg, small)


def runnable(cfg: Any) -> tuple[Any, list[Change]]:
    """Returns a copy of a trainer's config in float32, with its own sizes and data, and changes."""
    copy = cfg.clone()
    _make_runnable(copy)
    return copy, _changes(cfg, copy)


def _configs(cfg: ConfigBase) -> list[ConfigBase]:
    return [cfg, *(inside for _, inside in sub_configs(cfg))]


def _sizes(cfg: ConfigBase, names: Iterable[str]) -> dict[str, int]:
    """Returns the values of the named fields that hold an integer."""
    values = dict(cfg.items())
    return {n: values[n] for n in names if type(values.get(n)) is int}


def _with_same_divisors(size: int, num_devices: int, minimum: int) -> int:
    """Returns `minimum`, or a little more, with the same common divisors with `num_devices`.

    The result is never larger than `size`.
    """
    common = math.gcd(size, num_devices)
    new = math.ceil(minimum / common) * common
    while math.gcd(new, num_devices) != common:
        new += common
    return min(new, size)


def _smaller(cfg: ConfigBase, names: Iterable[str], new: Callable[[int], int]) -> None:
    for holder in _configs(cfg):
        for name, size in _sizes(holder, names).items():
            holder.set(**{name: min(size, new(size))})


# -- Layers --------------------------------------------------------------------------------------


def _fewer_layers(cfg: Any, num_blocks: int) -> None:
    for holder in _configs(cfg.model):
        values = dict(holder.items())
        layers, block = values.get("num_layers"), values.get("block")
        if type(layers) is not int:
            continue
        if not isinstance(block, list):  # A stack of the user's own.
            holder.set(num_layers=min(layers, num_blocks))
            continue
        first = values.get("first_layers", [])
        repeats = min((layers - len(first)) // max(len(block), 1), num_blocks)
        first, block = (
            list({x.debug_string(): x for x in each}.values()) for each in (first, block)
        )
        holder.set(first_layers=first, block=block, num_layers=len(first) + repeats * len(block))


def _smaller_heads(cfg: ConfigBase, num_devices: int, many: str, *shared_names: str) -> None:
    sizes = _sizes(cfg, (many, *shared_names))
    if many not in sizes:
        return
    heads, few = sizes[many], next((name for name in shared_names if name in sizes), "")
    shared = sizes.get(few)
    if shared is None:
        cfg.set(**{many: _with_same_divisors(heads, num_devices, 2)})
    else:
        num_shared = _with_same_divisors(shared, num_devices, 1)
        ratio = heads // shared
        num_heads = next(
            num_shared * n
            for n in range(min(ratio, 2), ratio + 1)
            if math.gcd(num_shared * n, num_devices) == math.gcd(heads, num_devices) or n == ratio
        )
        cfg.set(**{many: num_heads, few: num_shared})
    fields = dict(cfg.items())  # An unset `head_dim` would be the width over few heads.
    small = {name: size for name, size in _HEAD_DIMS.items() if name in fields}
    if "key_head_dim" in fields and fields["key_head_dim"] == fields["value_head_dim"]:
        small["value_head_dim"] = small["key_head_dim"]
    elif "low_rank_dim" in fields:  # None would be the size of a value, which no mesh divides.
        small["low_rank_dim"] = 8
    cfg.set(**small)
    _smaller(cfg, ("rotary_dim",), lambda _: 4)


def _larger_eps(cfg: ConfigBase) -> None:
    """Raises the epsilon of norms of what states hold, and of norms with the same one.

    A state of few tokens holds little, of which a norm would magnify the rounding.
    """
    mixers = [each for each in _configs(cfg) if isinstance(each, DeltaNet.Config | Mamba2.Config)]
    held = {mixer.norm.eps for mixer in mixers}
    for holder in _configs(cfg):
        if dict(holder.items()).get("eps") in held:
            holder.set(eps=_STATE_EPS)


def _fewer_experts(cfg: ConfigBase, num_devices: int) -> None:
    sizes = _sizes(cfg, ("num_experts", "num_experts_per_token"))
    if len(sizes) < 2:
        return
    experts, per_token = sizes.values()
    is_grouped = any(_sizes(inside, ("num_groups",)) for inside in _configs(cfg))
    few = _with_same_divisors(experts, num_devices, 16 if is_grouped else 8)
    cfg.set(num_experts=few, num_experts_per_token=min(per_token, 2 if few < 6 else 3))
    for inside in _configs(cfg):
        groups = _sizes(inside, ("num_groups", "num_groups_per_token"))
        if len(groups) == 2:
            size = min(experts // max(groups["num_groups"], 1), 4)  # More than a score sums.
            common = math.gcd(groups["num_groups"], few)
            num = next(n for n in (4, 3, 2, 1) if common % n == 0 and few // n >= size)
            least = math.ceil(cfg.num_experts_per_token * num / few)  # Enough for the chosen ones.
            inside.set(num_groups=num, num_groups_per_token=max(least, num // 2))


def _smaller_widths(cfg: ConfigBase, num_devices: int) -> None:
    """Maps different widths to different small widths, in the same order."""
    found = {size for each in _configs(cfg) for size in _sizes(each, _WIDTHS).values()}
    small: dict[int, int] = {}
    for size in sorted(found):
        minimum = max(small.values(), default=8) + 1
        small[size] = _with_same_divisors(size, num_devices, minimum)
        if size <= _SMALL_WIDTH:  # Nothing to gain, and layers may need other divisors too.
            small[size] = size
    _smaller(cfg, _WIDTHS, lambda size: small[size])


# -- Precision, length, data ---------------------------------------------------------------------


def _make_runnable(cfg: Any) -> None:
    """Sets every dtype to float32, so that meshes differ by the order of sums only."""
    cfg.set(train_dtype=None, log_gradient_noise=False)  # Steps run without micro-batches, too.
    in_full = MomentFormat.FLOAT32
    cfg.learner.set(first_moment=in_full, second_moment=in_full, stochastic_rounding=False)
    for holder in [*_configs(cfg.model), *_configs(cfg.learner)]:
        for name, value in dict(holder.items()).items():
            if f"_{name}".endswith("_dtype") and isinstance(value, str):
                holder.set(**{name: "float32"})
            elif name == "report_expert_counts":  # Expert loads are compared too.
                holder.set(report_expert_counts=True)
    _shorten(cfg)


def _shorten(cfg: Any) -> None:
    """Makes a run a few steps long, at the full learning rate, without evaluation or traces."""
    lengths = {"warmup_steps": 1, "decay_steps": 4, "max_step": _MAX_STEP}
    for holder in _configs(cfg.learner):
        values = dict(holder.items())
        for name, most in lengths.items():
            if isinstance(values.get(name), int | float):
                holder.set(**{name: min(values[name], most)})
    cfg.set(max_step=_MAX_STEP, evalers={}, init_from=None, compiler_options=None)
    cfg.set(start_trace_steps=())
    if cfg.checkpointer is not None:  # The best checkpoints would need an evaluation.
        cfg.checkpointer.set(dir=REQUIRED, keep_last_n=None, keep_best_n=0, best_metric=None)
        cfg.checkpointer.set(save_policy=Checkpointer.default_config().save_policy)


def _synthetic_data(cfg: Any, num_devices: int) -> None:
    """Replaces data files by synthetic tokens, in a small batch."""
    schedule = cfg.pipeline_schedule
    most = 2 if schedule is None else 8 if schedule is Schedule.DUALPIPE_V else 4  # For 4 ranks.
    num_microbatches = most if schedule else min(cfg.num_microbatches, most)
    cfg.set(num_microbatches=num_microbatches)
    batch_size = math.lcm(num_devices * num_microbatches, 4)  # Checks `doubled` and `hosts`.
    cfg.input.set(seq_len=_SEQ_LEN, global_batch_size=batch_size)
    if isinstance(cfg.input, LMInput.Config):
        is_split = cfg.input.long_documents is LongDocuments.SPLIT
        longest = 3 * _SEQ_LEN if is_split else _SEQ_LEN
        source = _synthetic(cfg.input.source, vocab_size(cfg), longest)
        cfg.input.set(source=source, vocab_size=dict(cfg.model.items()).get("vocab_size"))


def _synthetic(source: Any, vocab_size: int, longest: int) -> Any:
    """Returns a source of short random documents; a mixture stays a mixture."""
    if isinstance(source, Mixture.Config):
        inside = source.sources.items()
        return source.clone(
            sources={name: _synthetic(each, vocab_size, longest) for name, each in inside}
        )
    return SyntheticTokens.default_config().set(
        vocab_size=vocab_size, num_documents=200, max_document_tokens=longest
    )


def _changes(before: Any, after: Any) -> list[Change]:
    old, new = before.to_flat_dict(), after.to_flat_dict()
    changes = (Change(path, old.get(path), new.get(path)) for path in sorted({*old, *new}))
    return [change for change in changes if change.before != change.after]
