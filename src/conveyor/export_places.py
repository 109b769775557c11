"""Export places: the buckets and directories below which the server writes exports, as the operator lists them for each
tenant in CONVEYOR_EXPORT_BUCKETS. Gets the setting and the URL that a request names; they are compared as text, and no
request is sent."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from conveyor.errors import DestinationRefused, InvalidField, InvalidSetting

EVERY_TENANT = "*"

_SETTING = "CONVEYOR_EXPORT_BUCKETS"
_FORMS = "s3://BUCKET/PREFIX/, gs://BUCKET/PREFIX/, az://CONTAINER/PREFIX/ or file:///DIRECTORY/"
_URL = re.compile(r"(?P<scheme>s3|gs|az|file)://(?P<bucket>[^/]*)(?:/(?P<path>.*))?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Those of client/object_stores.py. A percent sign, a question mark or a backslash is none of them.
_SEGMENT = re.compile(r"[A-Za-z0-9._=+@,:-]+")
# A key of S3 has 1024, of which the names of the files need some.
_MAX_LENGTH = 900


class Location(NamedTuple):
    """A prefix in a bucket, or a directory, by whole segments."""

    scheme: str
    bucket: str
    segments: tuple[str, ...]

    @property
    def url(self) -> str:
        """With a slash at its end."""
        return f"{self.scheme}://" + "".join(f"{part}/" for part in (self.bucket, *self.segments))

    def is_below(self, other: "Location") -> bool:
        """Whether it is the other, or in it."""
        same = (self.scheme, self.bucket) == (other.scheme, other.bucket)
        return same and self.segments[: len(other.segments)] == other.segments


class ExportPlace(NamedTuple):
    """An entry of the setting."""

    tenant: str
    location: Location


class ExportPlaces:
    """The listed places. Nothing listed: every destination is refused."""

    def __init__(self, places: Sequence[ExportPlace] = ()) -> None:
        self._places = places

    @property
    def locations(self) -> list[Location]:
        return [place.location for place in self._places]

    @classmethod
    def parse(cls, setting: str | None) -> "ExportPlaces":
        """The places of CONVEYOR_EXPORT_BUCKETS. Raises InvalidSetting."""
        return cls([_place(text) for text in (setting or "").split()])

    def checked(self, tenant: str, to: str) -> str:
        """The destination, with a slash at its end. Raises InvalidField, and DestinationRefused alike for a place that
        is not listed and for another tenant's."""
        location = location_of(to)
        if location is None:
            raise InvalidField(
                f"`to` must be {_FORMS}. Between slashes, it has letters, digits and any of . _ = + @ , : -", field="to"
            )
        for place in self._places:
            if place.tenant in (tenant, EVERY_TENANT) and location.is_below(place.location):
                return location.url
        raise DestinationRefused


def location_of(url: str) -> Location | None:
    """The location that a URL names; None if it names none, or could be read in two ways."""
    found = _URL.fullmatch(url)
    if found is None or len(url) > _MAX_LENGTH:
        return None
    path = (found["path"] or "").removesuffix("/")
    segments = tuple(path.split("/")) if path else ()
    if not all(_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in segments):
        return None
    if found["scheme"] == "file":
        return None if found["bucket"] or not segments else Location("file", "", segments)
    return Location(found["scheme"], found["bucket"], segments) if _BUCKET.fullmatch(found["bucket"]) else None


def _place(text: str) -> ExportPlace:
    tenant, _, url = text.partition("=")
    location = location_of(url)
    if not tenant or location is None:
        raise InvalidSetting(
            f"{_SETTING}: {text!r} is invalid. Use TENANT={_FORMS}, separated by spaces; * is every tenant."
        )
    return ExportPlace(tenant, location)
