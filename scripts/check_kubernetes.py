"""Builds what lies in deploy/kubernetes as kustomize would, and checks it by Kubernetes' schemas.

Needs neither kustomize nor a cluster: it knows what ours use of kustomize, and refuses all else. A
JobSet, which Kubernetes has no schema of, is checked as the Jobs that are made of it.

    python scripts/check_kubernetes.py
"""

import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
OLDEST: Final = "1.30"
KNOWN: Final = frozenset(
    {
        *("apiVersion", "kind", "namespace", "resources", "components"),
        *("configMapGenerator", "images", "labels", "patches"),
    }
)
CLUSTER_WIDE: Final = frozenset({"Namespace"})

Resource = dict[str, Any]


class KustomizationError(Exception):
    """A kustomization that can't be built; says where and why."""


def build(folder: Path) -> list[Resource]:
    """Every resource of a kustomization.

    Names of generated ConfigMaps stay without the digest that kustomize adds to them.

    Raises:
        KustomizationError: A file or a patch's target is missing, or it uses what isn't known here.
    """
    return _apply(folder, [])


def schema_problems(resource: Resource) -> Iterator[str]:
    """What the schemas have against a resource."""
    if resource["kind"] == "JobSet":
        for job in resource["spec"]["replicatedJobs"]:
            metadata = {"name": job["name"]}
            made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
            yield from schema_problems({**made, **job["template"]})
        return
    import kubernetes_validate  # only now: the grammars that come with it take a second

    for version in (OLDEST, kubernetes_validate.latest_version()):
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as exc:
            place = ".".join(map(str, exc.path)) or "it"
            yield f"{name(resource)}: {place} in Kubernetes {version}: {exc.message}"


def kustomizations() -> list[Path]:
    """The folders that can be applied."""
    found = sorted(FOLDER.rglob("kustomization.yaml"))
    return [path.parent for path in found if _read(path)[0]["kind"] == "Kustomization"]


def plain_files() -> list[Path]:
    """The files that are applied as they are."""
    return sorted((FOLDER / "training").glob("*.yaml"))


def name(resource: Resource) -> str:
    """Kind and name."""
    return f"{resource['kind']} {resource['metadata']['name']}"


def main() -> int:
    """Print every problem; the exit status says whether there is one."""
    problems: list[str] = []
    built: dict[Path, list[Resource]] = {path: _read(path) for path in plain_files()}
    for folder in kustomizations():
        try:
            built[folder] = build(folder)
        except KustomizationError as exc:
            problems.append(str(exc))
    for path, resources in built.items():
        place = path.relative_to(FOLDER)
        problems += [f"{place}: {one}" for each in resources for one in schema_problems(each)]
    print("\n".join(problems) or f"{sum(map(len, built.values()))} resources are as they should be")
    return 1 if problems else 0


def _apply(folder: Path, resources: list[Resource]) -> list[Resource]:
    file = folder / "kustomization.yaml"
    if not file.is_file():
        raise KustomizationError(f"{file}: expected a kustomization, found none")
    (made,) = _read(file)
    if unknown := sorted(set(made) - KNOWN):
        raise KustomizationError(f"{file}: {', '.join(unknown)}: not known here")
    for entry in made.get("resources", []):
        path = folder / entry
        found = build(path) if path.is_dir() else _read(path)
        taken = {name(one) for one in resources} & {name(one) for one in found}
        if taken:
            raise KustomizationError(f"{file}: {entry}: {', '.join(sorted(taken))}: there already")
        resources = resources + found
    for entry in made.get("components", []):
        resources = _apply(folder / entry, resources)
    for generator in made.get("configMapGenerator", []):
        resources = _generate(file, generator, resources)
    for patch in made.get("patches", []):
        (change,) = _read(folder / patch["path"])
        target = _named(file, resources, name(change))
        _merge(f"{file}: {patch['path']}", target, change)
    for image in made.get("images", []):
        for container in _containers(resources):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for label in made.get("labels", []):
        for resource in resources:
            for labelled in (resource, *([one] if (one := pod_template(resource)) else [])):
                labels = labelled.setdefault("metadata", {}).setdefault("labels", {})
                labels.update(label["pairs"])
    if "namespace" in made:
        for resource in resources:
            if resource["kind"] not in CLUSTER_WIDE:
                resource["metadata"]["namespace"] = made["namespace"]
    return resources


def _generate(
    file: Path, generator: Mapping[str, Any], resources: list[Resource]
) -> list[Resource]:
    data = dict(literal.split("=", 1) for literal in generator["literals"])
    if generator.get("behavior") == "merge":
        _named(file, resources, f"ConfigMap {generator['name']}")["data"].update(data)
        return resources
    metadata = {"name": generator["name"]}
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return [*resources, made]


def _named(file: Path, resources: list[Resource], wanted: str) -> Resource:
    for resource in resources:
        if name(resource) == wanted:
            return resource
    raise KustomizationError(
        f"{file}: expected {wanted}, found {', '.join(map(name, resources)) or 'nothing'}"
    )


def _merge(place: str, target: dict[str, Any], change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, list):
            raise KustomizationError(f"{place}: {key}: patches of lists are not known here")
        if isinstance(value, dict):
            _merge(place, target.setdefault(key, {}), value)
        else:
            target[key] = value


def pod_template(resource: Resource) -> dict[str, Any] | None:
    """What its pods are made of, if it makes any."""
    spec = resource.get("spec", {})
    found: dict[str, Any] | None = spec.get("template")
    return found


def _containers(resources: list[Resource]) -> Iterator[dict[str, Any]]:
    for resource in resources:
        if template := pod_template(resource):
            yield from template["spec"]["containers"]


def _read(path: Path) -> list[Any]:
    if not path.is_file():
        raise KustomizationError(f"{path}: expected a file, found none")
    with path.open(encoding="utf-8") as file:
        return deepcopy([one for one in yaml.safe_load_all(file) if one is not None])


if __name__ == "__main__":
    sys.exit(main())
