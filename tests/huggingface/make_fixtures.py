"""Makes the fixtures: tiny random models of transformers, with their outputs.

Run it in a Python that has torch and transformers; it writes a folder per family to fixtures/:

    python tests/huggingface/make_fixtures.py [FAMILY ...]

model.safetensors and config.json are as `save_pretrained` writes them; expected.safetensors holds

    input_ids, position_ids, segment_ids   [B, S]; two documents in the second row
    logits, loss, aux_loss                 of the batch, by the conventions of transformers
    choices.N                              [B, S, K] experts of each token in layer N, sorted
    grad.KEY                               of the loss, for each tensor of model.safetensors
"""

import copy
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

UNTRAINED = ("e_score_correction_bias", "expert_bias")  # Ends of their names.
HERE = pathlib.Path(__file__).parent / "fixtures"
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK = {
    **SHAPE,
    "max_position_embeddings": 640,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
# So many heads that no two scores are 0: of equal ones torch chooses any.
INDEXER = {"index_head_dim": 8, "index_n_heads": 16, "index_topk": 3}
GRANITE = {
    **SHAPE,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
GLM = {
    **SHAPE,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 4,
    "patch_size": 2,
    "spatial_merge_size": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
QWEN_NEXT = {
    **SHAPE,
    **EXPERTS,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 5,
    "rms_norm_eps": 1e-2,  # With less, norms of small outputs of heads magnify rounding.
    "shared_expert_intermediate_size": 12,
}
FAMILIES = {
    "llama3": (
        transformers.LlamaConfig,
        {
            **SHAPE,
            "intermediate_size": 24,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {**SHAPE, "intermediate_size": 24, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {**SHAPE, "intermediate_size": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmoe": (
        transformers.OlmoeConfig,
        {
            **SHAPE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 8,
            "clip_qkv": 0.5,
            "pad_token_id": None,  # Its embedding would get no gradient.
            "eos_token_id": None,
        },
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {
            **SHAPE,
            **EXPERTS,
            "num_hidden_layers": 3,
            "intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**SHAPE, **EXPERTS, "intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {**QWEN_NEXT, "intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, QWEN_NEXT),
    "kimi_linear": (
        transformers.KimiLinearConfig,
        {
            **{name: x for name, x in DEEPSEEK.items() if name != "n_routed_experts"},
            "num_local_experts": 8,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 0,  # transformers renames the tensors of dense layers.
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "rms_norm_eps": 1e-2,  # As above.
            "pad_token_id": None,  # Its embedding would get no gradient.
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        {
            **DEEPSEEK,
            "q_lora_rank": 8,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v2_lite": (
        transformers.DeepseekV2Config,
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            **DEEPSEEK,
            "q_lora_rank": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,  # transformers reads none.
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        {
            **DEEPSEEK,
            **INDEXER,
            "q_lora_rank": 8,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN,
        },
    ),
    "glm_moe_dsa": (
        transformers.GlmMoeDsaConfig,
        {**DEEPSEEK, **INDEXER, "q_lora_rank": 8, "num_hidden_layers": 2},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        {
            **SHAPE,
            "num_hidden_layers": 3,
            "intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "mistral": (
        transformers.MistralConfig,
        {**SHAPE, "intermediate_size": 24, "head_dim": 8, "sliding_window": 5},
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "no_rope_layer_interval": 2,
            "pad_token_id": None,
        },
    ),
    "olmo2": (
        transformers.Olmo2Config,
        {**SHAPE, "intermediate_size": 24, "pad_token_id": None, "eos_token_id": None},
    ),
    "olmo3": (
        transformers.Olmo3Config,
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": True,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "pad_token_id": None,
            "eos_token_id": None,
        },
    ),
    "flex_olmo": (
        transformers.FlexOlmoConfig,
        {
            **SHAPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 8,
            "pad_token_id": None,
            "eos_token_id": None,
        },
    ),
    "granite": (transformers.GraniteConfig, {**GRANITE, "intermediate_size": 24}),
    "granitemoe": (
        transformers.GraniteMoeConfig,
        {**GRANITE, "intermediate_size": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "granitemoeshared": (
        transformers.GraniteMoeSharedConfig,
        {
            **GRANITE,
            "intermediate_size": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 12,
        },
    ),
    "granitemoehybrid": (
        transformers.GraniteMoeHybridConfig,
        {
            **GRANITE,
            "intermediate_size": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_d_state": 6,
            "mamba_n_groups": 2,
            "mamba_n_heads": 4,
            "num_local_experts": 4,
            "shared_intermediate_size": 12,
        },
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        {
            **{name: x for name, x in SHAPE.items() if name != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "head_dim": 8,
            "intermediate_size": 12,
            "layer_norm_epsilon": 1e-2,  # As above.
            "mamba_head_dim": 6,
            "mamba_num_heads": 4,
            "moe_intermediate_size": 8,
            "moe_latent_size": 12,
            "moe_shared_expert_intermediate_size": 10,
            "n_group": 2,
            "n_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.5,
            "ssm_state_size": 6,
            "time_step_min": 1e-30,  # transformers raises smaller steps to it.
            "topk_group": 1,
        },
    ),
    "hunyuan_v1_dense": (
        transformers.HunYuanDenseV1Config,
        {
            **SHAPE,
            "intermediate_size": 24,
            "head_dim": 6,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "factor": 1.0,
                "alpha": 50.0,
            },
            "pad_token_id": None,
        },
    ),
    "hunyuan_v1_moe": (
        transformers.HunYuanMoEV1Config,
        {
            **SHAPE,
            "intermediate_size": 8,
            "head_dim": 8,
            "num_experts": 8,
            "moe_topk": [2, 3],
            "pad_token_id": None,
        },
    ),
    "dbrx": (
        transformers.DbrxConfig,
        {
            "d_model": 16,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "vocab_size": 40,
            # transformers reads the base from rope_parameters alone, and requires the other.
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 8, "moe_num_experts": 8, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        {
            **{name: x for name, x in DEEPSEEK.items() if name != "first_k_dense_replace"},
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "q_lora_rank": 8,
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            **GLM,
            "num_nextn_predict_layers": 0,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "solar_open": (transformers.SolarOpenConfig, {**GLM, "num_hidden_layers": 1}),
    "dots1": (
        transformers.Dots1Config,
        {
            **GLM,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        {
            **SHAPE,
            "head_dim": 8,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "pad_token_id": None,  # Its embedding would get no gradient.
        },
    ),
    "exaone_moe": (
        transformers.ExaoneMoeConfig,
        {
            **SHAPE,
            "head_dim": 8,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "pad_token_id": None,  # Its embedding would get no gradient.
        },
    ),
    "hy_v3": (
        transformers.HYV3Config,
        {
            **SHAPE,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeConfig,
        {
            "text_config": {
                **SHAPE,
                "head_dim": 8,
                "intermediate_size": 24,
                "moe_intermediate_size": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
            "vision_config": {
                **VISION,
                "deepstack_visual_indexes": [],
                "num_position_embeddings": 4,
                "out_hidden_size": 4,
            },
        },
    ),
    "qwen3_5_vl_moe": (
        transformers.Qwen3_5MoeConfig,
        {
            "text_config": {
                **QWEN_NEXT,
                "num_experts": 4,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 0],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {**VISION, "num_position_embeddings": 4, "out_hidden_size": 4},
        },
    ),
    "ernie4_5_vl_moe": (
        transformers.Ernie4_5_VLMoeConfig,
        {
            "text_config": {
                **SHAPE,
                "head_dim": 8,
                "intermediate_size": 24,
                "moe_intermediate_size": [8, 4],
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_num_shared_experts": 1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": VISION,
        },
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        {
            **SHAPE,
            "head_dim": 8,
            "intermediate_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 4,
        },
    ),
    "mistral4": (
        transformers.Mistral4Config,
        {
            **DEEPSEEK,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_hidden_layers": 2,
            "q_lora_rank": 8,
            "n_group": 2,
            "topk_group": 1,
            "pad_token_id": None,  # Its embedding would get no gradient.
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 3,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            **SHAPE,
            "head_dim": 8,
            "intermediate_size": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
        },
    ),
}


def model_class(config):
    """Returns the class of language models of a config; the automatic class lacks some."""
    known = transformers.AutoModelForCausalLM._model_mapping
    has_images = hasattr(config, "vision_config")
    if type(config) in known and not has_images:
        return known[type(config)]
    name = type(config).__name__.removesuffix("Config")
    kinds = ("ForConditionalGeneration",) if has_images else ("ForCausalLM",)
    return next(
        getattr(transformers, name + kind) for kind in kinds if hasattr(transformers, name + kind)
    )


def build(family, seed=0, **changes):
    """Returns the model in float32, with random weights large enough to matter."""
    config_class, settings = FAMILIES[family]
    settings = copy.deepcopy(settings)  # transformers adds to what it is given.
    text = settings.get("text_config", settings)
    text |= copy.deepcopy(changes)
    torch.manual_seed(seed)
    config = config_class(**settings, attn_implementation="eager")
    model = model_class(config)._from_config(config).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if "norm" in name and tensor.ndim == 1:  # DBRX has attention in a "norm_attn_norm".
                start = float(tensor[0])  # 1, or 0 in a zero-centered norm.
                tensor.uniform_(start - 0.5, start + 0.5)
            elif "bias" in name or "sinks" in name:
                tensor.uniform_(-0.5, 0.5)
            else:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    return model


def batch():
    """Returns (ids, positions, segments): a whole row, and one of two documents."""
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 12), generator=torch.manual_seed(1))
    positions = torch.arange(12).repeat(2, 1)
    positions[1, 7:] -= 7
    segments = torch.ones(2, 12, dtype=torch.int64)
    segments[1, 7:] = 2
    return ids, positions, segments


class Choices:
    """Collects which experts the tokens went to, layer by layer."""

    def __init__(self, model):
        self.of_layer = {}
        base = getattr(model.base_model, "language_model", model.base_model)
        for number, layer in enumerate(base.blocks if hasattr(base, "blocks") else base.layers):
            for name, module in layer.named_modules():
                if name.rpartition(".")[2] == "experts" and "vision" not in name:
                    module.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def _hook(self, number):
        def hook(module, args, kwargs):
            ids = [
                a
                for a in [*args, *kwargs.values()]
                if torch.is_tensor(a) and not a.is_floating_point()
            ]
            assert len(ids) == 1, f"experts of layer {number} get {len(ids)} arrays of ids"
            self.of_layer.setdefault(number, []).append(ids[0].detach())

        return hook


def masks(segments, window):
    """Returns the masks of GPT-OSS's two kinds of layers, 0 or -inf [B, 1, S, S]."""
    size = segments.shape[1]
    ago = torch.arange(size)[:, None] - torch.arange(size)
    full = (segments[:, None, :, None] == segments[:, None, None, :]) & (ago >= 0)
    kinds = {"full_attention": full, "sliding_attention": full & (ago < window)}
    return {
        name: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) for name, seen in kinds.items()
    }


def documents(model, segments):
    """Returns (rows, tokens) of what is computed at once: a document if states go on after it."""
    every = slice(None)
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if "linear_attention" not in (kinds or []):
        return [(every, every)]
    (cut,) = (segments[1].diff().nonzero() + 1).flatten().tolist()
    second = slice(1, 2)
    return [(slice(0, 1), every), (second, slice(0, cut)), (second, slice(cut, None))]


def expected(model):
    """Returns what the model computes, by name."""
    ids, positions, segments = batch()
    labels = ids.clone()
    labels[1, 7] = -100  # The first token of a document is not predicted.
    choices = Choices(model)
    inputs = {"input_ids": ids, "position_ids": positions}
    if hasattr(model.config, "vision_config"):  # Of text, for the mask, and of three axes.
        inputs["position_ids"] = positions.expand(4, -1, -1)
    if model.config.model_type == "gpt_oss":  # It does not tell documents by their positions.
        inputs["attention_mask"] = masks(segments, model.config.sliding_window)
    parts = [
        {n: x[..., *part] if torch.is_tensor(x) else x for n, x in inputs.items()}
        | {"use_cache": False}
        for part in documents(model, segments)
    ]
    logits = torch.cat([model(**part).logits.flatten(0, 1) for part in parts])
    logits = logits.reshape(*ids.shape, -1)
    loss = model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    made = {
        "input_ids": ids,
        "position_ids": positions,
        "segment_ids": segments,
        "labels": labels,
        "logits": logits,
        "loss": loss,
    }
    for number, of_layer in choices.of_layer.items():
        made[f"choices.{number}"] = torch.cat(of_layer).reshape(*ids.shape, -1).sort(-1).values
    module = sys.modules[type(model).__module__]
    has_aux_loss = hasattr(module, "load_balancing_loss_func") and hasattr(model, "num_experts")
    if has_aux_loss and choices.of_layer:
        routed = [model.base_model(**part, output_router_logits=True) for part in parts]
        router_logits = zip(*(each.router_logits for each in routed), strict=True)
        made["aux_loss"] = module.load_balancing_loss_func(
            tuple(map(torch.cat, router_logits)), model.num_experts, model.num_experts_per_tok
        )
    model.zero_grad()
    loss.backward()
    return {name: value.detach().contiguous() for name, value in made.items()}


def gradients(model, folder):
    """Returns the gradient of each tensor that `save_pretrained` writes."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad if p.grad is not None else torch.zeros_like(p))
    model.save_pretrained(folder)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return load_file(pathlib.Path(folder) / "model.safetensors")


def write(model, folder):
    """Writes a model and what it computes to a folder; returns its loss."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    made = expected(model)
    with tempfile.TemporaryDirectory() as temporary:
        grads = gradients(model, temporary)
    made |= {f"grad.{key}": x for key, x in grads.items() if not key.endswith(UNTRAINED)}
    save_file(made, folder / "expected.safetensors")
    return float(made["loss"])


def make(family):
    """Writes the fixture of a family."""
    folder = HERE / family
    shutil.rmtree(folder, ignore_errors=True)
    loss = write(build(family), folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{family}: {size:,} bytes, loss {loss:.4f}")


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        make(name)
