"""Generation: greedy and drawn tokens, their ends, independence of the batch; meshes; texts."""

import contextlib
import itertools
import re
import types

import jax
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.inference import decode
from moelib.inference.generate import Completion, PromptError, Settings, generate, generate_tokens
from moelib.inference.rollout import rollouts
from moelib.inference.unstack import unstacked
from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.quantization import Quantization
from moelib.layers.transformer import LoopStack
from moelib.parallel import sharding
from tests import tiny
from tests.inference.models import (
    DECODERS,
    compiled_whole_logits,
    decoder,
    layer,
    model_of,
    with_parameters,
)

PROMPTS = [[3], [5, 1, 30, 2, 7, 7], [31, 0, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
NEW = 9  # More than twice round the ring of a window of three.
# No token is 99: texts with and without a stop token share their programs.
GREEDY = {"max_new_tokens": NEW, "temperature": 0.0, "stop_ids": [99]}
DRAWN = {"max_new_tokens": NEW, "temperature": 1.5, "top_p": 0.9, "stop_ids": [99]}


@pytest.fixture(scope="module")
def model():
    """Returns a model with a window in one of its layers."""
    return with_parameters(tiny.model_config(decoder(layer(window=3), layer(), kind=LoopStack)))


def one(model, prompt, **settings):
    """Returns the tokens that follow a prompt."""
    return many(model, [prompt], **settings)[0]


def many(
    model, prompts=PROMPTS, *, mask=None, seeds=None, batch_size=None, on_token=None, **settings
):
    """Returns the tokens that follow prompts."""
    how = {"mask": mask, "seeds": seeds, "batch_size": batch_size, "on_token": on_token}
    return list(generate_tokens(model[0], model[1], prompts, Settings(**settings), **how))


@pytest.fixture(scope="module")
def drawn(model):
    """Returns texts that follow the prompts, drawn with seed 4."""
    return many(model, **DRAWN, seed=4)


def assert_likeliest(model, prompts, texts):
    """Asserts that each token is the likeliest after those before it, computed all at once."""
    rows = np.zeros((len(prompts), 32), np.int32)
    for row, prompt, text in zip(rows, prompts, texts, strict=True):
        row[: len(prompt) + len(text)] = [*prompt, *text]
    best = np.argmax(compiled_whole_logits(*model, rows), axis=-1)
    for row, prompt, text in zip(best, prompts, texts, strict=True):
        assert row[len(prompt) - 1 :][: len(text)].tolist() == text


def test_greedy_texts_are_the_most_likely_tokens_while_caches_grow(monkeypatch):
    monkeypatch.setattr(decode, "MIN_CACHE", 8)  # From 16 to 32.
    moe = tiny.moe(dispatcher=DenseDispatcher.default_config())
    stack = decoder(layer(moe, window=3), first_layers=[layer(sinks=True)])
    model = with_parameters(tiny.model_config(stack))
    texts = many(model, max_new_tokens=20, temperature=0.0)
    assert [len(text) for text in texts] == [20] * 4
    assert_likeliest(model, PROMPTS, texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_every_kind_of_cache_gives_greedy_texts_in_any_batch_and_order(name):
    model = model_of(name)
    greedy = {"max_new_tokens": 20, "temperature": 0.0}
    texts = many(model, **greedy)
    assert_likeliest(model, PROMPTS, texts)
    assert many(model, PROMPTS[::-1], **greedy, batch_size=3)[::-1] == texts
    assert [one(model, prompt, **greedy) for prompt in PROMPTS[:2]] == texts[:2]


def test_one_text_is_the_same_alone_and_in_a_batch(model, drawn):
    assert one(model, PROMPTS[0], **DRAWN, seed=4) == drawn[0]
    assert one(model, PROMPTS[0], **DRAWN, seed=5) != drawn[0]


@pytest.mark.slow
# Of one text, the programs are those of the test above.
def test_a_model_with_weights_in_8_bits_gives_greedy_texts():
    quantized = model_of("scan", quantization=Quantization.FP8_BLOCK)
    prompt, text = PROMPTS[1], one(quantized, PROMPTS[1], max_new_tokens=3, temperature=0.0)
    assert_likeliest(quantized, [prompt], [text])


@pytest.mark.parametrize("batch_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_drawn_texts_do_not_depend_on_the_batch(model, drawn, batch_size):
    assert many(model, **DRAWN, seed=4, batch_size=batch_size) == drawn


def test_drawn_texts_with_a_seed_each_do_not_depend_on_the_order(model):
    seeds = [10, 11, 12, 13]
    texts = many(model, **DRAWN, seeds=seeds)
    backwards = many(model, PROMPTS[::-1], **DRAWN, seeds=seeds[::-1])
    assert backwards[::-1] == texts
    assert one(model, PROMPTS[2], **DRAWN, seed=12) == texts[2]
    same = many(model, PROMPTS[3:] * 4, **DRAWN, seed=0)
    assert len(set(map(tuple, same))) == 4  # Of one prompt, four texts.


@pytest.mark.parametrize("left", [True, False])
def test_padding_of_prompts_changes_nothing(model, drawn, left):
    ids, mask = np.full((4, 9), 31), np.zeros((4, 9), bool)
    for i, prompt in enumerate(PROMPTS):
        span = slice(9 - len(prompt), 9) if left else slice(len(prompt))
        ids[i, span], mask[i, span] = prompt, True
    assert many(model, ids, mask=mask, **DRAWN, seed=4) == drawn


def test_texts_end_before_a_stop_token_and_others_go_on(model, drawn):
    stop = drawn[1][3]
    want = [list(itertools.takewhile(lambda token: token != stop, text)) for text in drawn]
    assert len({len(text) for text in want}) > 1
    assert many(model, **DRAWN | {"stop_ids": [stop]}, seed=4) == want


def test_texts_end_where_the_caller_ends_them(model, drawn):
    ends = lambda tokens: sum(tokens) > 60
    read = [[] for _ in PROMPTS]

    def on_token(index, token):
        read[index].append(token)
        return ends(read[index])

    want = [
        next((text[:n] for n in range(1, NEW) if ends(text[:n])), text)
        for text in drawn  # The token with which it ends is part of the text.
    ]
    assert want != drawn
    assert many(model, **DRAWN, seed=4, on_token=on_token) == want == read


def test_max_length_counts_the_prompt(model, drawn):
    texts = many(model, **DRAWN, seed=4, max_length=12)
    assert texts == [text[: 12 - len(ids)] for ids, text in zip(PROMPTS, drawn, strict=True)]


def test_a_large_penalty_prevents_repetition(model):
    settings = {"max_new_tokens": NEW, "temperature": 0.0, "repetition_penalty": 1e9}
    shifted = model[0], model[1] | {"lm_head": {"weight": abs(model[1]["lm_head"]["weight"])}}
    for prompt, text in zip(PROMPTS, many(shifted, **settings), strict=True):
        assert len({*prompt, *text}) == len(set(prompt)) + NEW


@pytest.mark.parametrize("settings", [GREEDY, DRAWN | {"temperature": 5.0}])
def test_tokens_beyond_the_tokenizers_vocabulary_are_never_drawn(model, settings):
    prompts = PROMPTS[3:] * 4
    free = many(model, prompts, **settings)
    size = max(map(max, free))
    assert max(map(max, many(model, prompts, **settings, vocab_size=size))) < size
    assert free == many(model, prompts, **settings, vocab_size=32)


def test_tokens_are_shown_as_they_come(model, capsys):
    model, params = model
    first, second = PROMPTS[:2]
    # --8<-- [start:tokens]
    model, params = unstacked(model, params)
    settings = Settings(max_new_tokens=8, temperature=0.0)

    def show(index, token):
        print(token, end=" ", flush=True)
        return False  # Whether the text ends with this token.

    texts = list(generate_tokens(model, params, [first, second], settings, on_token=show))
    # --8<-- [end:tokens]
    assert len(capsys.readouterr().out.split()) == 16
    assert [len(text) for text in texts] == [8, 8]


@pytest.mark.parametrize(
    "moe",
    [pytest.param(False, id="dense"), pytest.param(True, id="experts", marks=pytest.mark.slow)],
)
def test_a_mesh_gives_the_texts_of_one_device(moe):
    block = layer(tiny.moe() if moe else None, num_kv_heads=2, window=3)
    model, params = with_parameters(tiny.model_config(decoder(block, kind=LoopStack)))
    prompts = PROMPTS[:3]  # A number that the mesh does not divide.
    want = many((model, params), prompts, **DRAWN, seed=4)
    mesh = tiny.mesh(expert=2, fsdp=2, model=2)
    shardings = sharding.named_shardings(model.create_parameter_specs_recursively(), mesh)
    with jax.set_mesh(mesh):
        assert many((model, jax.device_put(params, shardings)), prompts, **DRAWN, seed=4) == want


def test_answers_on_a_mesh_are_those_of_one_device_and_whole_on_each(monkeypatch):
    block = layer(tiny.moe(), num_kv_heads=2)
    model, params = with_parameters(tiny.model_config(decoder(block, kind=LoopStack)))
    options = {"stop_ids": [99], "max_new_tokens": 3, "seeds": range(4), "with_experts": True}
    want = rollouts(model, params, PROMPTS, **options)
    seen, read = [], np.asarray

    def asarray(x, *args, **kwargs):
        if isinstance(x, jax.Array):  # Of several processes, each reads its own devices alone.
            seen.append(x.is_fully_replicated)
        return read(x, *args, **kwargs)

    mesh = tiny.mesh(expert=2, fsdp=2, model=2)
    shardings = sharding.named_shardings(model.create_parameter_specs_recursively(), mesh)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, shardings)
        monkeypatch.setattr(decode.np, "asarray", asarray)
        found = rollouts(model, params, PROMPTS, **options)
    assert seen
    assert all(seen)
    for a, b in zip(found, want, strict=True):
        assert a.ids == b.ids
        np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=1e-5)
        np.testing.assert_array_equal(a.expert_ids, b.expert_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "shortest"),
    [("latent", {"seq": 2, "model": 2}, 16), ("latent", {"seq": 8}, 2), ("plain", {"model": 4}, 2)],
)
def test_a_mesh_that_splits_sequences_gives_the_texts_of_one_device(
    name, axes, shortest, monkeypatch
):
    monkeypatch.setattr(decode, "_MIN_PROMPT", shortest)
    model, params = model_of(name)
    greedy = {"max_new_tokens": 4, "temperature": 0.0}
    want = many((model, params), PROMPTS[:1], **greedy)
    mesh = tiny.mesh(**axes)
    shardings = sharding.named_shardings(model.create_parameter_specs_recursively(), mesh)
    with jax.set_mesh(mesh):
        assert many((model, jax.device_put(params, shardings)), PROMPTS[:1], **greedy) == want


@pytest.mark.parametrize(
    ("axes", "want"), [({"model": 3}, 18), ({"seq": 2, "model": 3}, 24), ({"seq": 3}, 18)]
)
def test_prompts_are_padded_to_what_the_mesh_divides(axes, want):
    with jax.set_mesh(tiny.mesh(**axes)):
        assert decode.padded([decode.Prompt([1], 1, 0)], 1, 1)[0].shape == (1, want)


def test_unstacked_parameters_stay_sharded():
    model, params = model_of("scan")
    mesh = tiny.mesh(fsdp=4, model=2)
    shardings = sharding.named_shardings(model.create_parameter_specs_recursively(), mesh)
    with jax.set_mesh(mesh):
        loops, apart = unstacked(model, jax.device_put(params, shardings))
    shardings = sharding.named_shardings(loops.create_parameter_specs_recursively(), mesh)
    for name in ("self_attention/kv", "feed_forward/down"):
        want, got = (tree.by_path(x)[f"decoder/layer4/{name}"] for x in (shardings, apart))
        assert got.sharding.is_equivalent_to(want, got.ndim)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "Prompt 1"),
        ([[3, 32]], {}, "Prompt 0 has id 32.*32"),
        ([[3, -1]], {}, "Prompt 0 has id -1"),
        ([[4]], {"vocab_size": 4}, "Prompt 0 has id 4.*4"),
        ([[4]], {"vocab_size": 33}, r"vocab_size=33.*vocab_size=32"),
        ([[1], [1] * 8], {"max_length": 8}, r"Prompt 1 has 8 tokens.*max_length=8"),
        ([[1]], {"batch_size": 0}, "batch_size is 0"),
        ([[1], [2]], {"seeds": [0]}, r"1 numbers.*2 prompts"),
        ([[1]], {"seeds": [0, 1]}, r"2 numbers.*1 prompts"),
        ([[1]], {"seeds": [1.5]}, r"seeds is \[1\.5\]"),
        ([[1], [1.9, 2]], {}, r"Prompt 1 is \[1\.9, 2\]"),
    ],
)
def test_invalid_prompts_are_refused(model, prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        many(model, prompts, **{"max_new_tokens": 1, **settings})


def test_the_batch_is_not_larger_than_the_number_of_prompts(model, monkeypatch):
    seen = []

    def ended_at_once(*arguments, batch_size):
        del arguments
        seen.append(batch_size)
        yield decode.Drawn(np.array([decode.NO_TOKEN] * batch_size))

    monkeypatch.setattr("moelib.inference.generate.decode", ended_at_once)
    assert many(model, **DRAWN, batch_size=100) == [[]] * 4
    assert many(model, PROMPTS[:3], **DRAWN, batch_size=2) == [[]] * 3
    assert many(model, [], **DRAWN, batch_size=2) == []
    assert seen == [4, 2, 2]


def test_an_invalid_prompt_is_refused_before_anything_is_computed(model):
    with pytest.raises(PromptError, match="Prompt 1") as raised:
        generate_tokens(model[0], model[1], [[1], []], Settings())
    assert raised.value.index == 1


@pytest.mark.parametrize("settings", [GREEDY, DRAWN])
def test_logits_that_are_not_finite_are_an_error(model, settings):
    broken = model[0], model[1] | {"lm_head": {"weight": model[1]["lm_head"]["weight"] * np.nan}}
    with pytest.raises(ValueError, match="token 1"):
        many(broken, **settings)


def test_one_logit_of_many_that_is_nan_is_an_error():
    cfg = tiny.model_config(decoder(layer(), kind=LoopStack)).set(vocab_size=1024)
    model, params = with_parameters(cfg)
    weight = params["lm_head"]["weight"].at[:, 700].set(np.nan)
    with pytest.raises(ValueError, match="token 1"):
        many((model, params | {"lm_head": {"weight": weight}}), **GREEDY)


def test_an_error_comes_after_the_tokens_before_it(model):
    first = [text[0] for text in many(model, **GREEDY)]
    unread = next(token for token in first if not any(token in prompt for prompt in PROMPTS))
    weight = model[1]["embedding"]["weight"].at[unread].set(np.inf)
    broken, shown = (model[0], model[1] | {"embedding": {"weight": weight}}), []
    with pytest.raises(ValueError, match="token 2"):
        many(broken, **GREEDY, on_token=lambda _, token: shown.append(token))
    assert shown == first


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1 << 31),
        ("max_length", 1),
        ("max_length", 1 << 31),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", 1e38),  # Its reciprocal is 0 in the float32 of XLA:CPU.
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1e-44),  # 0 in the float32 of XLA:CPU.
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 1e39),
        # Of other types.
        ("max_new_tokens", 2.5),
        ("max_new_tokens", None),
        ("temperature", "0.8"),
        ("top_k", 2.5),
        ("top_p", None),
        ("repetition_penalty", None),
        ("seed", 1.5),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field}.*{re.escape(str(value))}"):
        Settings(**{"max_new_tokens": 1, field: value})


