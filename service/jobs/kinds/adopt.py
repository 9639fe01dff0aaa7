"""Adopt job: imports the checkpoints in a folder of plain Orbax as steps of a run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cairn.counts import count_text
from cairn.interop.errors import InteropError
from cairn.interop.weights.model_map import model_map
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs.context import JobContext, JobKind, Request, Result, run_place
from cairn.service.jobs.errors import NotAllAdoptedError
from cairn.service.jobs.rule_matches import rename
from cairn.service.schemas import AdoptedModel
from cairn.service.sentences import members_of
from cairn.storage.orbax_import.adopt import Adoption, adopt
from cairn.storage.orbax_import.model_map import ModelMap
from cairn.storage.store.disk.confinement import source_folder
from cairn.storage.store.uri import StoreURI

KIND: Final = "adopt"
PROBLEMS_KEPT: Final = 100


def adopt_request(
    *,
    root: str,
    run: str,
    folder: StoreURI,
    step: int | None = None,
    model: AdoptedModel | None = None,
) -> dict[str, Any]:
    """Return the request of an adopt job, as JSON.

    Args:
        root: Name of the run's root.
        run: Name of the run.
        folder: Folder that Orbax saved to.
        step: Number of the step, if the folder is a single checkpoint.
        model: Model in the steps.
    """
    request: dict[str, Any] = {"root": root, "run": run, "folder": str(folder)}
    if step is not None:
        request["step"] = step
    if model is not None:  # pairs, which keep their order: the first match counts
        rules = [[pattern, name] for pattern, name in model.map.items()]
        request["model"] = {"config": model.config, "map": rules}
    return request


def model_of(request: Mapping[str, Any]) -> ModelMap | None:
    """Return the model map of a request; None if the request names no model.

    A subprocess with a time limit matches its regular expressions, since a caller wrote them.

    Raises:
        InvalidRequestError: The model is unknown, or a rule is invalid.
    """
    model_request = request.get("model")
    if model_request is None:
        return None
    try:
        model = model_map(model_request["config"], {})
    except InteropError as exc:
        errors = [{"field": "body.model.config", "detail": str(exc)}]
        raise InvalidRequestError(
            f"model.config: {exc}", errors=errors, extra=members_of(exc)
        ) from exc
    return replace(model, rules=dict(model_request["map"]), match=rename)


def _adopt(context: JobContext, request: Request) -> Result:
    run = run_place(context.roots, request)
    progress = context.progress
    progress.set(message=f"looking into {request['folder']}")

    def looked(done: int, total: int) -> None:
        context.check()
        progress.set(message=f"looked into {done} of {count_text(total, 'step')}")

    context.check()
    adoption = adopt(
        source_folder(run, request["folder"]),
        run,
        step=request.get("step"),
        model=model_of(request),
        by=context.operation_id,
        progress=looked,
    )
    progress.set(message="done")
    return _result(request, adoption)


def _result(request: Request, adoption: Adoption) -> Result:
    """Return the result of an import that listed the whole folder.

    Raises:
        NotAllAdoptedError: A checkpoint could not be imported or has changed; the error has the
            result.
    """
    result = {
        "root": request["root"],
        "run": request["run"],
        "adopted": list(adoption.adopted),
        "kept": list(adoption.kept),
        "gone": list(adoption.gone),
        "left": list(adoption.left[:PROBLEMS_KEPT]),
    }
    if adoption.ok:
        return result
    count, problems = len(adoption.problems), list(adoption.problems)
    raise NotAllAdoptedError(
        f"{request['folder']}: expected checkpoints that can be adopted and are as they were, "
        f"found {count} that are not: {'; '.join(problems[:3])}{'; …' if count > 3 else ''}. "
        f"{len(adoption.adopted)} were adopted, and stay. See docs/howto/adopt.md for what can be.",
        extra={**result, "problems": problems[:PROBLEMS_KEPT]},
    )


# Without `abandon`: each imported step is complete, and the next run continues after it.
ADOPT: Final = JobKind(
    KIND,
    run=lambda context, request: context.step("adopt", lambda: _adopt(context, request)),
    changed=lambda request: str(request["run"]),
)
