"""Each test of a family runs with its first config, or in the whole matrix with all of them."""

import pytest

from cairn import DecoderForCausalLM
from tests.interop.families.matrix import WHOLE, model_of


def pytest_generate_tests(metafunc):
    if "known" in metafunc.fixturenames:
        names = list(metafunc.module.CONFIGS)
        metafunc.parametrize("known", names if WHOLE else names[:1], indirect=True, scope="class")


@pytest.fixture(scope="class")
def known(request, tmp_path_factory):
    """Their model, its folder, and ours."""
    theirs = model_of(request.module, request.param)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    return theirs, folder, DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
