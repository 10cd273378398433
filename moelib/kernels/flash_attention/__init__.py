"""Attention: softmax(scale q k^T) v with grouped key and value heads.

`flash_attention` is the one entry. `reference` says what it means; `xla` computes it in blocks of
queries, memory linear in the sequence, on every platform.
"""

from jaxtyping import Array, Float, Int

from moelib.kernels.backend import check_backend
from moelib.kernels.flash_attention import reference, xla

__all__ = ["flash_attention"]

_BACKENDS = {"reference": reference.attention, "xla": xla.attention}


def flash_attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> Float[Array, "B S H Dh"]:
    """Returns attention over whole sequences, in the dtype of v.

    Args:
        q: Queries. Head h attends with key and value head h // (H / G).
        k: Keys.
        v: Values.
        segment_ids: Tokens attend only inside their segment; None for one segment a row.
        causal: Whether a token attends only to itself and to what stands before it.
        scale: Multiplies the scores; 1 / sqrt(Dh) by default.
        backend: "xla" (the default) or "reference".

    Raises:
        ValueError: If H is not a multiple of G, or the backend is unknown.

    Source: Vaswani et al., arXiv:1706.03762, eq. 1; grouped heads: Ainslie et al.,
    arXiv:2305.13245.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: {q.shape[2]} query heads do not divide into {k.shape[2]} groups; "
            "num_heads must be a multiple of num_kv_heads."
        )
    check_backend("flash_attention", backend, _BACKENDS)
    attend = _BACKENDS[backend or "xla"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q, k, v, segment_ids, causal=causal, scale=scale)
