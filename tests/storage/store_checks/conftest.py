import pytest

from tests.storage.seams import probe


@pytest.fixture
def new_process():
    """Forgets what this process knows of stores, as one that starts does."""
    probe._answers.clear()
    return probe._answers.clear
