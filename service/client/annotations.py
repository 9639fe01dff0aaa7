# Made of asynchronous/annotations.py by `python scripts/sync_client.py`: change that one.
"""The part of the HTTP client that sets labels and metrics."""

from collections.abc import Mapping

from cairn.service.client.clean_up import CleanUpConnection
from cairn.service.client.protocol.paths import DEFAULT_ROOT, run_path, step_path
from cairn.service.client.protocol.requests import ANY
from cairn.service.schemas import AnnotateRequest, AnnotateRunRequest, Better, Checkpoint, Run


class AnnotationsConnection(CleanUpConnection):
    """Connection with the requests that set labels and metrics."""

    def annotate(
        self,
        run: str,
        step: int,
        *,
        labels: Mapping[str, str | None] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        better: Mapping[str, Better | None] | None = None,
        root: str = DEFAULT_ROOT,
    ) -> Checkpoint:
        """Set labels and metrics of a listed step; its other labels and metrics do not change.

        Args:
            run: Name of the run.
            step: A listed step.
            labels: Values by name; None removes a label.
            metrics: Numbers by name, NaN and infinities too; None removes a metric.
            better: Direction of each metric: "min" if lower is better, "max" if higher is better;
                None removes the direction.
            root: Name of the run's root.
        """
        body = AnnotateRequest(
            labels=dict(labels or {}), metrics=dict(metrics or {}), better=dict(better or {})
        )
        path = step_path(root, run, step)
        return self._send(Checkpoint, "PATCH", path, body.model_dump(mode="json"), headers=ANY)

    def annotate_run(
        self,
        run: str,
        labels: Mapping[str, str | None],
        *,
        root: str = DEFAULT_ROOT,
    ) -> Run:
        """Set labels of a run; its other labels do not change.

        Args:
            run: Name of the run.
            labels: Values by name; None removes a label.
            root: Name of the run's root.
        """
        body = AnnotateRunRequest(labels=dict(labels))
        return self._send(Run, "PATCH", run_path(root, run), body.model_dump(), headers=ANY)
