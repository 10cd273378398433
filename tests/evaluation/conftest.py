import pytest

from moelib.data.tokens.tokenizer import Tokenizer
from tests.evaluation import folders


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of the questions."""
    return Tokenizer.default_config().set(path=str(folders.DATA)).instantiate()
