"""A small model of Hugging Face to fine-tune."""

import jax

from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.huggingface.families import read_model
from moelib.huggingface.pretrained import save_pretrained

MODEL = {"model_type": "mixtral", "vocab_size": 264, "hidden_size": 16, "intermediate_size": 24}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"num_local_experts": 4, "num_experts_per_tok": 2}


def save_base(folder, seed=0):
    """Writes the model with random weights; returns its tokenizer, of bytes."""
    tokenizer = ByteTokenizer.default_config().instantiate()
    cfg = read_model(MODEL, "MODEL")[1]
    params = jax.jit(cfg.instantiate(parent=None).initialize_parameters_recursively)(
        jax.random.key(seed)
    )
    save_pretrained(str(folder), cfg, params, tokenizer=tokenizer)
    return tokenizer
