"""What lies in deploy/kubernetes fits together, and fits the images and the code."""

import importlib.util
import itertools

import pytest

from tests.deploy.repository import DEPLOY, ROOT
from tests.deploy.test_dockerfile import LINES
from tests.service.seams import worker

FOLDER = DEPLOY / "kubernetes"


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load("check_kubernetes")
APPLIED = [path for path in check.kustomizations() if path.name != "settings"]


@pytest.fixture(params=APPLIED, ids=lambda path: path.relative_to(FOLDER).as_posix())
def resources(request):
    """Everything that one `kubectl apply -k` makes."""
    return {check.name(one): one for one in check.build(request.param)}


def templates(resources):
    """What pods are made of, by the resource that makes them."""
    return {
        name: found
        for name, one in resources.items()
        if one["kind"] in ("Deployment", "StatefulSet", "Job")
        and (found := check.pod_template(one))
    }


def test_the_schemas_have_nothing_against_any_resource(capsys):
    """As `make check` says."""
    assert check.main() == 0
    assert "as they should be" in capsys.readouterr().out


def test_what_the_schemas_refuse_is_named():
    (deployment,) = [one for one in check.build(FOLDER / "base") if one["kind"] == "Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readinessProb"] = container.pop("readinessProbe")
    deployment["spec"]["replicas"] = "two"
    found = list(check.schema_problems(deployment))
    assert found
    assert all(one.startswith("Deployment cairn-server: ") for one in found)


def test_the_pods_of_a_jobset_are_checked_though_kubernetes_has_no_schema_of_it():
    jobsets = [one for path in check.plain_files() for one in check._read(path)]
    assert [one["kind"] for one in jobsets] == ["JobSet"] * 2
    for jobset in jobsets:
        assert_its_pods_are_checked(jobset)


def assert_its_pods_are_checked(jobset):
    job = jobset["spec"]["replicatedJobs"][0]["template"]
    assert list(check.schema_problems(jobset)) == []
    job["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": 1})
    name = jobset["spec"]["replicatedJobs"][0]["name"]
    assert any(f"Job {name}" in one for one in check.schema_problems(jobset))


@pytest.mark.parametrize("path", check.plain_files(), ids=lambda path: path.name)
def test_a_training_job_keeps_one_writer_and_has_as_many_pods_as_hosts(path):
    (jobset,) = check._read(path)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["CAIRN_WRITER_ID"] == jobset["metadata"]["name"]
    assert {"CAIRN_URL", "CAIRN_KEY", "CAIRN_ANNOUNCE_ROOT"} <= set(variables)
    assert job["parallelism"] == job["completions"] > 1
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > 30  # Kubernetes' own
    if "COORDINATOR" in variables:
        job_set = jobset["metadata"]["name"]
        first = f"{job_set}-{replicated['name']}-0-0.{job_set}"
        assert variables["COORDINATOR"].partition(":")[0] == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resources: [absent.yaml]", "absent.yaml: expected a file, found none"),
        ("components: [absent]", "expected a kustomization, found none"),
        ("helmCharts: []", "helmCharts: not known here"),
        ("patches: [{path: patch.yaml}]", "expected Service cairn, found nothing"),
        (
            "configMapGenerator: [{name: a, behavior: merge, literals: [A=1]}]",
            "expected ConfigMap a, found nothing",
        ),
    ],
)
def test_a_kustomization_that_names_what_is_not_there_is_refused(text, message, tmp_path):
    (tmp_path / "kustomization.yaml").write_text(f"kind: Kustomization\n{text}\n")
    (tmp_path / "patch.yaml").write_text("{kind: Service, metadata: {name: cairn}}")
    with pytest.raises(check.KustomizationError) as caught:
        check.build(tmp_path)
    assert message in str(caught.value)


def test_no_file_is_forgotten():
    used = {path / "kustomization.yaml" for path in check.kustomizations()}
    used |= set(check.plain_files())
    for file in FOLDER.rglob("kustomization.yaml"):
        (made,) = check._read(file)
        entries = [*made.get("resources", []), *(one["path"] for one in made.get("patches", []))]
        used |= {(file.parent / entry).resolve() for entry in entries}
        used |= {file.parent / one / "kustomization.yaml" for one in made.get("components", [])}
    assert {path.resolve() for path in used if path.suffix} == set(FOLDER.rglob("*.yaml"))


