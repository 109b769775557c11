"""Sources that the server reads itself: checks the `source` of a job, and returns it for the ingest. It sends no
request: the ingest finds out whether the list exists."""

import re
from collections.abc import Mapping

from conveyor.accept.spec import SourceSpec
from conveyor.engines.source_buckets import SCHEME
from conveyor.errors import InvalidField
from conveyor.jobs.event_names import check_target
from conveyor.lists.inputs import headers_problem
from conveyor.model import RemoteSource, Source, TenantId
from conveyor.system import System

_DIGEST = re.compile(r"[0-9a-f]{64}")
# A version id or an ETag: visible ASCII, as headers and queries carry it.
_VERSION = re.compile(r"[!-~]{1,1024}")


def check_source(spec: SourceSpec) -> None:
    """Check the shape of a source. Raises InvalidField."""
    if (spec.upload_id is None) == (spec.url is None):
        raise InvalidField("`source` must have `upload_id` or `url`, and not both.", field="source")
    if spec.url is None:
        for name in ("headers", "version_id", "etag", "sha256"):
            if getattr(spec, name):
                raise InvalidField(
                    f"`source.{name}` is for a `url`; an upload has one version.", field=f"source.{name}"
                )
        return
    if spec.version_id is not None and not spec.url.startswith(SCHEME):
        raise InvalidField("`source.version_id` is for an object in a bucket. Use `etag`.", field="source.version_id")
    for name in ("version_id", "etag"):
        value = getattr(spec, name)
        if value is not None and not _VERSION.fullmatch(value):
            raise InvalidField(f"`source.{name}` must be visible ASCII characters.", field=f"source.{name}")
    if spec.sha256 is not None and not _DIGEST.fullmatch(spec.sha256.lower()):
        raise InvalidField("`source.sha256` must be 64 hexadecimal digits.", field="source.sha256")


def check_url(system: System, tenant: TenantId, url: str, headers: Mapping[str, str]) -> None:
    """Whether the server reads this URL for the tenant. Raises InvalidField, SourceRefused and TargetRefused."""
    if url.startswith(SCHEME):
        if headers:
            raise InvalidField("`source.headers` is for http and https.", field="source.headers")
        system.source_buckets.check(tenant, url)
        return
    check_target(url, system.settings.allow_private_targets, "source.url")
    wrong = headers_problem(dict(headers))
    if wrong is not None:
        raise InvalidField(f"`source.headers`: {wrong}.", field="source.headers")


def remote_source(system: System, tenant: TenantId, spec: SourceSpec) -> Source:
    """The source of a job. Raises as `check_url` does."""
    assert spec.url is not None
    check_url(system, tenant, spec.url, spec.headers)
    remote = RemoteSource(spec.url, spec.headers, spec.version_id, spec.etag)
    return Source("", 0, (spec.sha256 or "").lower(), spec.format, spec.compression, remote, spec.url_column)