def test_a_top_k_beyond_every_vocabulary_keeps_all():
    assert Settings(max_new_tokens=1, top_k=1 << 40).sampling().top_k == 2**31 - 1


def test_a_temperature_near_0_divides_by_a_millionth():
    assert Settings(temperature=1e-46).sampling().temperature == np.float32(1e-6)


def test_few_programs_are_compiled(model):
    """Prompts of many lengths and many settings share their programs."""
    sizes = lambda: (decode.begin._cache_size(), decode.advance._cache_size())
    many(model, **DRAWN)
    before = sizes()
    for i in range(1, 4):
        prompts = [[1] * i, [2] * 2 * i, [3], [4] * 9]
        many(model, prompts, **DRAWN | {"temperature": 0.5 + i, "top_p": 0.2 * i}, seed=i)
    assert sizes() == before


# -- Texts ---------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of 32 characters."""

    vocab_size = 32

    def encode_prompts(self, texts):
        return [[ord(letter) - 64 for letter in text] for text in texts]

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)


@pytest.fixture
def loaded(model):
    """Returns what `load_model` returns, as far as generation reads it."""
    return types.SimpleNamespace(
        model=model[0],
        parameters=model[1],
        tokenizer=Letters(),
        stop_ids=(99,),
        max_length=24,
        on_mesh=contextlib.nullcontext,
    )


