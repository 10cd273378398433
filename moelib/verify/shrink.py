"""A config made small: the same layers, wired and split in the same way, of a few thousand weights.

Sizes are found by the names of their fields, in any config inside, a user's own layers too. Each
keeps what decides over which meshes it can be split: its greatest common divisor with the number of
devices. Sizes that were equal stay equal, and those that were not stay different.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core.config import REQUIRED, ConfigBase
from moelib.core.config_path import sub_configs
from moelib.data.input import Input
from moelib.data.lm_input import LMInput
from moelib.data.mixture import Mixture
from moelib.data.synthetic import SyntheticTokens

_WIDTHS = (
    "dim",
    "input_dim",
    "output_dim",
    "hidden_dim",
    "embedding_dim",
    "model_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "rank",
)
_VOCABULARIES = ("vocab_size", "num_embeddings")
_WINDOW, _SEQ_LEN, _MAX_STEP = 7, 32, 8


class Change(NamedTuple):
    """A field that has another value in the small config."""

    path: str
    before: Any
    after: Any


def shrink(cfg: Any, num_devices: int) -> tuple[Any, list[Change]]:
    """Returns a small copy of a trainer's config in float32 on made-up data, and what was changed.

    Every kind of layer is kept, and every setting that is no size: of repeated layers two blocks
    are left, and of equal first layers one.

    Args:
        cfg: A `SpmdTrainer.Config`.
        num_devices: The most devices that it is split over.
    """
    small = cfg.clone()
    _fewer_layers(small)
    for holder in _configs(small.model):
        _smaller_heads(holder, num_devices)
        _fewer_experts(holder, num_devices)
    _smaller_widths(small.model, num_devices)
    _smaller(small.model, _VOCABULARIES, lambda size: _kept_divisors(size, num_devices, 64))
    _smaller(small.model, ("window",), lambda _: _WINDOW)
    _full_precision(small)
    _all_reported(small)
    _short_run(small)
    _made_up_data(small, num_devices)
    return small, _changes(cfg, small)


def runnable(cfg: Any) -> tuple[Any, list[Change]]:
    """Returns a copy of a trainer's config in float32, of its own sizes and on its own data."""
    same = cfg.clone()
    _full_precision(same)
    _all_reported(same)
    _short_run(same)
    return same, _changes(cfg, same)


def _configs(cfg: ConfigBase) -> list[ConfigBase]:
    return [cfg, *(inside for _, inside in sub_configs(cfg))]


def _sizes(cfg: ConfigBase, names: Iterable[str]) -> dict[str, int]:
    """Returns those of the fields that hold a whole number."""
    values = dict(cfg.items())
    return {n: values[n] for n in names if type(values.get(n)) is int}


def _kept_divisors(size: int, num_devices: int, least: int) -> int:
    """Returns a size, `least` or a little more, that the same numbers of devices divide.

    No size is made larger.
    """
    common = math.gcd(size, num_devices)
    new = math.ceil(least / common) * common
    while math.gcd(new, num_devices) != common:
        new += common
    return min(new, size)


def _smaller(cfg: ConfigBase, names: Iterable[str], new: Callable[[int], int]) -> None:
    for holder in _configs(cfg):
        for name, size in _sizes(holder, names).items():
            holder.set(**{name: min(size, new(size))})


# -- Layers --------------------------------------------------------------------------------------


def _fewer_layers(cfg: Any) -> None:
    for holder in _configs(cfg.model):
        values = dict(holder.items())
        layers, block = values.get("num_layers"), values.get("block")
        if type(layers) is not int:
            continue
        if not isinstance(block, list):  # A stack of another's making.
            holder.set(num_layers=min(layers, 2))
            continue
        first = values.get("first_layers", [])
        repeats = (layers - len(first)) // max(len(block), 1)
        texts = [layer.debug_string() for layer in first]
        kept = [layer for i, layer in enumerate(first) if texts[i] not in texts[:i]]
        holder.set(first_layers=kept, num_layers=len(kept) + min(repeats, 2) * len(block))


def _smaller_heads(cfg: ConfigBase, num_devices: int) -> None:
    sizes = _sizes(cfg, ("num_heads", "num_kv_heads"))
    if "num_heads" not in sizes:
        return
    heads, groups = sizes["num_heads"], sizes.get("num_kv_heads")
    if groups is None:
        cfg.set(num_heads=_kept_divisors(heads, num_devices, 2))
    else:
        few = _kept_divisors(groups, num_devices, 1)
        share = heads // groups
        queries = next(
            few * n
            for n in range(min(share, 2), share + 1)
            if math.gcd(few * n, num_devices) == math.gcd(heads, num_devices) or n == share
        )
        cfg.set(num_heads=queries, num_kv_heads=few)
    _smaller_head_dims(cfg)


