"""The Dockerfile and the compose files: linted, valid by their schema, and made of roles and settings that exist."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.settings import Settings
from tests.deploy.deployed_settings import DEPLOY, ROLES, is_command, loaded
from tests.servers.aws import ACCESS_KEY, SECRET_KEY

ROOT = DEPLOY.parent
DOCKER = DEPLOY / "docker"
COMPOSE = sorted(DOCKER.glob("*.yaml"))
BIN = Path(sys.executable).parent


def run(*command: str) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def services(name: str) -> dict[str, Any]:
    """The services of a file, with what they extend."""
    own: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())["services"]
    return {service: _extended(name, service) for service in own}


def _extended(name: str, service: str) -> dict[str, Any]:
    own: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())["services"][service]
    if "extends" not in own:
        return own
    above = own["extends"]
    base = _extended(above.get("file", name), above["service"])
    environment = {**base.get("environment", {}), **own.get("environment", {})}
    return {**base, **own, "environment": environment}


def test_the_dockerfile_is_linted() -> None:
    run("hadolint", "--failure-threshold", "style", str(DOCKER / "Dockerfile"))


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_is_valid(path: Path) -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))


def test_the_schema_refuses_what_compose_does_not_know(tmp_path: Path) -> None:
    broken = tmp_path / "compose.yaml"
    broken.write_text((DOCKER / "compose.yaml").read_text().replace("ports:", "port:"))
    with pytest.raises(AssertionError, match="port"):
        run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(broken))


@pytest.mark.parametrize("name", ["compose.postgres.yaml", "compose.aws.yaml"])
def test_each_role_is_a_service(name: str) -> None:
    ours = {service: each for service, each in services(name).items() if "extends" in each}
    assert set(ours) == ROLES | {"migrate"}
    for service, each in ours.items():
        assert is_command([service])
        # The engines start at the same time.
        assert each["command"] == [service, *(["--wait", "60"] if service == "migrate" else [])]
        settings = loaded(each["environment"])
        assert None not in (settings.records, settings.tasks, settings.queue, settings.coordinator)
        assert service == "migrate" or each["depends_on"] == {
            "migrate": {"condition": "service_completed_successfully"}
        }


def test_the_emulator_takes_the_signatures() -> None:
    """It verifies signed links with one secret, and takes any in headers."""
    for service, each in services("compose.aws.yaml").items():
        if "extends" in each:
            given = each["environment"]
            assert (given["AWS_ACCESS_KEY_ID"], given["AWS_SECRET_ACCESS_KEY"]) == (ACCESS_KEY, SECRET_KEY), service


def test_the_embedded_set_up_is_one_process() -> None:
    [(_, each)] = services("compose.yaml").items()
    assert each["command"] == ["up"]
    assert loaded(each["environment"]).records is None
    assert each["volumes"] == ["data:/data"]


@pytest.mark.parametrize("name", [path.name for path in COMPOSE])
def test_a_container_may_write_nothing_and_has_time_to_stop(name: str) -> None:
    ours = [each for each in services(name).values() if each["image"].startswith("${CONVEYOR_IMAGE")]
    assert ours
    for each in ours:
        assert (each["read_only"], each["cap_drop"], each["init"], each["tmpfs"]) == (True, ["ALL"], True, ["/tmp"])
        assert int(each["stop_grace_period"].rstrip("s")) > Settings().drain_seconds
        # Nobody but this machine reaches a port, unless a user says so.
        assert all(port.startswith("127.0.0.1:") for port in each.get("ports", []))


def test_the_context_has_what_the_image_is_built_from_and_nothing_else() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert {source for sources in copied for source in sources.split()} == allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_the_lock_of_the_image_has_all_engines() -> None:
    locked = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements/image.txt").read_text(), re.MULTILINE))
    assert {"apsw", "asyncpg", "redis", "obstore", "aiobotocore", "opentelemetry-sdk", "litestar"} <= locked
    # Large, and only for one format of exports: a lock of its own.
    assert "pyarrow" not in locked
    assert re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements/parquet.txt").read_text(), re.MULTILINE) == [
        "pyarrow"
    ]
