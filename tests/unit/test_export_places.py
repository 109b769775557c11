"""Where the server may write exports: the setting, and what a request names."""

from pathlib import Path
from typing import Any

import pytest

from conveyor.errors import DestinationRefused, InvalidField, InvalidSetting
from conveyor.export_places import ExportPlaces
from conveyor.settings import Settings, export_places

SETTING = "acme=s3://data/acme/ acme=file:///srv/acme other=s3://data/other/ *=gs://shared/all/ *=az://whole"


def checked(to: str, tenant: str = "acme") -> str:
    return ExportPlaces.parse(SETTING).checked(tenant, to)


@pytest.mark.parametrize(
    ("to", "written"),
    [
        ("s3://data/acme/", "s3://data/acme/"),
        ("s3://data/acme", "s3://data/acme/"),
        ("s3://data/acme/date=2026-01-01/x", "s3://data/acme/date=2026-01-01/x/"),
        ("s3://data/acme/..hidden/a..b/", "s3://data/acme/..hidden/a..b/"),
        ("file:///srv/acme/today/", "file:///srv/acme/today/"),
        ("gs://shared/all/acme", "gs://shared/all/acme/"),
        ("az://whole", "az://whole/"),
        ("az://whole/a/b/", "az://whole/a/b/"),
    ],
)
def test_below_a_listed_place(to: str, written: str) -> None:
    assert checked(to) == written


@pytest.mark.parametrize(
    "to",
    [
        # Whole segments, the same scheme, the same bucket.
        "s3://data/",
        "s3://data/acm/",
        "s3://data/acme2/",
        "s3://data/ACME/",
        "s3://Data/acme/",
        "s3://data2/acme/",
        "s3://data.acme/acme/",
        "gs://data/acme/",
        "gs://shared/",
        "gs://shared/allofit/",
        "file:///srv/",
        "file:///srv/acmes/",
        "file:///data/acme/",
        "az://wholes/",
        # Another tenant's, as one that nobody has.
        "s3://data/other/",
        "s3://data/nobody/",
    ],
)
def test_elsewhere_is_refused(to: str) -> None:
    with pytest.raises(DestinationRefused) as refused:
        checked(to)
    assert refused.value.message == DestinationRefused().message


@pytest.mark.parametrize(
    "to",
    [
        "",
        "s3://",
        "s3:///acme/",
        "s3:/data/acme/",
        "S3://data/acme/",
        "http://data/acme/",
        "/srv/acme/",
        "file://srv/acme/",
        "file:///",
        "file://localhost/srv/acme/",
        "s3://data/acme/../other/",
        "s3://data/acme/./x/",
        "s3://data/acme//x/",
        "s3://data//acme/",
        "s3://data/acme//",
        "s3://data/acme/..",
        "s3://data/acme/%2e%2e/other/",
        "s3://data/acme/%2E%2E%2Fother/",
        "s3://data/acme%2fx/",
        "file:///srv/acme/../../etc/",
        "file:///srv/acme/%2e%2e/etc/",
        "s3://data/acme\\..\\other/",
        "s3://data/acme/x?versionId=1",
        "s3://data/acme/?endpoint=http://evil.example",
        "s3://data/acme/#x",
        "s3://key:secret@data/acme/",
        "s3://key@data/acme/",
        "s3://data:9000/acme/",
        "s3://data/acme/ x/",
        "s3://data/acme/x\n",
        "s3://data/acme/\x00/",
        "s3://data/acme/ﬀ/",
        "s3://data/acme/\u2024\u2024/other/",
        " s3://data/acme/",
        "s3://data/acme/" + "a/" * 450,
    ],
)
def test_what_could_be_read_in_two_ways_is_invalid(to: str) -> None:
    with pytest.raises(InvalidField, match="`to` must be"):
        checked(to)


@pytest.mark.parametrize("setting", [None, "", "  "])
def test_nothing_listed(setting: str | None) -> None:
    with pytest.raises(DestinationRefused):
        ExportPlaces.parse(setting).checked("acme", "s3://data/acme/")


def test_each_tenant_has_its_own() -> None:
    assert checked("s3://data/other/x/", tenant="other") == "s3://data/other/x/"
    assert checked("gs://shared/all/x/", tenant="third") == "gs://shared/all/x/"
    for tenant in ("other", "third", "*", ""):
        with pytest.raises(DestinationRefused):
            checked("s3://data/acme/", tenant=tenant)


@pytest.mark.parametrize(
    "setting",
    [
        "s3://data/acme/",
        "=s3://data/acme/",
        "acme=",
        "acme=data/acme",
        "acme=https://data/acme/",
        "acme=s3://",
        "acme=s3://da*ta/",
        "acme=s3://data/*/",
        "acme=s3://data/../x/",
        "acme=s3://data/acme/?region=eu-central-1",
        "acme=s3://user:secret@data/",
        "acme=file:///",
        "acme=s3://data/,other=s3://data/ x",
    ],
)
def test_what_is_no_place_is_named(setting: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^CONVEYOR_EXPORT_BUCKETS: .* is invalid\. Use TENANT=s3://BUCKET"):
        Settings.load({"CONVEYOR_EXPORT_BUCKETS": setting})


@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("file:///srv/conveyor/", {}),
        ("file:///srv/conveyor/blobs/results/", {}),
        ("file:///srv/", {}),
        ("file:///mnt/all/x/", {"blobs": "file:///mnt/all"}),
        ("s3://data/conveyor/results/", {"blobs": "s3://data/conveyor?region=eu-central-1"}),
        ("s3://data/", {"blobs": "s3://data/conveyor"}),
        # What a place may not have, and blobs may.
        ("s3://data/", {"blobs": "s3://data//conveyor/"}),
        ("s3://data/conveyor/", {"blobs": "s3://data//conveyor//"}),
        ("s3://data/", {"blobs": "s3://data/con~veyor"}),
        ("az://data/a/", {"blobs": "az://data/a#b?account=x"}),
    ],
)
def test_never_over_the_data_of_the_server(place: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="where the server keeps its own data"):
        Settings.load({}, data=Path("/srv/conveyor"), export_buckets=f"*={place}", **more)


def test_beside_the_data_of_the_server() -> None:
    given: dict[str, Any] = {"data": Path("/srv/conveyor"), "blobs": "s3://data/conveyor"}
    settings = Settings.load({}, **given, export_buckets="*=s3://data/conveyor2/ *=file:///srv/conveyor-exports/")
    assert export_places(settings).checked("acme", "s3://data/conveyor2/a/") == "s3://data/conveyor2/a/"
