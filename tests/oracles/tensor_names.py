"""Tensors of Hugging Face's Mixtral, and what each holds of moelib's parameters.

Sizes: N layers, E experts.
"""

from collections.abc import Iterator


def mixtral(num_layers: int, num_experts: int) -> Iterator[tuple[str, str, tuple[int | None, ...]]]:
    """Yields (tensor, parameter, index into its leading dimensions) of layers of one kind."""
    yield "model.embed_tokens.weight", "embedding/weight", ()
    yield "lm_head.weight", "lm_head/weight", ()
    yield "model.norm.weight", "output_norm/scale", ()
    for n in range(num_layers):
        theirs, ours = f"model.layers.{n}.", "decoder/repeated0/"
        yield f"{theirs}input_layernorm.weight", f"{ours}attention_norm/scale", (n,)
        yield f"{theirs}post_attention_layernorm.weight", f"{ours}feed_forward_norm/scale", (n,)
        yield f"{theirs}self_attn.q_proj.weight", f"{ours}self_attention/q", (n,)
        yield f"{theirs}self_attn.k_proj.weight", f"{ours}self_attention/kv", (n, None, 0)
        yield f"{theirs}self_attn.v_proj.weight", f"{ours}self_attention/kv", (n, None, 1)
        yield f"{theirs}self_attn.o_proj.weight", f"{ours}self_attention/output", (n,)
        moe, ours = f"{theirs}block_sparse_moe.", f"{ours}feed_forward/"
        yield f"{moe}gate.weight", f"{ours}router/weight", (n,)
        for e in range(num_experts):
            yield f"{moe}experts.{e}.w1.weight", f"{ours}experts/up", (n, e, 0)
            yield f"{moe}experts.{e}.w3.weight", f"{ours}experts/up", (n, e, 1)
            yield f"{moe}experts.{e}.w2.weight", f"{ours}experts/down", (n, e)
