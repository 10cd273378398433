"""Random models of transformers, and what it makes of our exports of them.

It runs in a Python that has torch and transformers:

    python -m tests.huggingface.random_models make FAMILY FOLDER
    python -m tests.huggingface.random_models read FOLDER
    python -m tests.huggingface.random_models train FOLDER

`make` writes models of random settings to FOLDER/0, FOLDER/1, ..., each with what it computes, as
make_fixtures.py does. `read` loads each model in FOLDER without missing or unexpected tensors,
writes its logits of asked.safetensors to answered.safetensors, and the model again to theirs/.
`train` trains the model in FOLDER on asked.safetensors, `input_ids` [N, B, S], by a step of AdamW
per batch, and writes the losses [N] to answered.safetensors.
"""

import pathlib
import random
import sys

import torch
from safetensors.torch import load_file, save_file

from tests.huggingface.make_fixtures import YARN, build, write
from tests.huggingface.with_transformers import load

NUM_MODELS = 6
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
ORIGINAL = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
PLAIN_YARN = {"rope_type": "yarn", "beta_fast": 4.0, "beta_slow": 1.0, **ORIGINAL}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
ROPES = [DEFAULT, LINEAR, LLAMA3, PLAIN_YARN]
BOTH = [False, True]
MODEL = {
    "num_hidden_layers": [2, 3],
    "rms_norm_eps": [1e-5, 1e-6],
    "rope_parameters": ROPES,
    "tie_word_embeddings": BOTH,
}
GROUPED = {**MODEL, "num_key_value_heads": [1, 2, 4]}
SHARED = {
    "n_group": [1, 2],
    "n_shared_experts": [1, 2],
    "norm_topk_prob": BOTH,
    "routed_scaling_factor": [1.0, 2.5],
}
LATENT = {
    **MODEL,
    "q_lora_rank": [None, 8],
    "rope_parameters": [DEFAULT, LLAMA3, YARN, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}],
    "v_head_dim": [4, 6],
}
WINDOW, FULL = "sliding_attention", "full_attention"
WINDOWED = {"use_sliding_window": BOTH, "sliding_window": [3, 5]}
FACTORS = {
    "attention_bias": BOTH,
    "attention_multiplier": [0.4, 0.25, 0.1],
    "embedding_multiplier": [1.0, 3.0, 12],
    "logits_scaling": [1.0, 7.0, 8],
    "residual_multiplier": [1.0, 0.3],
}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 50.0}
HUNYUAN = {**GROUPED, "attention_bias": BOTH, "head_dim": [4, 6]}
HUNYUAN |= {"rope_parameters": [DEFAULT, STRETCHED, {**STRETCHED, "alpha": 1000.0}]}
LISTED = [None, ["sparse", "dense"], ["dense", "sparse"], ["sparse", "sparse"]]
DENSE = {"first_k_dense_replace": [0, 1, 2]}
SPARSE = {
    **LATENT,
    **SHARED,
    **DENSE,
    "index_head_dim": [4, 6, 8],
    "index_n_heads": [16, 20],
    "index_topk": [2, 3, 5],
    "q_lora_rank": [6, 8],
}


def partial(*factors):
    """Returns the rotary embeddings, each with a random one of these parts of a head."""
    return [{**rope, "partial_rotary_factor": part} for rope in ROPES for part in factors]


