"""Preview: the first lines of a list as an ingest will read them, for a form that shows them before it submits."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from conveyor.errors import ListUnreadable
from conveyor.lists.reader import InvalidListLine, ListReading, check_header, detect_compression, detect_format, read
from conveyor.model import Compression, JobKind, ListFormat

MAX_PREVIEW = 64 * 1024
# Tasks, and invalid lines, that a preview shows.
SHOWN = 20


class PreviewSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a list, plain. `is_cut`: the list goes on, so its last line here may be a part of one."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_PREVIEW)]
    kind: JobKind = JobKind.FETCH
    format: ListFormat | None = None
    url_column: str | None = None
    is_cut: bool = False


class PreviewedTask(msgspec.Struct, frozen=True):
    """A task of the list: its index, and its input."""

    index: int
    input: Any


class ListPreview(msgspec.Struct, frozen=True):
    """How the list is read: the first 20 `tasks` and `invalid` lines, and how many of each the text has."""

    # text, jsonl or csv.
    format: str
    tasks: list[PreviewedTask]
    invalid: list[InvalidListLine]
    task_count: int
    invalid_count: int


async def preview_list(spec: PreviewSpec) -> ListPreview:
    """Read the beginning of a list. Raises ListUnreadable for one that a job could not have."""
    data = spec.text.encode(errors="replace")
    if detect_compression(data) is not Compression.NONE:
        raise ListUnreadable("The list is compressed. A preview needs its plain text.")
    if spec.is_cut:
        data = data[: data.rfind(b"\n") + 1]
    form = spec.format or (ListFormat.CSV if spec.url_column else detect_format(data))
    header: bytes | None = None
    if form is ListFormat.CSV:
        header, _, data = data.partition(b"\n")
        check_header(header, spec.kind, spec.url_column)
    reading = ListReading(spec.kind, form, offset=0, header=header, url_column=spec.url_column)
    seeds, invalid = [], []
    async for batch in read(_whole(data), reading):
        seeds += batch.seeds
        invalid += batch.invalid
    shown = [PreviewedTask(seed.index, msgspec.json.decode(seed.input)) for seed in seeds[:SHOWN]]
    return ListPreview(form, shown, invalid[:SHOWN], len(seeds), len(invalid))


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data
