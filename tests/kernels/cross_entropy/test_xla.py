import jax
import jax.numpy as jnp
import pytest

from moelib.kernels.cross_entropy import cross_entropy
from moelib.kernels.cross_entropy.xla import chunk_size_for


@pytest.mark.parametrize(
    ("num_tokens", "dim", "vocab_size", "expected"),
    [
        (4096, 2048, 32768, 1024),
        (4096, 2048, 8192, 4096),
        (1100, 64, 32768, 552),  # Two equal chunks rather than one whole and one nearly empty.
        (4096, 2048, 151936, 1024),  # More than 128 MiB: few passes over the head's gradient.
        (4096, 4096, 128256, 4096),  # One chunk, whose logits take no more than that gradient.
        (5120, 4096, 128256, 5120),
        (5128, 4096, 128256, 856),
        (1500, 256, 151936, 752),
        (5, 8, 10**9, 5),
    ],
)
def test_chunks_are_equal_and_fit_the_budget(num_tokens, dim, vocab_size, expected):
    assert chunk_size_for(num_tokens, dim, vocab_size) == expected


@pytest.mark.parametrize(("most", "expected"), [(512, 512), (500, 456), (9000, 4096), (1, 8)])
def test_a_chunk_size_can_be_set(most, expected):
    assert chunk_size_for(4096, 4096, 32768, most) == expected


def test_on_cpus_no_more_than_512_tokens_have_logits():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(600, 8), (8, 100)]]
    labels = jax.ShapeDtypeStruct((600,), jnp.int32)
    program = str(jax.make_jaxpr(lambda *x: cross_entropy(*x).loss)(*shapes, labels))
    assert "f32[304,100]" in program
    assert "f32[600,100]" not in program


@pytest.mark.parametrize("transposed", [False, True])
def test_all_logits_are_never_held_and_no_head_is_transposed(transposed):
    num_tokens, dim, vocab_size, chunk = 512, 8, 4096, 32
    head = (vocab_size, dim) if transposed else (dim, vocab_size)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(num_tokens, dim), head]]
    labels = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

    def loss(hidden, head, labels):
        return cross_entropy(
            hidden, head, labels, transposed_head=transposed, chunk_size=chunk
        ).loss

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, labels).compile()
    chunk_bytes, head_bytes = 4 * chunk * vocab_size, 4 * dim * vocab_size
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * chunk_bytes + 2.5 * head_bytes
