"""Multi-head latent attention: keys and values of all heads come from one small vector per token.

A cache holds that latent and a shared key only: kv_lora_rank + rope_head_dim numbers per token. A
new token is computed without keys and values of the earlier ones: the projections of the latent are
multiplied into its query and its output ("absorbed").
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.module import in_context
from moelib.core.param import ParameterSpec
from moelib.kernels.flash_attention import CONTEXT, MaskSpec
from moelib.layers.attention.cached import attend_to_cache, store
from moelib.layers.attention.on_mesh import attend
from moelib.layers.attention.temperature import AttentionTemperature
from moelib.layers.base import BaseLayer, weight_spec
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.layers.quantization import QuantizedWeight, project
from moelib.layers.remat import save_activation
from moelib.layers.rope import RotaryEmbedding
from moelib.parallel.sharding import constrain


class LatentAttention(BaseLayer):
    """Causal self-attention whose keys and values are projections of a normalized latent.

    Positions enter a part of each query, and one key that all heads share in addition to their own.

    Source: DeepSeek-V2, arXiv:2405.04434, eq. 9 to 19, with the norms of section 3.1.2.
    """

    quantized: ClassVar[tuple[str, ...]] = (
        *("q", "q_down", "q_up", "kv_down", "k_rope", "kv_up", "output"),
    )

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[PositiveInt] = REQUIRED  # D.
        num_heads: Required[PositiveInt] = REQUIRED  # H.
        # Size of the queries' latent; None for one full matrix.
        q_lora_rank: PositiveInt | None = None
        kv_lora_rank: Required[PositiveInt] = REQUIRED  # Size of the latent of keys and values.
        # Entries of a query or key without position.
        nope_head_dim: Required[PositiveInt] = REQUIRED
        rope_head_dim: Required[PositiveInt] = REQUIRED  # Rotated entries that follow them; even.
        v_head_dim: Required[PositiveInt] = REQUIRED  # Entries of a value.
        # Rotary embedding of queries and the shared key; None for no positions.
        rope: BaseLayer.Config | None = RotaryEmbedding.default_config()
        norm: BaseNorm.Config = RMSNorm.default_config()  # Norm of the latents.
        # Multiplies scores, which are divided by sqrt(nope + rope dims).
        score_factor: PositiveFloat = 1.0
        # Multiplies queries by a factor that grows with their position; None for none.
        temperature: AttentionTemperature.Config | None = None

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.rope_head_dim % 2:
            raise UserError(
                f"{self._title()}: rope_head_dim={cfg.rope_head_dim}; entries are rotated in "
                "pairs, so set an even number."
            )
        self._qk_head_dim: int = cfg.nope_head_dim + cfg.rope_head_dim
        if cfg.rope is not None:
            self._add_child("rope", cfg.rope)
        if cfg.q_lora_rank is not None:
            self._add_child("q_norm", cfg.norm.clone(dim=cfg.q_lora_rank))
        self._add_child("kv_norm", cfg.norm.clone(dim=cfg.kv_lora_rank))
        if cfg.temperature is not None:
            self._add_child("temperature", cfg.temperature)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: LatentAttention.Config = self.config
        heads, kv_dim = cfg.num_heads, cfg.nope_head_dim + cfg.v_head_dim
        down, up = ("embed", None), ("embed", "heads", "head_dim")
        specs = {
            "kv_down": weight_spec((cfg.input_dim, cfg.kv_lora_rank), down),
            "k_rope": weight_spec((cfg.input_dim, cfg.rope_head_dim), down),
            "kv_up": weight_spec((cfg.kv_lora_rank, heads, kv_dim), up),
            "output": weight_spec(
                (heads, cfg.v_head_dim, cfg.input_dim),
                ("heads", "head_dim", "embed"),
                inputs=2,
                initializer=self._initializer("output_init"),
            ),
        }
        if cfg.q_lora_rank is None:
            return specs | {"q": weight_spec((cfg.input_dim, heads, self._qk_head_dim), up)}
        return specs | {
            "q_down": weight_spec((cfg.input_dim, cfg.q_lora_rank), down),
            "q_up": weight_spec((cfg.q_lora_rank, heads, self._qk_head_dim), up),
        }

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        cfg: LatentAttention.Config = self.config
        shape = (batch_size, length, cfg.kv_lora_rank + cfg.rope_head_dim)
        return {"latent": ParameterSpec(shape, ("batch", None, None))}

    def forward(
        self,
        x: Float[Array, "B S D"],
        *,
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Returns the layer's output; a token sees itself and earlier tokens of its segment.

        With a cache in the state, the tokens are stored in it: prompts (S above 1) attend among
        themselves, one new token per sequence (S = 1) to the cache (see
        moelib.layers.attention.cached).
        """
        q = self._queries(x, positions)
        out = self._attend(q, *self.latents(x, positions), positions, segment_ids)
        y = project(out, self._weight("output", x), num_inputs=2)
        return save_activation(y, "attention_output")

    def _attend(
        self,
        q: Float[Array, "B S H qk"],
        latent: Float[Array, "B S latent"],
        key: Float[Array, "B S rope"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None,
    ) -> Float[Array, "B S H v"]:
        cfg: LatentAttention.Config = self.config
        spec = MaskSpec(cfg.score_factor * self._qk_head_dim**-0.5)
        cache = self.cache
        if cache is not None:
            new = jnp.concatenate([latent, key], axis=-1)
            held = store(cache["latent"], new, positions, segment_ids)
            self.put_cache(latent=held)
            if q.shape[1] == 1:
                return self._attend_to_latents(q, held, positions, spec)
        k, v = self.keys_and_values(latent, key)
        split = ("batch", "sequence", "activation_heads", None)
        q, k, v = (constrain(x, split) for x in (q, k, v))
        return save_activation(constrain(attend(q, k, v, segment_ids, spec=spec), split), CONTEXT)

    def _attend_to_latents(
        self,
        q: Float[Array, "B 1 H qk"],
        held: Float[Array, "B L both"],
        positions: Int[Array, "B 1"],
        spec: MaskSpec,
    ) -> Float[Array, "B 1 H v"]:
        """Returns the attention to the cache: one key for all heads, which is also their value.

        Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2 (the absorbed matrices).
        """
        nope, rank = self.config.nope_head_dim, self.config.kv_lora_rank
        up = self._weight("kv_up", q)
        if isinstance(up, QuantizedWeight):
            up = up.dequantized(q.dtype, num_inputs=1)
        q_latent = jnp.einsum("bshk,dhk->bshd", q[..., :nope], up[..., :nope])
        q = jnp.concatenate([q_latent, q[..., nope:]], axis=-1)
        # Rotated keys are summed with the latents and cut off: cheaper than a copy without them.
        out = attend_to_cache(q, held[:, None], held[:, None], positions, None, spec)
        return jnp.einsum("bshd,dhk->bshk", out[..., :rank], up[..., nope:])

    @in_context
    def latents(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S latent"], Float[Array, "B S rope"]]:
        """Returns each token's normalized latent and rotated shared key, which a cache holds."""
        latent = self.kv_norm(self._projected(x, "kv_down", "attention_kv"))
        key = self._projected(x, "k_rope", "attention_kv")
        return latent, self._rotated(key[:, :, None], positions)[:, :, 0]

    @in_context
    def keys_and_values(
        self, latent: Float[Array, "B S latent"], key: Float[Array, "B S rope"]
    ) -> tuple[Float[Array, "B S H qk"], Float[Array, "B S H v"]]:
        """Returns all heads' keys and values from the results of `latents`."""
        nope, heads = self.config.nope_head_dim, self.config.num_heads
        kv = save_activation(project(latent, self._weight("kv_up", latent)), "attention_kv")
        shared = jnp.broadcast_to(key[:, :, None], (*key.shape[:2], heads, key.shape[-1]))
        return jnp.concatenate([kv[..., :nope], shared], -1), kv[..., nope:]

    def _queries(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H qk"]:
        cfg: LatentAttention.Config = self.config
        up = "q"
        if cfg.q_lora_rank is not None:
            x, up = self.q_norm(self._projected(x, "q_down", "attention_q")), "q_up"
        q = save_activation(project(x, self._weight(up, x)), "attention_q")
        nope, rope = jnp.split(q, [cfg.nope_head_dim], axis=-1)
        q = jnp.concatenate([nope, self._rotated(rope, positions)], -1)
        return q if cfg.temperature is None else self.temperature(q, positions)

    def _projected(self, x: Float[Array, "B S D"], name: str, point: str) -> Float[Array, "B S n"]:
        return save_activation(project(x, self._weight(name, x)), point)

    def _rotated(
        self, x: Float[Array, "B S H rope"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H rope"]:
        return x if self.config.rope is None else self.rope(x, positions)

    def _weight(self, name: str, x: Float[Array, "..."]) -> Any:
        return self.operands({name: self.own_parameters[name]}, x.dtype)[name]

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        cfg: LatentAttention.Config = self.config
        keys_seen = (seq_len + 1) / 2  # The average.
        head = self._qk_head_dim + cfg.v_head_dim  # Dimensions of a score and of a sum of values.
        projections = super()._own_forward_flops_per_token(seq_len)
        return projections + 2 * keys_seen * cfg.num_heads * head
