"""Prints what transformers renders, as JSON; run by a Python that has transformers.

PYTHON -m tests.data.tokens.chat.make_renderings > tests/data/tokens/chat/renderings.json
"""

import json
import sys

import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.data.tokens.chat.templates import CONVERSATIONS, TEMPLATES, TOKENS, TOOLS, cases


def main():
    """Prints a list of texts, an error as null, in the order of `cases`."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **TOKENS
    )
    texts = []
    for template, conversation, add_generation_prompt in cases():
        try:
            text = tokenizer.apply_chat_template(
                CONVERSATIONS[conversation],
                tools=TOOLS if conversation == "a call" else None,
                chat_template=TEMPLATES[template],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:
            print(template, conversation, repr(error), file=sys.stderr)
            text = None
        texts.append(text)
    json.dump(texts, sys.stdout, ensure_ascii=False, indent=1)
    print()


if __name__ == "__main__":
    main()
