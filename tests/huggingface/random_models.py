"""Runs in a Python that has torch and transformers: random models, as make_fixtures.py makes them.

    python -m tests.huggingface.random_models make OUT FAMILY COUNT
    python -m tests.huggingface.random_models check OUT

`make` writes COUNT models of a family, with other settings each, to OUT/0, OUT/1, ...;
expected.safetensors also has their greedy text, `generated` [B, S + 16]. `check` loads the exports
of these models, OUT/0/export and so on, and compares their logits with those of the models.
"""

import pathlib
import random
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.huggingface import make_fixtures

LINEAR = {"rope_type": "linear", "rope_theta": 3000.0, "factor": 3.0}
LLAMA3 = make_fixtures.FAMILIES["llama3"][1]["rope_parameters"]
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16, "attention_factor": 1.2}
DEFAULT = {"rope_type": "default", "rope_theta": 700.0}
EVERY = {  # Settings of all families, and their values.
    "num_hidden_layers": [1, 2, 3, 5],
    "num_key_value_heads": [1, 2, 4],
    "tie_word_embeddings": [True, False],
    "rope_parameters": [DEFAULT, LINEAR, LLAMA3, YARN],
}
BIAS = {"attention_bias": [True, False]}
EXPERTS = {"num_experts": [4, 8], "num_experts_per_tok": [1, 2, 4]}
LOCAL_EXPERTS = {"num_local_experts": [4, 8], "num_experts_per_tok": [1, 2, 4]}
FACTORS = {
    "embedding_multiplier": [1.0, 3.0, 12],
    "attention_multiplier": [0.5, 0.25, 0.1],
    "residual_multiplier": [1.0, 0.3],
    "logits_scaling": [1.0, 7.0, 8],
}
WINDOWED = {"use_sliding_window": [True, True, False], "sliding_window": [3, 5]}


def mixed(a, b):
    """Returns a function from the number of layers to a list of two values, alternately."""
    return lambda total: [(a, b)[n % 2] for n in range(total)]


# Further settings of each family.
FURTHER = {
    "qwen2": {**WINDOWED, "max_window_layers": [0, 1, 2], "head_dim": [6]},
    "mistral": {"sliding_window": [3, None], "head_dim": [4, 6, None]},
    "smollm3": {
        **WINDOWED,
        "no_rope_layer_interval": [2, 3],
        "no_rope_layers": [None, mixed(0, 1), mixed(1, 0)],
    },
    "olmo2": {**BIAS, "head_dim": [4, 6]},
    "olmo3": {
        **BIAS,
        "sliding_window": [3, 5],
        "layer_types": [
            None,
            mixed("full_attention", "sliding_attention"),
            mixed("full_attention", "full_attention"),
        ],
        "rope_parameters": [
            {"full_attention": full, "sliding_attention": sliding}
            for full in (DEFAULT, LINEAR, YARN)
            for sliding in (DEFAULT, LLAMA3)
        ],
    },
    "flex_olmo": {**BIAS, **EXPERTS, "norm_topk_prob": [True, False]},
    "granite": {**BIAS, **FACTORS},
    "granitemoe": {**BIAS, **FACTORS, **LOCAL_EXPERTS},
    "granitemoeshared": {**BIAS, **FACTORS, **LOCAL_EXPERTS, "shared_intermediate_size": [0, 12]},
}


def drawn(family, number):
    """Returns the settings of one model."""
    draw = random.Random(f"{family} {number}").choice
    found = {name: draw(values) for name, values in {**EVERY, **FURTHER[family]}.items()}
    total = found["num_hidden_layers"]
    return {name: x(total) if callable(x) else x for name, x in found.items()}


def generated(model, ids):
    """Returns the ids and 16 more, greedily."""
    mask = torch.ones_like(ids)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, attention_mask=mask, max_new_tokens=16, **options)


def make(out, family, count):
    """Writes the models of a family."""
    for number in range(count):
        settings, folder = drawn(family, number), out / str(number)
        print(settings)
        model = make_fixtures.make(family, folder, **settings).eval()
        expected = load_file(folder / "expected.safetensors")
        expected["generated"] = generated(model, expected["input_ids"]).contiguous()
        save_file(expected, folder / "expected.safetensors")


def check(out):
    """Checks that transformers computes the same with our exports, and writes what it loaded."""
    for exported in sorted(out.glob("*/export*")):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            exported, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
        )
        wrong = {name: keys for name, keys in info.items() if keys}
        assert not wrong, wrong  # Else transformers warns, and draws what is missing.
        expected = load_file(exported.parent / "expected.safetensors")
        with torch.no_grad():
            logits = model(input_ids=expected["input_ids"][:1], use_cache=False).logits
        torch.testing.assert_close(logits, expected["logits"][:1], rtol=0, atol=2e-5)
        model.save_pretrained(exported / "theirs")


if __name__ == "__main__":
    what, place, *more = sys.argv[1:]
    if what == "make":
        make(pathlib.Path(place), more[0], int(more[1]))
    else:
        check(pathlib.Path(place))