def test_names_that_resources_call_each_other_by_are_there(resources):
    assert templates(resources)
    for template in templates(resources).values():
        pod = template["spec"]
        assert f"ServiceAccount {pod['serviceAccountName']}" in resources
        volumes = {one["name"] for one in pod["volumes"]}
        for container in pod["containers"]:
            for source in container["envFrom"]:
                assert f"ConfigMap {source['configMapRef']['name']}" in resources
            assert {one["name"] for one in container["volumeMounts"]} == volumes
            ports = {one["name"] for one in container.get("ports", [])}
            probes = [value for key, value in container.items() if key.endswith("Probe")]
            assert {one["httpGet"]["port"] for one in probes} <= ports
    for resource in resources.values():
        if resource["kind"] == "StatefulSet":
            assert f"Service {resource['spec']['serviceName']}" in resources
        if resource["kind"] == "Ingress":
            (rule,) = resource["spec"]["rules"]
            backend = rule["http"]["paths"][0]["backend"]["service"]
            ports = resources[f"Service {backend['name']}"]["spec"]["ports"]
            assert backend["port"]["name"] in {one["name"] for one in ports}


def test_every_selector_chooses_pods_that_are_there(resources):
    pods = [one["metadata"]["labels"] for one in templates(resources).values()]
    for name, resource in resources.items():
        spec = resource.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None:
            continue
        labels = selector if resource["kind"] == "Service" else selector["matchLabels"]
        chosen = [one for one in pods if labels.items() <= one.items()]
        assert chosen, name
        if resource["kind"] != "NetworkPolicy":
            assert len(chosen) == 1, name
    for template in templates(resources).values():
        for spread in template["spec"].get("topologySpreadConstraints", []):
            labels = spread["labelSelector"]["matchLabels"]
            assert labels.items() <= template["metadata"]["labels"].items()


def test_ports_of_services_and_policies_are_those_that_containers_listen_on():
    resources = {check.name(one): one for one in check.build(FOLDER / "base")}
    listened = {
        port["name"]: port["containerPort"]
        for template in templates(resources).values()
        for container in template["spec"]["containers"]
        for port in container["ports"]
    }
    assert listened == {"http": 8321, "metrics": 8322}
    services = [one for one in resources.values() if one["kind"] == "Service"]
    assert {port["targetPort"] for one in services for port in one["spec"]["ports"]} == set(
        listened
    )
    rules = resources["NetworkPolicy cairn-ingress"]["spec"]["ingress"]
    admitted = {port["port"] for rule in rules for port in rule["ports"]}
    assert admitted == set(listened.values())
    annotated = [one["metadata"]["annotations"] for one in templates(resources).values()]
    assert sorted(int(one["prometheus.io/port"]) for one in annotated) == [8321, 8322]


def test_pods_run_without_rights_that_they_do_not_need(resources):
    (user,) = [line.value[0] for line in LINES if line.cmd == "USER"]
    for name, template in templates(resources).items():
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"], name
        assert f"{pod['runAsUser']}:{pod['runAsGroup']}" == user
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in template["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(container["resources"])
            assert "/var/lib/cairn" in {one["mountPath"] for one in container["volumeMounts"]}
    account = resources["ServiceAccount cairn"]
    assert account["automountServiceAccountToken"] is False


def test_no_service_of_the_namespace_becomes_a_setting(resources):
    """Kubernetes would give every pod `CAIRN_PORT=tcp://...` of the service `cairn`."""
    for name, template in templates(resources).items():
        assert template["spec"]["enableServiceLinks"] is False, name


def test_every_worker_has_a_name_of_its_own_that_it_keeps():
    resources = {check.name(one): one for one in check.build(FOLDER / "base")}
    container = resources["StatefulSet cairn-worker"]["spec"]["template"]["spec"]["containers"][0]
    (named,) = [one for one in container["env"] if one["name"] == "CAIRN_EXECUTOR_ID"]
    assert named["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    server = resources["Deployment cairn-server"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "CAIRN_WORKER", "value": "false"} in server["env"]


def test_pods_have_the_time_that_a_worker_takes_to_leave_its_jobs(resources):
    for resource in resources.values():
        if resource["kind"] in ("Deployment", "StatefulSet"):
            pod = resource["spec"]["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] > worker.STOP_TIMEOUT_SECONDS


def test_the_upgrade_has_the_settings_and_the_images_of_what_it_comes_before():
    service = {check.name(one): one for one in check.build(FOLDER / "overlays/example")}
    upgrade = {check.name(one): one for one in check.build(FOLDER / "overlays/example/upgrade")}
    assert upgrade["ConfigMap cairn-settings"] == service["ConfigMap cairn-settings"]
    both = [*templates(service).values(), *templates(upgrade).values()]
    images = {one["image"] for each in both for one in each["spec"]["containers"]}
    assert images == {
        "registry.example.com/cairn-server:0.1.0",
        "registry.example.com/cairn-worker:0.1.0",
    }
    variables = [
        {one["name"] for one in each["spec"]["containers"][0]["env"]} - {"CAIRN_WORKER"}
        for each in both
    ]
    for one, other in itertools.combinations(variables, 2):
        assert one & other == {"PGPASSWORD"}


def test_an_overlay_leaves_nothing_that_it_had_to_change():
    for folder in APPLIED:
        if "overlays" in folder.parts:
            assert "change-me" not in str(check.build(folder))
