"""Runs in a Python that has torch and transformers: what they make of a folder that we wrote.

    python with_transformers.py FOLDER OUT [ADAPTER]

FOLDER holds a model and asked.safetensors, `input_ids` [B, S]. OUT becomes a safetensors file of
`logits` [B, S, V] and `generated` [B, S + 16], greedily. ADAPTER is a folder that PEFT applies;
without one, FOLDER/theirs becomes the model as transformers writes it.
"""

import pathlib
import sys
import warnings

import torch
import transformers
from safetensors.torch import load_file, save_file


def load(folder):
    """Returns the model of a folder; fails if tensors are missing or unexpected."""
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model, info = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    wrong = {name: keys for name, keys in info.items() if keys}
    assert not wrong, wrong  # Else transformers warns, and draws what is missing.
    return model


if __name__ == "__main__":
    folder, out, *adapter = map(pathlib.Path, sys.argv[1:])
    model = load(folder)
    name = type(model).__name__
    if adapter:
        import peft

        warnings.simplefilter("error", UserWarning)  # PEFT warns of tensors that are missing.
        # It looks for these among modules only, and finds those of parameters afterwards.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        model = peft.PeftModel.from_pretrained(model, adapter[0])
    else:
        model.save_pretrained(folder / "theirs")
    ids = load_file(folder / "asked.safetensors")["input_ids"].long()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # Else it guesses one from the padding token.
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    save_file({"logits": logits.contiguous(), "generated": generated.contiguous()}, out)
    print(name)
