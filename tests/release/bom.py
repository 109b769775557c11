"""The bill of materials of a release, as CycloneDX 1.6: what a lock installs, what requires each package, and its
license. The same lock gives the same bytes."""

import json
import re
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = re.compile(r"^([a-z0-9._-]+)==([^ ;\\]+)(?: ; ([^\\]+?))? *\\?$")
_NAMESPACE = uuid.UUID("7ee1c8f0-6a55-5b0e-8d49-3c4b2f6f2f52")


class Locked(NamedTuple):
    """A package of a lock."""

    name: str
    version: str
    # Where it is installed, if not everywhere.
    marker: str | None
    required_by: list[str]


def locked(lock: Path) -> list[Locked]:
    """The packages of a lock, in order."""
    packages: list[Locked] = []
    for line in lock.read_text().splitlines():
        if match := _PACKAGE.match(line):
            packages.append(Locked(match[1], match[2], match[3], []))
        elif packages and (via := re.fullmatch(r" +#(?: via|  ) +([^ ].*)", line)) and not via[1].startswith("-"):
            packages[-1].required_by.append(re.sub(r"\[.*?\]| \(.*\)", "", via[1]).strip())
    return packages


def bill_of_materials(name: str, version: str, license_name: str, packages: list[Locked]) -> dict[str, Any]:
    """The document. `name` stands in the lock as who requires the packages at the top."""
    root = f"pkg:pypi/{name}@{version}"
    refs = {each.name: f"pkg:pypi/{each.name}@{each.version}" for each in packages} | {name: root}
    required: dict[str, list[str]] = {ref: [] for ref in refs.values()}
    for each in packages:
        for other in each.required_by:
            required[refs[other]].append(refs[each.name])
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": name,
                "version": version,
                "purl": root,
                "licenses": [{"license": {"id": license_name}}],
            }
        },
        "components": [_component(each, refs[each.name]) for each in packages],
        "dependencies": [{"ref": ref, "dependsOn": sorted(found)} for ref, found in sorted(required.items())],
    }
    serial = uuid.uuid5(_NAMESPACE, json.dumps(document, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "serialNumber": f"urn:uuid:{serial}",
        **document,
    }


def _component(package: Locked, ref: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": ref,
        "name": package.name,
        "version": package.version,
        "purl": ref,
    }
    if package.marker is not None:
        component["properties"] = [{"name": "conveyor:marker", "value": package.marker}]
    if found := _license(package):
        component["licenses"] = [found]
    return component


def _license(package: Locked) -> dict[str, Any] | None:
    """As the installed package says, if it is this version."""
    try:
        installed = metadata.metadata(package.name)
    except metadata.PackageNotFoundError:
        return None
    if installed["Version"] != package.version:
        return None
    if expression := installed.get("License-Expression"):
        return {"expression": expression}
    text = (installed.get("License") or "").strip()
    return {"license": {"name": text}} if text and len(text) < 80 and "\n" not in text else None
