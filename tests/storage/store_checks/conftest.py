import pytest

from cairn.storage.store_checks import probing


@pytest.fixture
def new_process():
    """Forgets what this process knows of stores, as one that starts does."""
    probing._answers.clear()
    return probing._answers.clear
