import pytest

from tests.checkpoint import small


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = small.make(tmp_path)
    yield checkpointer
    checkpointer.close()
