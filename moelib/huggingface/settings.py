"""Settings of a config.json: each one is used, is known to change nothing, or is an error."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from moelib.core.config_types import shortened
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


class _Kind(NamedTuple):
    """The values that a setting may have."""

    text: str  # Description for errors.
    allows: Callable[[Any], bool]

    def names(self, names: str) -> "dict[str, _Kind]":
        """Returns the kind of each of these names; a name with "?" may also be null."""
        null = _Kind(f"{self.text}, or null", lambda x: x is None or self.allows(x))
        kinds = {True: null, False: self}
        return {name.rstrip("?"): kinds[name.endswith("?")] for name in names.split()}


def _integer(low: int, high: int) -> _Kind:
    return _Kind(f"an integer from {low} to {high}", lambda x: type(x) is int and low <= x <= high)


def _list_of(kind: type, text: str) -> _Kind:
    return _Kind(text, lambda x: isinstance(x, list) and all(type(each) is kind for each in x))


_MAX_LAYERS, _MAX_SIZE = 1000, 10**9
_KINDS = {
    **_integer(1, _MAX_LAYERS).names(
        "decoder_sparse_step full_attention_interval no_rope_layer_interval num_hidden_layers"
    ),
    **_integer(0, _MAX_LAYERS).names(
        "first_k_dense_replace max_window_layers moe_num_shared_experts num_nextn_predict_layers"
    ),
    **_integer(0, _MAX_SIZE).names("num_local_experts qk_nope_head_dim shared_intermediate_size"),
    **_integer(1, _MAX_SIZE).names(
        "head_dim? hidden_size index_head_dim index_n_heads index_topk intermediate_size "
        "kv_lora_rank max_position_embeddings? "
        "linear_conv_kernel_dim linear_head_dim linear_key_head_dim linear_num_heads "
        "linear_num_key_heads linear_num_value_heads linear_value_head_dim "
        "moe_intermediate_size moe_k moe_latent_size? moe_num_experts n_group? "
        "n_routed_experts n_shared_experts? num_attention_heads num_experts "
        "num_experts_per_tok num_key_value_heads? "
        "mamba_d_conv mamba_d_state mamba_expand mamba_head_dim mamba_n_groups mamba_n_heads "
        "num_shared_experts original_max_position_embeddings? q_lora_rank? "
        "qk_rope_head_dim rotary_dim? shared_expert_intermediate_size sliding_window? topk_group? "
        "v_head_dim vocab_size"
    ),
    **_Kind(
        "a number above 0, from 1e-30 to 1e30",
        lambda x: type(x) in (int, float) and 1e-30 < x < 1e30,
    ).names(
        "alpha? attention_factor? attention_multiplier beta_fast? beta_slow? clip_qkv? "
        "embedding_multiplier factor? high_freq_factor? logits_scaling low_freq_factor? "
        "partial_rotary_factor? residual_multiplier rope_theta? routed_scaling_factor "
        "router_scaling_factor"
    ),
    **_Kind(
        "a number from 1e-12 to 0.1",
        lambda x: type(x) in (int, float) and 1e-12 <= x <= 0.1,
    ).names("rms_norm_eps"),
    **_Kind("a number from 0 to 1", lambda x: type(x) in (int, float) and 0 <= x <= 1).names(
        "attention_dropout?"
    ),
    **_Kind("a finite number", lambda x: type(x) in (int, float) and abs(x) < 10**9).names(
        "llama_4_scaling_beta? mscale? mscale_all_dim?"
    ),
    **_Kind(
        "a token id or a list of them",
        lambda x: all(
            type(each) is int and each >= 0 for each in (x if isinstance(x, list) else [x])
        ),
    ).names("eos_token_id?"),
    **_Kind(
        "an integer from 1 or a list of them",
        lambda x: all(
            type(each) is int and each >= 1 for each in (x if isinstance(x, list) else [x])
        ),
    ).names("moe_topk"),
    **_Kind("true or false", lambda x: type(x) is bool).names(
        "attention_bias mamba_conv_bias norm_topk_prob qkv_bias tie_word_embeddings truncate? "
        "use_qk_norm use_sliding_window"
    ),
    **_Kind(
        "an integer above 0 or a text", lambda x: isinstance(x, str) or (type(x) is int and x > 0)
    ).names("sliding_window_pattern?"),
    **_list_of(int, "a list of integers").names(
        "full_attn_layers? kda_layers? mlp_only_layers? no_rope_layers?"
    ),
    **_list_of(str, "a list of texts").names("indexer_types? layer_types? mlp_layer_types?"),
    **_Kind("a text", lambda x: isinstance(x, str)).names("hybrid_override_pattern"),
    **_Kind("an object", lambda x: isinstance(x, dict)).names(
        "attn_config? ffn_config? linear_attn_config? rope_parameters? rope_scaling? text_config"
    ),
}


def check_setting(name: str, value: Any, source: str) -> None:
    """Raises UserError if the value of a setting of `source` has the wrong type or range."""
    kind = _KINDS.get(name)
    if kind is not None and not kind.allows(value):
        raise UserError(f"{source}: {name}={shortened(value)}; it must be {kind.text}.")


def renamed(values: Mapping[str, Any], names: Mapping[str, str], source: str) -> dict[str, Any]:
    """Returns settings by the new ones of `names`. Raises UserError if two with one differ."""
    for name, other in names.items():
        if name in values and other in values:
            check_setting(other, values[other], source)
            if values[name] != values[other]:
                found = f"{name}={shortened(values[name])} and {other}={shortened(values[other])}"
                raise UserError(f"{source}: {found} are one setting; remove one of them.")
    return {names.get(name, name): x for name, x in values.items()}


class Settings:
    """The settings of a config.json, read one by one; `finish` refuses those never read.

    Attributes:
        values: The settings by name.
        source: Name of the file, for errors.
        known: Names that were read, or that change no logits.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        defaults: Mapping[str, Any] | None = None,
        ignored: Iterable[str] | None = (),
    ) -> None:
        """Takes the content of config.json, and its name for errors.

        Absent settings have their defaults. The user declares that `ignored` ones change nothing:
        they are as if absent. None ignores those that are never read.
        """
        self._ignored = None if ignored is None else set(ignored)
        absent = self._ignored or set()
        self.values = {name: x for name, x in values.items() if name not in absent}
        self.source, self._defaults = source, defaults or {}
        self.known: set[str] = set(_NEUTRAL)
        self._renamed: Mapping[str, str] = {}

    def inner(self, values: Mapping[str, Any]) -> "Settings":
        """Returns other settings of the same file, with the same defaults and ignored names."""
        return Settings(values, self.source, self._defaults, self._ignored)

    def nested(self, name: str, **changes: Any) -> "Settings":
        """Returns the settings of a setting that is an object, with changes to them."""
        return self.inner({**self.take(name), **changes})

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a setting.

        Raises:
            UserError: If it has the wrong type or range, or is absent without a default.
        """
        self.known.add(name)
        if name in self.values:
            check_setting(name, self.values[name], self.source)
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
        if not isinstance(value, str) or value not in known:
            supported = ", ".join(map(repr, known))
            found = shortened(value)
            raise UserError(f"{self.source}: {name}={found}; moelib supports {supported}.")
        return known[value]

    def expect(self, **wanted: Any) -> None:
        """Raises UserError if a setting is present with a value that moelib does not support."""
        for name, value in wanted.items():
            if (found := self.take(name, value)) != value:
                raise UserError(
                    f"{self.source}: {name}={shortened(found)}; moelib supports only {value!r}."
                )

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives settings that a family spells differently the names that others have.

        Raises:
            UserError: If the file has both names, with different values.
        """
        self.values, self._renamed = renamed(self.values, names, self.source), names

    def is_known(self, name: str) -> bool:
        """Returns whether a setting, as the family spells it, was read or changes no logits."""
        return self._renamed.get(name, name) in self.known

    def skip(self, *names: str) -> None:
        """Marks settings as read that follow from others."""
        self.known |= set(names)

    def finish(self) -> None:
        """Raises UserError if a setting was never read."""
        unread = [] if self._ignored is None else sorted(self.values.keys() - self.known)
        if unread:
            names = ",".join(unread)
            settings = ", ".join(f"{name}={shortened(self.values[name])}" for name in unread)
            raise UserError(
                f"{self.source}: unsupported settings: {settings}. If they change nothing, pass "
                f"--ignore_settings={names}."
            )
