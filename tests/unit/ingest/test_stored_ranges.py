"""Ranges of a run as they are stored: what this version writes, and what earlier versions wrote."""

import msgspec
import pytest

from conveyor.ingest.plan import list_of
from conveyor.model import Compression, ListFormat, Range, RunId, Source, Walk
from conveyor.states import TaskStatus

LIST = Source("uploads/acme/one", 1000, "a" * 64, ListFormat.TEXT, Compression.GZIP)
WALKS = [Walk(RunId("run_1"), 3, TaskStatus.FAILED), Walk(RunId("run_1"), None, None)]


def part(source: Source | Walk) -> Range:
    return Range(7, source, ListFormat.JSONL, Compression.NONE, start=0, end=None, first_index=0)


@pytest.mark.parametrize("source", [LIST, *WALKS])
def test_a_range_is_read_as_it_was_written(source: Source | Walk) -> None:
    stored = msgspec.json.encode(part(source))
    assert msgspec.json.decode(stored, type=Range) == part(source)
    assert type(msgspec.json.decode(stored, type=Range).source) is type(source)


def test_a_walk_is_stored_with_its_tag() -> None:
    stored = msgspec.json.decode(msgspec.json.encode(part(WALKS[0])))
    assert stored["source"] == ["run_1", 3, TaskStatus.FAILED, "walk"]
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({**stored, "source": ["run_1", 3, 2, "list"]}), type=Range)


OLD = (
    '{"number":7,"source":{"key":"%s","size":0,"sha256":"","format":"jsonl","compression":"none"},"format":"jsonl",'
    '"compression":"none","start":0,"end":null,"first_index":0,"header":null,"sha256":null,"index":0,"offset":0,'
    '"tasks":0,"invalid":0,"done":false}'
)


@pytest.mark.parametrize(
    ("key", "walk"), [('[\\"run_1\\",3,2]', WALKS[0]), ('[\\"run_1\\",-1,null]', WALKS[1])], ids=["shard", "whole run"]
)
def test_a_walk_of_an_earlier_version_is_read(key: str, walk: Walk) -> None:
    """It was JSON in the key of a source with an empty hash."""
    stored = msgspec.json.decode(OLD % key, type=Range)
    assert stored == part(walk)
    assert msgspec.structs.replace(stored, index=5, offset=6).source == walk


def test_only_a_list_has_a_source() -> None:
    assert list_of(part(LIST)) == LIST
    with pytest.raises(AssertionError):
        list_of(part(WALKS[0]))
