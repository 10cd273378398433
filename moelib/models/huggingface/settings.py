"""Settings of a config.json: each one is used, is known to change nothing, or is an error."""

from collections.abc import Iterable, Mapping
from typing import Any

from moelib.core.errors import UserError

_REQUIRED = object()

# Settings that do not change the logits of given tokens: token ids, training, storage, generation.
_NEUTRAL_NAMES = """
    _attn_implementation _name_or_path add_cross_attention architectures attn_implementation
    auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder is_llama_config
    label2id length_penalty max_length max_position_embeddings min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id seq_aux
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
_NEUTRAL = frozenset(_NEUTRAL_NAMES.split())


class Settings:
    """The settings of a config.json, read one by one; `finish` refuses those never read."""

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        defaults: Mapping[str, Any] | None = None,
        ignored: Iterable[str] = (),
    ) -> None:
        """Takes the content of config.json, and its name for errors.

        Absent settings have their defaults; the user declares that `ignored` ones change nothing.
        """
        self.values, self.source = dict(values), source
        self._defaults = defaults or {}
        self._unread = set(self.values) - _NEUTRAL - set(ignored)

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a setting. Raises UserError if it is absent and there is no default."""
        self._unread.discard(name)
        if name in self.values:
            return self.values[name]
        default = self._defaults.get(name, default)
        if default is _REQUIRED:
            raise UserError(f"{self.source}: {name} is missing.")
        return default

    def choose(self, name: str, known: Mapping[Any, Any], *default: Any) -> Any:
        """Returns the entry of `known` for a setting's value."""
        return self.lookup(name, self.take(name, *default), known)

    def lookup(self, name: str, value: Any, known: Mapping[Any, Any]) -> Any:
        """Returns `known[value]`. Raises UserError that names the setting and the known values."""
        if value not in known:
            supported = ", ".join(map(repr, known))
            raise UserError(f"{self.source}: {name}={value!r}; moelib supports {supported}.")
        return known[value]

    def expect(self, **wanted: Any) -> None:
        """Raises UserError if a setting is present with a value that moelib does not support."""
        for name, value in wanted.items():
            if (found := self.take(name, value)) != value:
                raise UserError(f"{self.source}: {name}={found!r}; moelib supports only {value!r}.")

    def skip(self, *names: str) -> None:
        """Marks settings as read that follow from others."""
        self._unread -= set(names)

    def finish(self) -> None:
        """Raises UserError if a setting was never read."""
        if self._unread:
            unread = ", ".join(f"{name}={self.values[name]!r}" for name in sorted(self._unread))
            names = ",".join(sorted(self._unread))
            raise UserError(
                f"{self.source}: unsupported settings: {unread}. If they change nothing, pass "
                f"--ignore_settings={names}."
            )
