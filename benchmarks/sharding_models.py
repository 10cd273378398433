"""Small models of many kinds, written without moelib, with Megatron's shardings by hand.

Each has two layers and random parameters. The shardings are those of Shoeybi et al.
(arXiv:1909.08053): up-projections by columns, down-projections by rows, vocabularies by entries.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY, LAYERS = 4, 64, 128, 8, 512, 1024, 2
HEAD_DIM = WIDTH // HEADS
COLUMN, ROW = P(None, "model"), P("model")
_EXPERTS = 8


class Model(NamedTuple):
    """A loss with its parameters."""

    name: str
    loss: Callable[..., jax.Array]  # (parameters, *batch) -> scalar.
    params: Any
    batch: tuple[Any, ...]
    hand: Sequence[tuple[str, P]] | None = None  # (regex of a path, spec); others are whole.


def models() -> list[Callable[[], Model]]:
    """Returns functions that build the models."""
    return [
        functools.partial(llama, "Llama"),
        functools.partial(llama, "Llama, 2 key/value heads", kv_heads=2),
        scanned_llama,
        fused_llama,
        gpt2,
        flax_attention,
        t5,
        functools.partial(mixture, "MoE, einsum", einsum=True),
        functools.partial(mixture, "MoE, ragged_dot", einsum=False),
        mixture_of_depths,
        state_space,
        equinox_model,
        nnx_model,
        dense_chain,
        resnet,
        maml,
        lstm,
    ]


class _Random:
    """Draws arrays of a standard deviation of 0.02, vectors around 1."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def __call__(self, *shape: int) -> jax.Array:
        std, mean = (0.02, 0.0) if len(shape) > 1 else (0.1, 1.0)
        return jnp.asarray(self._generator.normal(mean, std, shape), jnp.float32)

    def ids(self, *shape: int) -> jax.Array:
        return jnp.asarray(self._generator.integers(0, VOCABULARY, shape), jnp.int32)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Applies rotary positions to [B, S, H, Dh]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    """Returns attention of [B, S, H, Dh], keys and values repeated to the query heads."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def _cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    logged = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logged, labels[..., None], -1).mean()


def _heads(x: jax.Array, num: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], num, HEAD_DIM)


# -- Language models -----------------------------------------------------------------------------


def _llama_layer(draw: _Random, kv_heads: int) -> dict[str, jax.Array]:
    return {
        "norm1": draw(WIDTH),
        "q": draw(WIDTH, WIDTH),
        "k": draw(WIDTH, kv_heads * HEAD_DIM),
        "v": draw(WIDTH, kv_heads * HEAD_DIM),
        "o": draw(WIDTH, WIDTH),
        "norm2": draw(WIDTH),
        "gate": draw(WIDTH, HIDDEN),
        "up": draw(WIDTH, HIDDEN),
        "down": draw(HIDDEN, WIDTH),
    }


def _llama_block(x: jax.Array, p: Any, kv_heads: int) -> jax.Array:
    h = _norm(x, p["norm1"])
    q, k, v = (_heads(h @ p[c], n) for c, n in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)))
    x += _attend(_rotate(q), _rotate(k), v).reshape(x.shape) @ p["o"]
    h = _norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


_ENDS = [("embed", ROW), ("head", COLUMN)]


def llama(name: str, kv_heads: int = HEADS, layers: int = LAYERS) -> Model:
    """Rotary positions, RMSNorm, SwiGLU."""
    draw = _Random()
    params = {
        "embed": draw(VOCABULARY, WIDTH),
        "layers": [_llama_layer(draw, kv_heads) for _ in range(layers)],
        "norm": draw(WIDTH),
        "head": draw(WIDTH, VOCABULARY),
    }

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for layer in params["layers"]:
            x = _llama_block(x, layer, kv_heads)
        return _cross_entropy(_norm(x, params["norm"]) @ params["head"], labels)

    columns = "q|k|v|gate|up" if kv_heads == HEADS else "q|gate|up"  # Else whole, as in Megatron.
    hand = [*_ENDS, (f"layers/.*/({columns})", COLUMN), ("layers/.*/(o|down)", ROW)]
    return Model(name, loss, params, (draw.ids(BATCH, LENGTH), draw.ids(BATCH, LENGTH)), hand)


def scanned_llama() -> Model:
    """Stacked layers in a scan, rematerialized."""
    one = llama("Llama, scan and remat")
    params = one.params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *one.params["layers"])}

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        block = jax.checkpoint(functools.partial(_llama_block, kv_heads=HEADS))
        x = params["embed"][ids]
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        return _cross_entropy(_norm(x, params["norm"]) @ params["head"], labels)

    columns, rows = P(None, None, "model"), P(None, "model")
    hand = [*_ENDS, ("layers/(q|k|v|gate|up)", columns), ("layers/(o|down)", rows)]
    return Model(one.name, loss, params, one.batch, hand)


def fused_llama() -> Model:
    """Projections fused as [D, 3, H, Dh] and [D, 2, F]."""
    draw = _Random()

    def layer() -> dict[str, jax.Array]:
        return {
            "norm1": draw(WIDTH),
            "qkv": draw(WIDTH, 3, HEADS, HEAD_DIM),
            "o": draw(HEADS, HEAD_DIM, WIDTH),
            "norm2": draw(WIDTH),
            "up": draw(WIDTH, 2, HIDDEN),
            "down": draw(HIDDEN, WIDTH),
        }

    params = {
        "embed": draw(VOCABULARY, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": draw(WIDTH),
        "head": draw(WIDTH, VOCABULARY),
    }

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for p in params["layers"]:
            q, k, v = jnp.einsum("bsd,dchk->cbshk", _norm(x, p["norm1"]), p["qkv"])
            x += jnp.einsum("bshk,hkd->bsd", _attend(_rotate(q), _rotate(k), v), p["o"])
            gate, up = jnp.einsum("bsd,dcf->cbsf", _norm(x, p["norm2"]), p["up"])
            x += (jax.nn.silu(gate) * up) @ p["down"]
        return _cross_entropy(_norm(x, params["norm"]) @ params["head"], labels)

    middle = P(None, None, "model")
    hand = [*_ENDS, ("layers/./(qkv|up)", middle), ("layers/./(o|down)", ROW)]
    batch = draw.ids(BATCH, LENGTH), draw.ids(BATCH, LENGTH)
    return Model("Llama, fused [D, 3, H, Dh]", loss, params, batch, hand)


def gpt2() -> Model:
    """One projection [D, 3 D] of queries, keys and values, biases, positions, a tied head."""
    draw = _Random()

    def layer() -> dict[str, jax.Array]:
        return {
            "norm1": draw(WIDTH),
            "qkv": draw(WIDTH, 3 * WIDTH),
            "qkv_bias": draw(3 * WIDTH),
            "o": draw(WIDTH, WIDTH),
            "o_bias": draw(WIDTH),
            "norm2": draw(WIDTH),
            "up": draw(WIDTH, HIDDEN),
            "up_bias": draw(HIDDEN),
            "down": draw(HIDDEN, WIDTH),
            "down_bias": draw(WIDTH),
        }

    params = {
        "embed": draw(VOCABULARY, WIDTH),
        "positions": draw(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": draw(WIDTH),
    }

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][ids] + params["positions"]
        for p in params["layers"]:
            qkv = jnp.split(_norm(x, p["norm1"]) @ p["qkv"] + p["qkv_bias"], 3, -1)
            q, k, v = (_heads(each, HEADS) for each in qkv)
            x += _attend(q, k, v).reshape(x.shape) @ p["o"]
            x += p["o_bias"]
            h = jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"] + p["up_bias"])
            x += h @ p["down"] + p["down_bias"]
        return _cross_entropy(_norm(x, params["norm"]) @ params["embed"].T, labels)

    hand = [
        ("embed", ROW),
        ("layers/./(qkv|up)", COLUMN),
        ("layers/./(qkv|up)_bias", ROW),
        ("layers/./(o|down)", ROW),
    ]
    batch = draw.ids(BATCH, LENGTH), draw.ids(BATCH, LENGTH)
    return Model("GPT-2", loss, params, batch, hand)


def t5() -> Model:
    """An encoder and a decoder with cross-attention, relative positions, ReLU."""
    draw = _Random()

    def attention() -> dict[str, jax.Array]:
        return {name: draw(WIDTH, WIDTH) for name in "qkvo"} | {"norm": draw(WIDTH)}

    def block(cross: bool) -> dict[str, Any]:
        parts = {"self": attention(), "up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)}
        return parts | {"norm": draw(WIDTH)} | ({"cross": attention()} if cross else {})

    params = {
        "embed": draw(VOCABULARY, WIDTH),
        "relative": draw(2 * LENGTH, HEADS),
        "encoder": [block(cross=False) for _ in range(LAYERS)],
        "decoder": [block(cross=True) for _ in range(LAYERS)],
        "head": draw(WIDTH, VOCABULARY),
    }

    def attend(x: jax.Array, source: jax.Array, p: Any, bias: Any, causal: bool) -> jax.Array:
        q, k, v = (_heads(y @ p[c], HEADS) for y, c in ((x, "q"), (source, "k"), (source, "v")))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return mixed.reshape(x.shape) @ p["o"]

    def loss(params: Any, ids: jax.Array, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH)
        bias = params["relative"][positions[:, None] - positions + LENGTH].transpose(2, 0, 1)
        x, y = params["embed"][ids], params["embed"][inputs]
        for p in params["encoder"]:
            h = _norm(x, p["self"]["norm"])
            x += attend(h, h, p["self"], bias, False)
            x += jax.nn.relu(_norm(x, p["norm"]) @ p["up"]) @ p["down"]
        for p in params["decoder"]:
            h = _norm(y, p["self"]["norm"])
            y += attend(h, h, p["self"], bias, True)
            y += attend(_norm(y, p["cross"]["norm"]), x, p["cross"], 0.0, False)
            y += jax.nn.relu(_norm(y, p["norm"]) @ p["up"]) @ p["down"]
        return _cross_entropy(y @ params["head"], labels)

    hand = [
        *_ENDS,
        ("relative", COLUMN),
        (".*/(self|cross)/[qkv]", COLUMN),
        (".*/up", COLUMN),
        (".*/(o|down)", ROW),
    ]
    return Model("T5", loss, params, tuple(draw.ids(BATCH, LENGTH) for _ in range(3)), hand)


def mixture(name: str, *, einsum: bool) -> Model:
    """Llama's attention with eight experts, two per token."""
    one, draw = llama(name), _Random()
    for layer in one.params["layers"]:
        del layer["gate"], layer["up"], layer["down"]
        layer["router"] = draw(WIDTH, _EXPERTS)
        layer["gate"] = draw(_EXPERTS, WIDTH, HIDDEN)
        layer["up"] = draw(_EXPERTS, WIDTH, HIDDEN)
        layer["down"] = draw(_EXPERTS, HIDDEN, WIDTH)

    def sparse(x: jax.Array, p: Any) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        rows = x[order // 2]
        sizes = jnp.bincount(chosen.reshape(-1), length=_EXPERTS)
        gate, up = (jax.lax.ragged_dot(rows, p[c], sizes) for c in ("gate", "up"))
        rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
        rows *= weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(x).at[order // 2].add(rows)

    def dense(x: jax.Array, p: Any) -> jax.Array:
        probabilities = jax.nn.softmax(x @ p["router"])
        weights, chosen = jax.lax.top_k(probabilities, 2)
        combine = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, _EXPERTS))
        capacity = 2 * x.shape[0] // _EXPERTS
        slot = jnp.cumsum(combine > 0, 0) - 1
        slots = jax.nn.one_hot(jnp.where(combine > 0, slot, -1), capacity)
        rows = jnp.einsum("tec,td->ecd", slots, x)
        gate, up = (jnp.einsum("ecd,edf->ecf", rows, p[c]) for c in ("gate", "up"))
        rows = jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, p["down"])
        return jnp.einsum("tec,te,ecd->td", slots, combine, rows)

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for p in params["layers"]:
            h = _norm(x, p["norm1"])
            q, k, v = (_heads(h @ p[c], HEADS) for c in "qkv")
            x += _attend(_rotate(q), _rotate(k), v).reshape(x.shape) @ p["o"]
            flat = _norm(x, p["norm2"]).reshape(-1, WIDTH)
            x += (dense if einsum else sparse)(flat, p).reshape(x.shape)
        return _cross_entropy(_norm(x, params["norm"]) @ params["head"], labels)

    experts = ("gate|up|down", ROW) if einsum else ("gate|up", P(None, None, "model"))
    hand = [*_ENDS, ("layers/./[qkv]", COLUMN), ("layers/./o", ROW)]
    hand.append((f"layers/./({experts[0]})", experts[1]))
    if not einsum:
        hand.append(("layers/./down", COLUMN))
    return one._replace(loss=loss, hand=hand)