def test_texts_are_those_of_the_tokens(loaded, model):
    prompts = ["C", "EA^BGG", "_@D", "ABCDEFGHI"]
    assert Letters().encode_prompts(prompts) == PROMPTS
    settings = {"max_new_tokens": NEW, "temperature": 1.5, "top_p": 0.9, "seed": 4}
    tokens = many(model, **DRAWN, seed=4, vocab_size=32)
    want = [Completion(Letters().decode(ids), ids) for ids in tokens]
    assert list(generate(loaded, prompts, **settings)) == want
    shown = [""] * 4

    def show(index, piece):
        shown[index] += piece

    stop = want[1].text[3:5]
    cut = list(generate(loaded, prompts, **settings, stop=[stop], on_text=show))
    assert [completion.text for completion in cut] == shown
    assert shown == [completion.text.split(stop)[0] for completion in want]
    assert cut[1].tokens == want[1].tokens[: want[1].text.index(stop) + 2]


def test_stop_strings_do_not_decode_a_whole_text_at_every_token(loaded, monkeypatch):
    monkeypatch.setattr("moelib.inference.text._CONTEXT", 1)
    monkeypatch.setattr("moelib.inference.text._WINDOW", 2)
    sizes, decode_ids = [], loaded.tokenizer.decode
    loaded.tokenizer.decode = lambda ids: sizes.append(len(ids)) or decode_ids(ids)
    settings = {"max_new_tokens": NEW, "temperature": 1.5, "top_p": 0.9, "seed": 4}
    (completion,) = generate(loaded, ["ABCDEFGHI"], **settings, stop=["~"])
    assert len(completion.tokens) == NEW
    # The prompt at the first token and at the end, and once prompt and text.
    assert sorted(sizes)[-3:] == [9, 9, 9 + NEW]
    assert sorted(sizes)[-4] <= 3


