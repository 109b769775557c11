"""Responses about uploads and invalid lines."""

import msgspec

from conveyor.api.schemas.shape import Shape


class UploadShape(Shape, frozen=True):
    """An upload of one list."""

    upload_id: str
    size: int
    sha256: str
    stored: bool
    expires_at: str
    # A fresh link, while the list is not stored and goes directly to an object store.
    url: str | msgspec.UnsetType = msgspec.UNSET
    method: str | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class InvalidLineShape(Shape, frozen=True):
    """An invalid line of a list; `line` counts from 1."""

    line: int
    reason: str
    # The start of the line.
    text: str


class InvalidLinesPage(Shape, frozen=True):
    """Invalid lines, in the order of the list."""

    items: list[InvalidLineShape]
    next_cursor: str | None