def mixture_of_depths() -> Model:
    """Llama whose layers compute a quarter of the tokens (Raposo et al., arXiv:2404.02258)."""
    one, draw = llama("Mixture of depths"), _Random()
    for layer in one.params["layers"]:
        layer["router"] = draw(WIDTH, 1)

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for p in params["layers"]:
            scores, chosen = jax.lax.top_k((x @ p["router"])[..., 0], LENGTH // 4)
            h = jnp.take_along_axis(x, chosen[..., None], 1)
            h = (_llama_block(h, p, HEADS) - h) * jax.nn.sigmoid(scores)[..., None]
            x = jax.vmap(lambda x, chosen, h: x.at[chosen].add(h))(x, chosen, h)
        return _cross_entropy(_norm(x, params["norm"]) @ params["head"], labels)

    return one._replace(loss=loss)


def state_space() -> Model:
    """Selective state spaces in a scan over tokens (Mamba, arXiv:2312.00752)."""
    draw, states, rank = _Random(), 16, 8

    def layer() -> dict[str, jax.Array]:
        return {
            "norm": draw(WIDTH),
            "in": draw(WIDTH, 2, HIDDEN),
            "convolution": draw(4, 1, HIDDEN),
            "select": draw(HIDDEN, rank + 2 * states),
            "step": draw(rank, HIDDEN),
            "step_bias": draw(HIDDEN),
            "decay": draw(HIDDEN, states),
            "skip": draw(HIDDEN),
            "out": draw(HIDDEN, WIDTH),
        }

    params = {
        "embed": draw(VOCABULARY, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "head": draw(WIDTH, VOCABULARY),
    }

    def mix(x: jax.Array, p: Any) -> jax.Array:
        h, gate = jnp.einsum("bsd,dcf->cbsf", x, p["in"])
        h = jax.nn.silu(
            jax.lax.conv_general_dilated(
                h,
                p["convolution"],
                (1,),
                [(3, 0)],
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=HIDDEN,
            )
        )
        step, into, out = jnp.split(h @ p["select"], (rank, rank + states), -1)
        step = jax.nn.softplus(step @ p["step"] + p["step_bias"])
        decay = jnp.exp(-step[..., None] * jnp.exp(p["decay"]))
        entries = decay, (step * h)[..., None] * into[:, :, None], out

        def advance(state: jax.Array, entry: Any) -> Any:
            state = entry[0] * state + entry[1]
            return state, jnp.einsum("bfn,bn->bf", state, entry[2])

        by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), entries)
        _, y = jax.lax.scan(advance, jnp.zeros((BATCH, HIDDEN, states)), by_token)
        return ((jnp.moveaxis(y, 0, 1) + h * p["skip"]) * jax.nn.silu(gate)) @ p["out"]

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        for p in params["layers"]:
            x += mix(_norm(x, p["norm"]), p)
        return _cross_entropy(x @ params["head"], labels)

    middle = P(None, None, "model")
    hand = [*_ENDS, ("layers/./(in|convolution)", middle), ("layers/./step", COLUMN)]
    hand.append(("layers/./(select|step_bias|decay|skip|out)", ROW))
    batch = draw.ids(BATCH, LENGTH), draw.ids(BATCH, LENGTH)
    return Model("State spaces", loss, params, batch, hand)


