"""pytest plugin: Orbax's own tests on one process, with Cairn's manager in the place of Orbax's.

Set `CAIRN_PEER` to have Cairn's; `CAIRN_PEER_RESULTS` names the file of outcomes, JSON.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest
from absl import flags
from absl.testing import absltest

import cairn

_MANAGER = "orbax.checkpoint.checkpoint_manager"
_MULTIHOST = "orbax.checkpoint._src.multihost.multihost"
_TESTING = "orbax.checkpoint._src.testing"

_outcomes: dict[str, dict[str, str]] = {}


class MultiProcessTest(absltest.TestCase):
    """One process in the place of Orbax's several, which its wheel has no helper for."""

    def multiprocess_create_tempdir(self, name: str | None = None) -> str:
        """Make a folder of the test's own."""
        return tempfile.mkdtemp(prefix=f"{name or 'peer'}-")


def private(module: str, attribute: str | None = None) -> Any:
    """Import a module of Orbax that its public API does not promise, or an attribute of it.

    Raises:
        pytest.UsageError: this release of Orbax does not have it (docs/adr/0016).
    """
    try:
        imported = importlib.import_module(module)
        return imported if attribute is None else getattr(imported, attribute)
    except (ImportError, AttributeError) as error:
        name = module if attribute is None else f"{module}.{attribute}"
        version = importlib.metadata.version("orbax-checkpoint")
        raise pytest.UsageError(
            f"Orbax {version} has no {name}, which tests/peers/plugin.py needs to run Orbax's "
            f"tests on one process: find what took its place, and change it there ({error})"
        ) from error


def pytest_configure() -> None:
    """Set up what the tests import: before the first of their modules."""
    manager = private(_MANAGER)
    private(_MANAGER, "CheckpointManager")
    initialize_runtime = private(_MULTIHOST, "initialize_runtime_to_distributed_ids")
    package = private(_TESTING)
    flags.FLAGS.mark_as_parsed()
    port = os.environ["CAIRN_PEER_PORT"]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
    initialize_runtime()
    helper = types.ModuleType(f"{_TESTING}.multiprocess_test")
    helper.MultiProcessTest = MultiProcessTest
    sys.modules[helper.__name__] = helper
    package.multiprocess_test = helper
    if "CAIRN_PEER" in os.environ:
        ocp.CheckpointManager = manager.CheckpointManager = cairn.CheckpointManager


def pytest_runtest_logreport(report) -> None:
    """Note how a test ended: the first part of it that failed counts."""
    name = report.nodeid.partition("::")[2]
    outcome = _outcomes.setdefault(name, {"outcome": "passed", "error": ""})
    if report.outcome != "passed" and outcome["outcome"] == "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        outcome.update(outcome=report.outcome, error=crash.message if crash else "")


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["CAIRN_PEER_RESULTS"]).write_text(json.dumps(_outcomes))
