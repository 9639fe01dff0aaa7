"""pytest plugin: Orbax's own tests on one process, with Cairn's code in the place of Orbax's.

`CAIRN_PEER` says whose place it takes, "manager" or "handlers"; without it Orbax's own code runs.
`CAIRN_PEER_RESULTS` names the file of outcomes, JSON. `CAIRN_PEER_KEEP`, if set, has the folders of
the tests stay.
"""

import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import flax.struct
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from absl.testing import absltest

import cairn
from tests.peers.handlers import Handler, replace_handlers
from tests.peers.private_parts import private

_MANAGER = "orbax.checkpoint.checkpoint_manager"
_MULTIHOST = "orbax.checkpoint._src.multihost.multihost"
_TESTING = "orbax.checkpoint._src.testing"
_PLACE = os.environ.get("CAIRN_PEER")

_outcomes: dict[str, dict[str, str]] = {}


class MultiProcessTest(absltest.TestCase):
    """One process in the place of Orbax's several, which its wheel has no helper for."""

    def multiprocess_create_tempdir(self, name: str | None = None) -> str:
        """Make a folder of the test's own."""
        return tempfile.mkdtemp(prefix=f"{name or 'peer'}-")


def _assert_trees_all_equal(first: Any, *others: Any) -> None:
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def _stand_in(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


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
    package.multiprocess_test = _stand_in(
        f"{_TESTING}.multiprocess_test", MultiProcessTest=MultiProcessTest
    )
    if importlib.util.find_spec("chex") is None:
        _stand_in(
            "chex",
            assert_trees_all_equal=_assert_trees_all_equal,
            dataclass=flax.struct.dataclass,
        )
    if "CAIRN_PEER_KEEP" in os.environ:
        absltest.TestCase.tempfile_cleanup = absltest.TempFileCleanup.OFF
    if _PLACE == "manager":
        ocp.CheckpointManager = manager.CheckpointManager = cairn.CheckpointManager


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Replace the handlers once the tests' modules are there."""
    if _PLACE == "handlers":
        for module in {item.module for item in items}:
            replace_handlers(module)


def pytest_runtest_setup() -> None:
    """Count the calls of each test for itself."""
    Handler.calls = 0


def pytest_runtest_logreport(report) -> None:
    """Note how a test ended: the first part of it that failed counts."""
    name = report.nodeid.partition("::")[2]
    outcome = _outcomes.setdefault(name, {"outcome": "passed", "error": ""})
    if report.outcome != "passed" and outcome["outcome"] == "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        outcome.update(outcome=report.outcome, error=crash.message if crash else "")
    if _PLACE == "handlers" and report.when == "call" and not Handler.calls:
        outcome.update(outcome="apart", error="")


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["CAIRN_PEER_RESULTS"]).write_text(json.dumps(_outcomes))