# -- Models of other libraries -------------------------------------------------------------------


def flax_attention() -> Model:
    """Flax Linen's MultiHeadDotProductAttention and Dense, with biases."""
    from flax import linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x: Any = nn.Embed(VOCABULARY, WIDTH)(ids)
            for _ in range(LAYERS):
                x += nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
                h = nn.gelu(nn.Dense(HIDDEN, name=f"up{_}")(nn.LayerNorm()(x)))
                x += nn.Dense(WIDTH, name=f"down{_}")(h)
            return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm()(x))

    draw, network = _Random(), Network()
    ids, labels = draw.ids(BATCH, LENGTH), draw.ids(BATCH, LENGTH)
    params = network.init(jax.random.key(0), ids)["params"]
    hand = [
        (".*/embedding", ROW),
        (".*/(query|key|value)/kernel", COLUMN),
        (".*/(query|key|value)/bias", ROW),
        (".*/out/kernel", ROW),
        ("(up.|head)/kernel", COLUMN),
        ("(up.|head)/bias", ROW),
        ("down./kernel", ROW),
    ]
    loss = lambda p, ids, labels: _cross_entropy(network.apply({"params": p}, ids), labels)
    return Model("Flax Linen", loss, params, (ids, labels), hand)


def nnx_model() -> Model:
    """Flax NNX's MultiHeadAttention and Linear."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, rngs=rngs, deterministic=True
            )
            self.up, self.down = (
                nnx.Linear(WIDTH, HIDDEN, rngs=rngs),
                nnx.Linear(HIDDEN, WIDTH, rngs=rngs),
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            x += self.attention(x)
            return x + self.down(jax.nn.gelu(self.up(x)))

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
            self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

        def __call__(self, ids: jax.Array) -> jax.Array:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    draw = _Random()
    graph, state, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    params = nnx.to_pure_dict(state)

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        nnx.replace_by_pure_dict(state, params)
        return _cross_entropy(nnx.merge(graph, state, rest)(ids), labels)

    hand = [
        ("embed/embedding", ROW),
        (".*/(query|key|value)/kernel", COLUMN),
        (".*/(query|key|value)/bias", ROW),
        (".*/out/kernel", ROW),
        ("(.*/up|head)/kernel", COLUMN),
        ("(.*/up|head)/bias", ROW),
        (".*/down/kernel", ROW),
    ]
    return Model("Flax NNX", loss, params, (draw.ids(BATCH, LENGTH), draw.ids(BATCH, LENGTH)), hand)


def equinox_model() -> Model:
    """Equinox's MultiheadAttention and MLP, weights stored as [out, in], vmapped."""
    import equinox as eqx

    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 2))
    blocks = [
        (
            eqx.nn.MultiheadAttention(HEADS, WIDTH, key=next(keys)),
            eqx.nn.LayerNorm(WIDTH),
            eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=next(keys)),
        )
        for _ in range(LAYERS)
    ]
    network = (
        eqx.nn.Embedding(VOCABULARY, WIDTH, key=next(keys)),
        blocks,
        eqx.nn.Linear(WIDTH, VOCABULARY, key=next(keys)),
    )
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def logits(network: Any, ids: jax.Array) -> jax.Array:
        embed, blocks, head = network
        x = jax.vmap(embed)(ids)
        for attention, norm, mlp in blocks:
            h = jax.vmap(norm)(x)
            x += attention(h, h, h)
            x += jax.vmap(mlp)(jax.vmap(norm)(x))
        return jax.vmap(head)(x)

    def loss(params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        network = eqx.combine(params, static)
        return _cross_entropy(jax.vmap(functools.partial(logits, network))(ids), labels)

    draw = _Random()
    hand = [
        ("0/weight", ROW),
        ("1/./0/(query|key|value)_proj/weight", ROW),
        ("1/./0/output_proj/weight", COLUMN),
        ("1/./2/layers/0/weight", ROW),
        ("1/./2/layers/0/bias", ROW),
        ("1/./2/layers/1/weight", COLUMN),
        ("2/(weight|bias)", ROW),
    ]
    batch = draw.ids(BATCH, LENGTH), draw.ids(BATCH, LENGTH)
    return Model("Equinox", loss, params, batch, hand)


# -- Other networks ------------------------------------------------------------------------------


def dense_chain() -> Model:
    """Eleven dense layers."""
    draw = _Random()
    params = [
        {
            "kernel": draw(*((WIDTH, HIDDEN) if i % 2 == 0 else (HIDDEN, WIDTH))),
            "bias": draw(HIDDEN if i % 2 == 0 else WIDTH),
        }
        for i in range(11)
    ]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = jnp.tanh(x @ p["kernel"] + p["bias"])
        return jnp.mean(x**2)

    even, odd = "(0|2|4|6|8|10)", "(1|3|5|7|9)"
    hand = [(f"{even}/kernel", COLUMN), (f"{even}/bias", ROW), (f"{odd}/kernel", ROW)]
    batch = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    return Model("11 dense layers", loss, params, (batch,), hand)


def resnet() -> Model:
    """Residual blocks of two convolutions with a scale between them, and a pool."""
    draw, channels = _Random(), 64
    block = lambda: {
        "first": draw(3, 3, channels, 2 * channels),
        "scale": draw(2 * channels),
        "second": draw(3, 3, 2 * channels, channels),
    }
    params = {
        "stem": draw(3, 3, 8, channels),
        "blocks": [block() for _ in range(LAYERS)],
        "head": draw(channels, 16),
    }
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = convolve(images, params["stem"])
        for p in params["blocks"]:
            h = jax.nn.relu(convolve(x, p["first"]) * p["scale"])
            x += convolve(h, p["second"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return _cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    hand = [
        ("blocks/./first", P(None, None, None, "model")),
        ("blocks/./scale", ROW),
        ("blocks/./second", P(None, None, "model")),
        ("head", COLUMN),
    ]
    images = jax.random.normal(jax.random.key(0), (BATCH, 16, 16, 8))
    return Model("ResNet", loss, params, (images, draw.ids(BATCH) % 16), hand)


def maml() -> Model:
    """The loss after a step of gradient descent inside the loss."""
    one = dense_chain()
    params = one.params[:4]

    def inner(params: Any, x: jax.Array) -> jax.Array:
        return one.loss(params, x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        gradients = jax.grad(inner)(params, x)
        return inner(jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), x)

    assert one.hand is not None
    return Model("MAML", loss, params, one.batch, [(r, s) for r, s in one.hand])


def lstm() -> Model:
    """An LSTM over a sequence."""
    draw = _Random()
    params = {
        "input": draw(WIDTH, 4, HIDDEN),
        "hidden": draw(HIDDEN, 4, HIDDEN),
        "output": draw(HIDDEN, WIDTH),
    }

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def step(carry: Any, x: jax.Array) -> Any:
            hidden, cell = carry
            gates = jnp.einsum("bd,dgf->gbf", x, params["input"])
            gates += jnp.einsum("bh,hgf->gbf", hidden, params["hidden"])
            i, f, g, o = gates
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden @ params["output"]

        zeros = jnp.zeros((BATCH, HIDDEN))
        _, outputs = jax.lax.scan(step, (zeros, zeros), x)
        return jnp.mean(outputs**2)

    x = jax.random.normal(jax.random.key(0), (16, BATCH, WIDTH))
    return Model("LSTM", loss, params, (x,))