def test_the_length_of_a_text_is_limited_by_that_of_training(loaded):
    loaded.max_length = 8
    assert len(next(generate(loaded, ["ABC"])).tokens) == 5
    assert len(next(generate(loaded, ["ABC"], max_length=12)).tokens) == 9
    with pytest.raises(PromptError, match="max_length=8"):
        generate(loaded, ["ABCDEFGH"])


def test_an_empty_stop_string_is_refused(loaded):
    with pytest.raises(ValueError, match=r"^stop .*--stop"):
        generate(loaded, ["A"], stop=["a", ""])


@pytest.mark.parametrize("arguments", [{"prompts": "abc"}, {"prompts": ["a"], "stop": "abc"}])
def test_single_string_is_not_a_list_of_characters(arguments):
    with pytest.raises(UserError, match=r"'abc'.*\['abc'\]"):
        generate(None, **arguments)


def test_arguments_of_other_types_are_refused(loaded):
    with pytest.raises(UserError, match=r"'runs/t'.*load_model"):
        generate("runs/t", ["a"])
    with pytest.raises(PromptError, match=r"Prompt 1.*None"):
        generate(loaded, ["a", None])


def test_an_unknown_setting_names_the_nearest(loaded):
    with pytest.raises(
        UserError, match=r"generate has no argument 'max_tokens'; .*'max_new_tokens'"
    ):
        generate(loaded, ["a"], max_tokens=3)
