"""deploy/compose.yaml fits its files, the images and the code; `make check` holds its schema."""

import re
import tomllib

import dockerfile

from tests.deploy.repository import DEPLOY, ROOT, documents
from tests.service.seams import worker

(COMPOSE,) = documents(DEPLOY / "compose.yaml")
SERVICES = COMPOSE["services"]
OURS = {name: one for name, one in SERVICES.items() if one["image"].startswith("cairn-")}
TEXT = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
EXAMPLE = (DEPLOY / ".env.example").read_text(encoding="utf-8")


def test_every_value_that_is_filled_in_is_in_the_example():
    wanted = set(re.findall(r"\$\{(\w+)", TEXT))
    wanted |= {one["environment"] for one in COMPOSE["secrets"].values()}
    assert wanted == set(re.findall(r"^(\w+)=", EXAMPLE, re.MULTILINE))


def test_no_secret_is_in_a_file_that_git_keeps():
    assert re.findall(r"^\w*PASSWORD=(.+)$", EXAMPLE, re.MULTILINE) == []
    for name, one in SERVICES.items():
        for variable, value in one.get("environment", {}).items():
            if "PASSWORD" in variable:
                assert value.startswith(("${POSTGRES_PASSWORD:?", "/run/secrets/")), name
    assert "/deploy/.env\n" in (ROOT / ".gitignore").read_text(encoding="utf-8")


def test_every_folder_and_volume_is_there():
    named = set(COMPOSE["volumes"])
    for one in SERVICES.values():
        for volume in one.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in named
        assert set(one.get("secrets", [])) <= set(COMPOSE["secrets"])


def test_what_waits_for_another_waits_for_what_that_one_can_tell():
    for one in SERVICES.values():
        for other, how in one.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert SERVICES[other]["healthcheck"]["test"]
            else:
                assert how["condition"] == "service_completed_successfully"
                assert SERVICES[other]["restart"] == "no"


def test_images_are_built_from_stages_that_the_dockerfile_has():
    lines = dockerfile.parse_file(str(ROOT / "Dockerfile"))
    stages = [line.value[-1] for line in lines if line.cmd == "FROM"]
    for name, one in OURS.items():
        build = one.get("build", SERVICES["server"]["build"])
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert build["target"] in stages
        assert one["image"].startswith(f"cairn-{build['target']}:"), name


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for one in OURS.values():
        assert one["image"].endswith(f":${{CAIRN_VERSION:-{project['version']}}}")
    assert f"CAIRN_VERSION={project['version']}\n" in EXAMPLE


def test_images_of_others_are_exact_versions():
    for one in SERVICES.values():
        if one not in OURS.values():
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+(\.\d+)?(-\w+)?", one["image"])


def test_what_runs_for_long_may_write_its_volumes_only():
    for one in OURS.values():
        assert one["read_only"] is True
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
    root = [name for name, one in OURS.items() if "user" in one]
    assert root == ["store"]
    assert OURS["store"]["entrypoint"][:2] == ["chown", "10001:10001"]
    assert OURS["store"]["network_mode"] == "none"


def test_workers_share_the_servers_settings_and_have_names_of_their_own():
    shared = {k: v for k, v in OURS["server"]["environment"].items() if k != "CAIRN_WORKER"}
    workers = {name: one for name, one in OURS.items() if name.startswith("worker")}
    for name, one in workers.items():
        assert one["environment"] == {**shared, "CAIRN_EXECUTOR_ID": name}
    assert len(workers) == 2
    assert OURS["upgrade"]["environment"] == shared


def test_containers_have_the_time_that_a_worker_takes_to_leave_its_jobs():
    for one in OURS.values():
        assert int(one["stop_grace_period"].removesuffix("s")) > worker.STOP_TIMEOUT_SECONDS


def test_nothing_is_reached_from_other_machines_but_by_a_proxy():
    published = [port for one in SERVICES.values() for port in one.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_what_prometheus_asks_is_what_runs():
    (config,) = documents(DEPLOY / "prometheus/prometheus.yaml")
    jobs = {
        one["job_name"]: one["static_configs"][0]["targets"] for one in config["scrape_configs"]
    }
    workers = [name for name in OURS if name.startswith("worker")]
    assert jobs == {
        "cairn-server": ["server:8321"],
        "cairn-worker": [f"{name}:8322" for name in workers],
    }
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    mounted = {one.split(":")[0]: one.split(":")[1] for one in SERVICES["prometheus"]["volumes"]}
    assert (
        f"--config.file={mounted['./prometheus']}/prometheus.yaml"
        in (SERVICES["prometheus"]["command"])
    )


def test_what_grafana_is_given_is_where_it_looks():
    mounted = {one.split(":")[0]: one.split(":")[1] for one in SERVICES["grafana"]["volumes"]}
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (provider,) = documents(DEPLOY / "grafana/provisioning/dashboards/cairn.yaml")
    assert provider["providers"][0]["options"]["path"] == mounted["./grafana/dashboards"]
    (sources,) = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
