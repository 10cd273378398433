"""Bugs of kernels that show only in some shapes are found by the cases that `verify` compares."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import tpu as attention_tpu
from moelib.kernels.flash_attention import xla as attention_xla
from moelib.kernels.gmm import tpu as gmm_tpu
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.verify import layer_checks

ATTENTION = SimpleNamespace(config={"num_heads": 4, "num_kv_heads": 2})
WINDOW = SimpleNamespace(config={**ATTENTION.config, "window": 7})


@pytest.fixture(autouse=True)
def no_traces_of_other_tests() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


def found(layer: Any, backend: str) -> Any:
    model: Any = SimpleNamespace(walk=lambda: [(layer, 1)])
    return layer_checks._kernels(model, backend)


@pytest.mark.slow
def test_segments_of_the_first_sequence_for_all(monkeypatch):
    known = attention_tpu._visits

    def visits(call, positions, in_order, *, by_keys):
        first = lambda x: jnp.broadcast_to(x[:1], x.shape)
        segments = {n: first(getattr(positions, n)) for n in ("q_segments", "k_segments")}
        return known(call, positions._replace(**segments), in_order, by_keys=by_keys)

    monkeypatch.setattr(attention_tpu, "_visits", visits)
    assert "(2, 200) tokens" in found(ATTENTION, "tpu").leaf


@pytest.mark.slow
def test_heads_that_read_other_keys_and_values(monkeypatch):
    """Head h reads key and value head h % G."""
    known, order = attention_tpu.forward, np.array([0, 2, 1, 3])

    def forward(q, k, v, sinks, *args, **kwargs):
        turn = order if q.shape[2] == 4 else np.arange(q.shape[2])
        out, lse = known(q[:, :, turn], k, v, sinks, *args, **kwargs)
        return out[:, :, turn], lse[:, turn]

    monkeypatch.setattr(attention_tpu, "forward", forward)
    assert "(4, 2) heads" in found(ATTENTION, "tpu").leaf


@pytest.mark.slow
def test_gradients_of_the_first_chunk_of_heads(monkeypatch):
    known = attention_tpu._from_key_layout
    first = lambda x, k, dtype: known(x[:, :: x.shape[1] // k.shape[2]], k, dtype)
    monkeypatch.setattr(attention_tpu, "_from_key_layout", first)
    difference = found(ATTENTION, "tpu").leaf
    assert "(16, 1) heads" in difference
    assert "direction of k" in difference


@pytest.mark.slow
def test_windows_that_end_at_a_block(monkeypatch):
    known = attention_tpu.forward

    def forward(q, k, v, sinks, positions, spec, **kwargs):
        window = min(spec.window, 128)
        return known(q, k, v, sinks, positions, spec._replace(window=window), **kwargs)

    monkeypatch.setattr(attention_tpu, "forward", forward)
    assert "window=150" in found(WINDOW, "tpu").leaf


@pytest.mark.slow
def test_the_last_block_of_a_part(monkeypatch):
    known = attention_xla._loop

    def loop(step, carry, start, stop, size, first, span):
        return known(step, carry, start, max(stop - size, start + size), size, first, span)

    monkeypatch.setattr(attention_xla, "_loop", loop)
    assert "(1, 640) tokens" in found(ATTENTION, "xla").leaf


@pytest.mark.slow
def test_columns_of_the_second_tile(monkeypatch):
    known = gmm_tpu.forward

    def forward(*args, **kwargs):
        zeros = lambda x: jnp.where(jnp.arange(x.shape[-1]) < 128, x, 0)
        return jax.tree.map(zeros, known(*args, **kwargs))

    monkeypatch.setattr(gmm_tpu, "forward", forward)
    cfg = FeedForwardExperts.default_config().set(
        num_experts=4, input_dim=16, hidden_dim=24, num_experts_per_token=2
    )
    experts = cfg.set(name="experts").instantiate(parent=None)
    assert "(200, 264)" in found(experts, "tpu").leaf