def _smaller_head_dims(cfg: ConfigBase) -> None:
    """Sets what a head has; an unset `head_dim` too, for it would be a width over few heads."""
    values = dict(cfg.items())
    if "head_dim" in values:
        cfg.set(head_dim=8)
    for name, size in {"nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6}.items():
        if name in values:
            cfg.set(**{name: size})
    for inside in _configs(cfg):
        for name in _sizes(inside, ("rotary_dim",)):
            inside.set(**{name: 4})


def _fewer_experts(cfg: ConfigBase, num_devices: int) -> None:
    sizes = _sizes(cfg, ("num_experts", "num_experts_per_token"))
    if len(sizes) < 2:
        return
    experts, chosen = sizes.values()
    few = _kept_divisors(experts, num_devices, 8)
    cfg.set(num_experts=few, num_experts_per_token=min(chosen, 2 if few < 6 else 3))
    for inside in _configs(cfg):
        groups = _sizes(inside, ("num_groups", "num_groups_per_token"))
        if len(groups) == 2:  # Of at least two experts each.
            num = math.gcd(groups["num_groups"], few // 2)
            least = math.ceil(cfg.num_experts_per_token * num / few)  # That hold so many experts.
            inside.set(num_groups=num, num_groups_per_token=max(least, num // 2))
        for name, blocks in _sizes(inside, ("buffer_blocks",)).items():
            if experts % blocks == 0:  # Else it is a mistake, which stays one.
                inside.set(**{name: math.gcd(blocks, few)})


def _smaller_widths(cfg: ConfigBase, num_devices: int) -> None:
    """Gives each width another small one; wider ones stay wider."""
    found = {size for each in _configs(cfg) for size in _sizes(each, _WIDTHS).values()}
    small: dict[int, int] = {}
    for size in sorted(found):
        least = max(small.values(), default=8) + 1
        small[size] = _kept_divisors(size, num_devices, least)
    _smaller(cfg, _WIDTHS, lambda size: small[size])


# -- Precision, data, length ---------------------------------------------------------------------


def _full_precision(cfg: Any) -> None:
    """Makes everything float32: differences between meshes are then the order of sums alone."""
    cfg.set(train_dtype=None)
    for holder in [*_configs(cfg.model), *_configs(cfg.learner)]:
        for name, value in dict(holder.items()).items():
            if f"_{name}".endswith("_dtype") and isinstance(value, str):
                holder.set(**{name: "float32"})


def _all_reported(cfg: Any) -> None:
    """Has MoE layers put out how many tokens each expert gets, for comparison."""
    for holder in _configs(cfg.model):
        if "report_expert_counts" in dict(holder.items()):
            holder.set(report_expert_counts=True)


def _short_run(cfg: Any) -> None:
    """Makes a run of a few steps at full rate, which writes and evaluates nothing by itself."""
    lengths = {"warmup_steps": 1, "decay_steps": 4, "max_step": _MAX_STEP}
    for holder in _configs(cfg.learner):
        values = dict(holder.items())
        for name, most in lengths.items():
            if isinstance(values.get(name), int | float):
                holder.set(**{name: min(values[name], most)})
    cfg.set(max_step=_MAX_STEP, evalers={}, init_state_builder=None, compiler_options=None)
    cfg.set(start_trace_steps=())
    if cfg.checkpointer is not None:  # The best would be those of an evaluation.
        cfg.checkpointer.set(dir=REQUIRED, keep_best_n=0, best_metric=None)
        cfg.checkpointer.set(save_policy=Checkpointer.default_config().save_policy)


def _made_up_data(cfg: Any, num_devices: int) -> None:
    """Gives every input made-up tokens in the place of files, and few rows."""
    vocab_size = dict(cfg.model.items()).get("vocab_size")
    accumulated = min(cfg.num_microbatches, 2)
    rows = math.lcm(num_devices * accumulated, 4)  # For `doubled`, and `hosts`.
    cfg.set(num_microbatches=accumulated)
    cfg.input.set(seq_len=_SEQ_LEN, global_batch_size=rows)
    if isinstance(cfg.input, LMInput.Config):
        cfg.input.set(source=_made_up(cfg.input.source, vocab_size or 64), vocab_size=vocab_size)
    assert isinstance(cfg.input, Input.Config)


def _made_up(source: Any, vocab_size: int) -> Any:
    """Returns short documents in the place of what is read from files."""
    if isinstance(source, Mixture.Config):
        made_up = {name: _made_up(inside, vocab_size) for name, inside in source.sources.items()}
        return source.clone(sources=made_up)
    return SyntheticTokens.default_config().set(
        vocab_size=vocab_size, num_documents=200, max_document_tokens=_SEQ_LEN
    )


def _changes(before: Any, after: Any) -> list[Change]:
    old: Mapping[str, Any] = before.to_flat_dict()
    new: Mapping[str, Any] = after.to_flat_dict()
    return [
        Change(path, old.get(path), new.get(path))
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]
