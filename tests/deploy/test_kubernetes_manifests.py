"""The Kubernetes manifests: valid by the schema of several versions, and made of roles and settings that exist."""

from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from conveyor.settings import Settings
from tests.deploy.deployed_settings import DEPLOY, ROLES, is_command, loaded

FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.30", "1.37")


@cache
def manifests() -> tuple[dict[str, Any], ...]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert {path.name for path in FOLDER.glob("*.yaml")} == {*kustomization["resources"], "kustomization.yaml"}
    return tuple(each for name in kustomization["resources"] for each in _loaded(FOLDER / name))


def _loaded(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods() -> dict[str, dict[str, Any]]:
    """The specification of the pods of each role."""
    made = [each for each in manifests() if each["kind"] in ("Deployment", "Job")]
    return {each["metadata"]["name"].removeprefix("conveyor-"): each["spec"]["template"]["spec"] for each in made}


@pytest.mark.parametrize("version", VERSIONS)
def test_they_are_valid(version: str) -> None:
    for each in manifests():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_refuses_what_kubernetes_does_not_know() -> None:
    [service] = [each for each in manifests() if each["kind"] == "Service"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "port": 80}}, VERSIONS[-1], strict=True)


def test_each_role_is_a_deployment() -> None:
    assert set(pods()) == ROLES | {"migrate"}
    for role, pod in pods().items():
        [container] = pod["containers"]
        assert container["args"] == [role]
        assert is_command(container["args"])
        assert [next(iter(source.values()))["name"] for source in container["envFrom"]] == ["conveyor", "conveyor"]


def test_a_pod_may_write_nothing_and_has_time_to_stop() -> None:
    for role, pod in pods().items():
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if role != "migrate":
            assert pod["terminationGracePeriodSeconds"] > Settings().drain_seconds
            assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}


def test_labels_select_the_pods() -> None:
    for each in manifests():
        if each["kind"] == "Deployment":
            assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
    [service] = [each for each in manifests() if each["kind"] == "Service"]
    [api] = [
        each for each in manifests() if each["metadata"]["name"] == "conveyor-api" and each["kind"] == "Deployment"
    ]
    assert service["spec"]["selector"] == api["spec"]["selector"]["matchLabels"]


def test_the_settings_exist() -> None:
    given = {each["kind"]: each for each in manifests() if each["kind"] in ("ConfigMap", "Secret")}
    # The image sets the port.
    image = {"CONVEYOR_METRICS_PORT": "9090"}
    settings = loaded({**image, **given["ConfigMap"]["data"], **given["Secret"]["stringData"]})
    assert None not in (settings.records, settings.tasks, settings.queue, settings.coordinator)