STATE = "linear_attention"
QWEN_NEXT = {
    **GROUPED,
    "head_dim": [8, 16],
    "layer_types": [[STATE, STATE, FULL], [STATE, FULL, STATE], [FULL, STATE, FULL]],
    "linear_conv_kernel_dim": [2, 4],
    "linear_key_head_dim": [4, 6],
    "linear_num_key_heads": [1, 2],
    "linear_num_value_heads": [2, 4],
    "num_hidden_layers": [3],
    "rms_norm_eps": [1e-2, 3e-3],
    "rope_parameters": partial(0.25, 0.5, 1.0),
}
# Settings of each family, with the values that they are drawn from.
CHOICES = {
    "llama3": {**GROUPED, "attention_bias": BOTH},
    "qwen3": {**GROUPED, "attention_bias": BOTH, "head_dim": [4, 8]},
    "mixtral": {**GROUPED, "head_dim": [4, 8]},  # transformers scales no positions without it.
    "olmoe": {**GROUPED, "clip_qkv": [None, 0.5], "norm_topk_prob": BOTH},
    "qwen2_moe": {**GROUPED, "norm_topk_prob": BOTH, "mlp_only_layers": [[], [0], [1]]},
    "qwen3_moe": {**GROUPED, "norm_topk_prob": BOTH, "mlp_only_layers": [[], [0], [1]]},
    "deepseek_v2": {**LATENT, **DENSE, "n_shared_experts": [1, 2]},
    "deepseek_v3": {**LATENT, **DENSE, **SHARED, "topk_group": [1]},
    "deepseek_v32": {**SPARSE, "topk_group": [1]},
    "glm_moe_dsa": {**SPARSE, "topk_group": [1]},
    "gpt_oss": {**GROUPED, "sliding_window": [3, 5]},
    "qwen3_next": {
        **QWEN_NEXT,
        "mlp_only_layers": [[], [0], [1]],
        "norm_topk_prob": BOTH,
        "intermediate_size": [24],
    },
    "qwen3_5_moe": {
        **QWEN_NEXT,
        "rope_parameters": [{**DEFAULT, "partial_rotary_factor": part} for part in (0.25, 0.5, 1)],
    },
    "qwen3_5_vl_moe": {
        **{name: values for name, values in QWEN_NEXT.items() if name != "tie_word_embeddings"},
        "rope_parameters": [
            {**DEFAULT, "partial_rotary_factor": part, "mrope_section": [1, 1, 1]}
            for part in (0.25, 0.5, 1)
        ],
    },
    "kimi_linear": {
        **SHARED,
        "layer_types": [[STATE, FULL, STATE], [FULL, STATE, FULL], [STATE, STATE, FULL]],
        "linear_conv_kernel_dim": [2, 4],
        "linear_head_dim": [4, 6],
        "linear_num_heads": [2, 4],
        "num_hidden_layers": [3],
        "q_lora_rank": [None, 8],
        "rms_norm_eps": [1e-2, 3e-3],
        "topk_group": [1],
        "v_head_dim": [4, 6],
    },
    "glm4_moe_lite": {
        **LATENT,
        **SHARED,
        "mlp_layer_types": LISTED,
        "num_hidden_layers": [2],
    },
    "glm4_moe": {
        **GROUPED,
        **SHARED,
        **DENSE,
        "attention_bias": BOTH,
        "rope_parameters": partial(0.25, 0.5, 1.0),
        "use_qk_norm": BOTH,
    },
    "solar_open": {**GROUPED, **SHARED, "attention_bias": BOTH},
    "dots1": {
        **GROUPED,
        **SHARED,
        **DENSE,
        "attention_bias": BOTH,
        "max_window_layers": [0, 1, 2],
        "sliding_window": [None, 3, 5],
    },
    "ernie4_5_moe": {
        **GROUPED,
        "moe_layer_end_index": [-1, 1],
        "moe_layer_interval": [1, 2],
        "moe_layer_start_index": [0, 1],
        "moe_num_shared_experts": [0, 1, 2],
    },
    "ernie4_5_vl_moe": {
        "mlp_layer_types": LISTED,
        "moe_num_shared_experts": [0, 1, 2],
        "num_key_value_heads": [1, 2, 4],
        "rms_norm_eps": [1e-5, 1e-6],
    },
    "qwen3_vl_moe": {
        **{name: values for name, values in GROUPED.items() if name != "tie_word_embeddings"},
        "attention_bias": BOTH,
        "mlp_only_layers": [[], [0], [1]],
    },
    "exaone_moe": {
        **GROUPED,
        **DENSE,
        **{name: values for name, values in SHARED.items() if name != "n_shared_experts"},
        "num_shared_experts": [1, 2],
        "sliding_window": [3, 5],
        "sliding_window_pattern": [2, 3],
    },
    "hy_v3": {
        **GROUPED,
        "attention_bias": BOTH,
        "mlp_layer_types": LISTED,
        "num_hidden_layers": [2],
        "num_shared_experts": [1, 2],
        "router_scaling_factor": [1.0, 2.5],
    },
    "mistral4": {
        **LATENT,
        **SHARED,
        **DENSE,
        "rope_parameters": [
            {**rope, "llama_4_scaling_beta": beta, "original_max_position_embeddings": 4}
            for rope in (LINEAR, LLAMA3, YARN, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
            for beta in (0.0, 0.1, 0.5)
        ],
    },
    "minimax_m2": {**GROUPED, "head_dim": [8, 16], "rotary_dim": [2, 4, 8]},
    "qwen2": {**GROUPED, **WINDOWED, "max_window_layers": [0, 1, 2], "head_dim": [4, 6]},
    "mistral": {**GROUPED, "sliding_window": [3, None], "head_dim": [4, 6]},
    "smollm3": {
        **GROUPED,
        **WINDOWED,
        "no_rope_layers": [[0, 1, 1], [1, 0, 1], [0, 0, 1], None],
        "no_rope_layer_interval": [2, 3],
    },
    "olmo2": {**GROUPED, "attention_bias": BOTH, "head_dim": [4, 6]},
    "olmo3": {
        **GROUPED,
        "attention_bias": BOTH,
        "num_hidden_layers": [3],
        "layer_types": [None, [FULL, WINDOW, FULL], [WINDOW, WINDOW, FULL], [FULL] * 3],
        "rope_parameters": [{FULL: x, WINDOW: y} for x in ROPES for y in (DEFAULT, LLAMA3)],
        "sliding_window": [3, 5],
    },
    "flex_olmo": {
        **GROUPED,
        "attention_bias": BOTH,
        "norm_topk_prob": BOTH,
        "num_experts": [4, 8],
    },
    "hunyuan_v1_dense": {**HUNYUAN},
    "hunyuan_v1_moe": {**HUNYUAN, "moe_topk": [2, 3, [2, 3]], "num_hidden_layers": [2]},
    "dbrx": {
        "n_layers": [1, 2, 3],
        "attn_config": [
            {"kv_n_heads": n, "clip_qkv": clip, "rope_theta": 1e4}
            for n in (1, 2, 4)
            for clip in (0.5, 1.5, 8)
        ],
        "ffn_config": [
            {
                "ffn_hidden_size": 8,
                "moe_num_experts": 4,
                "moe_top_k": k,
                "moe_normalize_expert_weights": power,
            }
            for k in (2, 3)
            for power in (None, 1.0)
        ],
        "rope_parameters": ROPES,
    },
    "granite": {**GROUPED, **FACTORS},
    "granitemoe": {**GROUPED, **FACTORS, "num_local_experts": [4, 8]},
    "granitemoehybrid": {
        **GROUPED,
        **FACTORS,
        "attention_bias": [False],  # Without positions that of keys has no gradient.
        "layer_types": [[STATE, FULL, STATE], [FULL, STATE, STATE], [STATE, STATE, FULL]],
        "mamba_conv_bias": BOTH,
        "mamba_d_conv": [2, 4],
        "mamba_d_state": [4, 6],
        "mamba_n_groups": [1, 2],
        "mamba_n_heads": [4, 8],
        "num_hidden_layers": [3],
        "num_local_experts": [0, 4, 8],
        "position_embedding_type": [None, "rope"],
        "shared_intermediate_size": [8, 12],
    },
    "nemotron_h": {
        "conv_kernel": [2, 4],
        "head_dim": [4, 6],
        "layer_norm_epsilon": [1e-2, 3e-3],
        "layers_block_type": [
            [STATE, "moe", FULL, "mlp"],
            [STATE, "moe", STATE, "moe", FULL],
            ["moe", FULL, STATE, "moe", STATE],
            ["mlp", STATE, "mlp", STATE],
        ],
        "mamba_head_dim": [4, 6],
        "mamba_num_heads": [4, 8],
        "moe_latent_size": [None, 12],
        "moe_shared_expert_intermediate_size": [8, 12],
        "n_group": [1, 2],
        "n_groups": [1, 2],
        "norm_topk_prob": BOTH,
        "num_key_value_heads": [1, 2, 4],
        "routed_scaling_factor": [1.0, 2.5],
        "ssm_state_size": [4, 6],
        "use_conv_bias": BOTH,
    },
    "granitemoeshared": {**GROUPED, **FACTORS, "shared_intermediate_size": [0, 12]},
}


def make(family, folder):
    """Writes the random models of a family."""
    for number in range(NUM_MODELS):
        draw = random.Random(f"{family} {number}")
        settings = {name: draw.choice(values) for name, values in CHOICES[family].items()}
        try:
            write(build(family, number, **settings), folder / str(number))
        except Exception as error:
            error.add_note(f"{family} with {settings}")
            raise


def read(folder):
    """Loads each model in a folder, and writes what it computes."""
    for model_folder in sorted(folder.iterdir()):
        model = load(model_folder)
        ids = load_file(model_folder / "asked.safetensors")["input_ids"].long()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        save_file({"logits": logits.contiguous()}, model_folder / "answered.safetensors")
        model.save_pretrained(model_folder / "theirs")


ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def train(folder):
    """Trains the model in a folder, and writes the loss of each step."""
    model, losses = load(folder), []
    vectors = [each for each in model.parameters() if each.ndim == 1]  # Norms and biases.
    others = [each for each in model.parameters() if each.ndim > 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    for ids in load_file(folder / "asked.safetensors")["input_ids"].long():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    save_file({"losses": torch.stack(losses)}, folder / "answered.safetensors")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "make":
        make(arguments[0], pathlib.Path(arguments[1]))
    else:
        {"read": read, "train": train}[command](pathlib.Path(arguments[0]))
