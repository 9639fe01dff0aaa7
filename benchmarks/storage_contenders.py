"""Who takes part in the storage benchmark: Cairn, its peers, raw bytes, and the disk's own limit.

`save` may return before the step is durable and gives the call that waits for that. A peer's save
counts as durable when its own wait has returned and its files are synced; Cairn's when
`SaveHandle.wait` returns. Peers that take no sharded arrays get the state as host arrays before
the clock starts, which favours them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from benchmarks import storage_limits as limits
from benchmarks import storage_places as places
from benchmarks import storage_workload as workload

OURS = "cairn"
KEPT = "kept"
HELD_BYTES_PER_SECOND = 0.67e9
"""Views are held about as long as a save takes: 3 s for the usual 2 GB."""

RUN = "run"


class Contender:
    """One way to save and restore the steps below a place.

    Attributes:
        label: what rows call it.
        takes_host_arrays: the state is handed over as NumPy arrays.
        asynchronous: `save` returns before the data is written.
        restores: it can give the state back, placed on devices.
        buckets: it can write to gs://.
    """

    label: ClassVar[str]
    takes_host_arrays: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False
    restores: ClassVar[bool] = False
    buckets: ClassVar[bool] = False

    def __init__(self, place: str) -> None:
        self.place = place

    def step_place(self, step: int) -> str:
        """Where the files of a step are."""
        return f"{self.place}/{step}"

    def prepared(self, state: Any) -> Any:
        """The state as `save` takes it, made before the clock starts."""
        return state

    def save(self, step: int, state: Any) -> Callable[[], None]:
        """Starts to save; returns what waits until the step is durable."""
        raise NotImplementedError

    def restore(self, step: int, target: Any) -> Any:
        """The state as `target` (abstract arrays with shardings) asks for it."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what the saves started."""


class Cairn(Contender):
    """This project: integrity on, as always."""

    label = "Cairn"
    takes_host_arrays = False
    asynchronous = restores = buckets = True
    reuse_buffers: ClassVar[bool] = False

    def __init__(self, place: str) -> None:
        from cairn.state.checkpointing import checkpointer, load  # noqa: F401  imports are not measured

        super().__init__(place)
        self.run_uri = f"{place}/{RUN}"
        self._checkpointer: Any = None

    @override
    def step_place(self, step: int) -> str:
        from cairn.storage.runs.run import Run

        run = Run.open(self.run_uri)
        return str(run.step_uri(run.step(step))).removeprefix("file://")

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        from cairn.state.checkpointing.checkpointer import Checkpointer

        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self.run_uri, reuse_buffers=self.reuse_buffers)
        wait: Callable[[], None] = self._checkpointer.save(step, state, meta={}).wait
        return wait

    @override
    def restore(self, step: int, target: Any) -> Any:
        from cairn.state.checkpointing.load import load

        return load(f"{self.run_uri}/steps/{step}", target)

    @override
    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


class CairnKept(Cairn):
    """This project, its saves copying into memory that stays warm."""

    label = "Cairn with kept buffers"
    restores = False  # its files are those of the other
    reuse_buffers = True


class OrbaxDefault(Contender):
    """Orbax v1 as it comes."""

    label = "plain Orbax default"
    takes_host_arrays = False
    asynchronous = restores = buckets = True

    def context(self) -> Any:
        """The options."""
        from orbax.checkpoint import v1 as ocp

        return ocp.Context()

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        from orbax.checkpoint import v1 as ocp

        folder = self.step_place(step)
        with self.context():
            response = ocp.save_checkpointables_async(folder, state)

        def durable() -> None:
            response.result()
            places.sync(folder)

        return durable

    @override
    def restore(self, step: int, target: Any) -> Any:
        from orbax.checkpoint import v1 as ocp

        with self.context():
            return ocp.load_checkpointables(self.step_place(step), target)


class OrbaxTuned(OrbaxDefault):
    """Orbax v1 without compression and with files of 64 MiB."""

    label = "plain Orbax tuned"

    @override
    def context(self) -> Any:
        context = super().context()
        context.array.saving.use_compression = False
        context.array.saving.ocdbt_target_data_file_size = 64 << 20
        return context


