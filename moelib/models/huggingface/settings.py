"""Reading a config.json: every setting is used, known to change nothing, or an error."""

from collections.abc import Iterable, Mapping
from typing import Any

from moelib.core.config import did_you_mean

_REQUIRED = object()

# What changes nothing that a model computes for given tokens.
_NEUTRAL_NAMES = """
    _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward decoder_start_token_id
    dtype eos_token_id ep_size finetuning_task id2label initializer_range is_decoder
    is_encoder_decoder label2id max_position_embeddings model_type output_attentions
    output_hidden_states output_router_logits pad_token_id problem_type return_dict
    router_aux_loss_coef router_jitter_noise sep_token_id torch_dtype transformers_version use_cache
    aux_loss_alpha seq_aux pretraining_tp tokenizer_class
"""
_NEUTRAL = frozenset(_NEUTRAL_NAMES.split())


class Settings:
    """The settings of a config.json, each to be asked for; `finish` refuses what nobody asked."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = dict(values), place
        self._left = set(self.values) - _NEUTRAL

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a setting. Raises ValueError if it is missing and there is no default."""
        self._left.discard(name)
        if name in self.values:
            return self.values[name]
        if default is _REQUIRED:
            raise ValueError(f"{self.place}: {name} is missing.")
        return default

    def expect(self, **wanted: Any) -> None:
        """Raises ValueError if a setting is there and is not the only value that moelib has."""
        for name, value in wanted.items():
            if (found := self.take(name, value)) != value:
                raise ValueError(f"{self.place}: {name} is {found!r}; moelib has {value!r} alone.")

    def pass_over(self, names: Iterable[str]) -> None:
        """Marks settings that say what others say too."""
        self._left -= set(names)

    def finish(self) -> None:
        """Raises ValueError if a setting was not asked for."""
        if self._left:
            raise ValueError(
                f"{self.place}: settings that moelib does not know: "
                + ", ".join(f"{name}={self.values[name]!r}" for name in sorted(self._left))
                + "; what they change is not computed."
            )


def one_of(place: str, name: str, value: Any, known: Mapping[Any, Any]) -> Any:
    """Returns what a setting's value stands for. Raises ValueError, naming those known."""
    if value not in known:
        raise ValueError(
            f"{place}: {name} is {value!r}; {did_you_mean(str(value), map(str, known))}"
        )
    return known[value]
