"""A run of a small language model on a token store, and a small Hugging Face model."""

import json

from moelib.data.batches.lm_input import LMInput
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from moelib.huggingface.pretrained import save_pretrained
from tests import tiny

TEXTS = [f"document number {i} of many" for i in range(60)]
END = "<end>"  # The end of text of the store's tokenizer.


def make_store(folder):
    """Makes a token store of 280 tokens, and returns its config."""
    file = folder.parent / f"{folder.name}.tokenizer.json"
    train_bpe(TEXTS, 280, str(file))
    file.write_text(file.read_text().replace(END_OF_TEXT, END))
    tokenizer = Tokenizer.default_config().set(path=str(file), eos_token=END).instantiate()
    source = InMemorySource.default_config().set(texts=TEXTS).instantiate()
    prepare(source, tokenizer, str(folder))
    return TokenStore.default_config().set(path=str(folder))


def trainer_config(folder, source, *, max_step=1):
    """Returns the config of a run of a model of 400 tokens on a source of 280."""
    cfg = tiny.trainer_config(folder, max_step=max_step, save_every=1, evaler=False)
    cfg.model = tiny.dense_model(400, dim=8)
    cfg.input = LMInput.default_config().set(source=source, seq_len=64, global_batch_size=8)
    return cfg


def make_hub(folder):
    """Writes a Hugging Face model of 288 tokens whose prompts begin with token 256."""
    train_bpe(TEXTS, 280, str(folder))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, text],
        "pair": [text, other],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [256], "tokens": [END_OF_TEXT]}},
    }
    file.write_text(json.dumps(content))
    cfg = tiny.dense_model(288, num_layers=2, dim=8)
    params = tiny.initial(cfg.instantiate(parent=None))
    save_pretrained(
        str(folder),
        cfg,
        params,
        dtype="bfloat16",
        tokenizer=Tokenizer.default_config().set(path=str(file)).instantiate(),
        more_settings={"eos_token_id": 256, "max_position_embeddings": 40},
        generation={"eos_token_id": [256, 7]},
    )