class TorchDcp(Contender):
    """torch.distributed.checkpoint in one process, blocking."""

    label = "torch DCP sync"
    restores = True

    def __init__(self, place: str) -> None:
        import torch.distributed.checkpoint  # noqa: F401  imports are not measured

        warnings.filterwarnings("ignore", module=r"torch\..*")
        super().__init__(place)

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        folder = self.step_place(step)
        dcp.save(_tensors(state), checkpoint_id=folder)
        return lambda: places.sync(folder)

    @override
    def restore(self, step: int, target: Any) -> Any:
        import torch
        import torch.distributed.checkpoint as dcp

        tensors = {
            path: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name))
            for path, leaf in workload.flat(target).items()
        }
        dcp.load(tensors, checkpoint_id=self.step_place(step))
        return _placed({path: tensor.numpy() for path, tensor in tensors.items()}, target)


class TorchDcpAsync(TorchDcp):
    """torch.distributed.checkpoint in one process, asynchronous: it copies, then writes."""

    label = "torch DCP async"
    asynchronous = True
    restores = False  # its files are those of the blocking save

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        folder = self.step_place(step)
        saving = dcp.async_save(_tensors(state), checkpoint_id=folder)

        def durable() -> None:
            getattr(saving, "upload_completion", saving).result()
            places.sync(folder)

        return durable


class Safetensors(Contender):
    """One safetensors file, blocking."""

    label = "safetensors"
    restores = buckets = True

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        from safetensors import numpy as safetensors

        folder = self.step_place(step)
        if places.in_bucket(folder):
            places.write(folder, [safetensors.save(workload.flat(state))])
        else:
            Path(folder).mkdir(parents=True)
            safetensors.save_file(workload.flat(state), f"{folder}/{places.DATA_FILE}")
        return lambda: places.sync(folder)

    @override
    def restore(self, step: int, target: Any) -> Any:
        from safetensors import numpy as safetensors

        folder = self.step_place(step)
        if places.in_bucket(folder):
            return _placed(safetensors.load(places.read_whole(folder)), target)
        return _placed(safetensors.load_file(f"{folder}/{places.DATA_FILE}"), target)


class Raw(Contender):
    """The same bytes in one file, written by one thread and synced: the reference."""

    label = "raw write + fsync"
    buckets = True

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        places.write(self.step_place(step), workload.flat(state).values())
        return lambda: None


class Direct(Contender):
    """The same bytes, from aligned memory past the page cache: what the disk can do."""

    label = "direct write, eight threads"

    @override
    def prepared(self, state: Any) -> Any:
        return limits.aligned(workload.flat(state).values())

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        limits.write(self.step_place(step), state)
        return lambda: None


class HeldViews(Contender):
    """No save at all: the host's views of the arrays are held for a while. A floor for donation."""

    label = "views held, nothing written"
    takes_host_arrays = False

    @override
    def save(self, step: int, state: Any) -> Callable[[], None]:
        import jax
        import numpy as np

        views = [
            np.asarray(shard.data)
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
        ]

        def held() -> None:
            time.sleep(sum(view.nbytes for view in views) / HELD_BYTES_PER_SECOND)
            views.clear()

        return held


CONTENDERS: Mapping[str, type[Contender]] = {
    "raw": Raw,
    "direct": Direct,
    "views": HeldViews,
    OURS: Cairn,
    KEPT: CairnKept,
    "orbax": OrbaxDefault,
    "orbax_tuned": OrbaxTuned,
    "dcp": TorchDcp,
    "dcp_async": TorchDcpAsync,
    "safetensors": Safetensors,
}


def _tensors(state: Any) -> dict[str, Any]:
    """The leaves as torch tensors that share their memory."""
    import torch

    return {path: torch.from_numpy(leaf) for path, leaf in workload.flat(state).items()}


def _placed(leaves: Mapping[str, Any], target: Any) -> Any:
    """Host arrays on the devices, as the target says."""
    import jax

    return workload.map_leaves(
        lambda path, leaf: jax.device_put(leaves[path], leaf.sharding), target
    )
