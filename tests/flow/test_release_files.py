"""The files of a release: complete, described, and with checksums that hold. `make release` tries them, too."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.release.bom import bill_of_materials, locked
from tests.release.packages import ROOT, build, check, describe, project, sign_off


@pytest.mark.slow
def test_the_files_of_a_release(tmp_path: Path) -> None:
    wheel, sdist = build(tmp_path / "dist")
    check(wheel, sdist)
    document = json.loads(describe(tmp_path / "dist").read_text())
    assert document["metadata"]["component"]["version"] == project()["version"]
    sign_off(tmp_path / "dist")
    done = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path / "dist", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == 3


def test_the_bill_of_materials_has_what_the_lock_has() -> None:
    packages = locked(ROOT / "requirements/image.txt")
    lines = (ROOT / "requirements/image.txt").read_text().splitlines()
    assert len(packages) == sum("==" in line and not line.startswith((" ", "#")) for line in lines)
    document = bill_of_materials("conveyor-jobs", "1.0", "Apache-2.0", packages)
    refs = {each["bom-ref"] for each in document["components"]} | {"pkg:pypi/conveyor-jobs@1.0"}
    edges = {each["ref"]: each["dependsOn"] for each in document["dependencies"]}
    assert set(edges) == refs
    assert {ref for found in edges.values() for ref in found} == refs - {"pkg:pypi/conveyor-jobs@1.0"}
    assert any(ref.startswith("pkg:pypi/litestar@") for ref in edges["pkg:pypi/conveyor-jobs@1.0"])
    assert document == bill_of_materials("conveyor-jobs", "1.0", "Apache-2.0", packages)
