"""pytest plugin: Orbax's own tests on one process, with Cairn's manager in the place of Orbax's.

Set `CAIRN_PEER` to have Cairn's; `CAIRN_PEER_RESULTS` names the file of outcomes, JSON.
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from absl import flags
from absl.testing import absltest
from orbax.checkpoint import checkpoint_manager
from orbax.checkpoint._src.multihost import multihost

import cairn

_outcomes: dict[str, dict[str, str]] = {}


class MultiProcessTest(absltest.TestCase):
    """One process in the place of Orbax's several, which its wheel has no helper for."""

    def multiprocess_create_tempdir(self, name: str | None = None) -> str:
        """Make a folder of the test's own."""
        return tempfile.mkdtemp(prefix=f"{name or 'peer'}-")


def pytest_configure() -> None:
    """Set up what the tests import: before the first of their modules."""
    flags.FLAGS.mark_as_parsed()
    port = os.environ["CAIRN_PEER_PORT"]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
    multihost.initialize_runtime_to_distributed_ids()
    helper = types.ModuleType("orbax.checkpoint._src.testing.multiprocess_test")
    helper.MultiProcessTest = MultiProcessTest
    sys.modules[helper.__name__] = helper
    package = __import__("orbax.checkpoint._src.testing", fromlist=["testing"])
    package.multiprocess_test = helper
    if "CAIRN_PEER" in os.environ:
        ocp.CheckpointManager = checkpoint_manager.CheckpointManager = cairn.CheckpointManager


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
