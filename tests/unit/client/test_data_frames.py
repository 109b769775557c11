"""DataFrames as tasks: by what a table can do, with or without the library that made it."""

import datetime
import math
from typing import Any

import pyarrow as pa
import pytest

from conveyor.client.data_frames import frame_tasks, is_frame, optional
from conveyor.errors import BadInput, FormatUnavailable

ROWS: list[tuple[Any, ...]] = [
    ("https://example.com/1", 7, "x", 1.5, datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
    ("https://example.com/2", None, None, math.nan, None),
]
NAMES = ["Link", "ID", "tag", "price", "at"]


class LikePandas:
    columns = NAMES

    def itertuples(self, index: bool, name: None) -> Any:
        assert not index
        return iter(ROWS)


class LikePolars:
    columns = NAMES

    def iter_rows(self) -> Any:
        return iter(ROWS)


def arrow() -> Any:
    return pa.table({name: [row[place] for row in ROWS] for place, name in enumerate(NAMES)})


@pytest.mark.parametrize("frame", [LikePandas(), LikePolars(), arrow()], ids=["pandas", "polars", "pyarrow"])
def test_rows_are_tasks_with_the_other_columns_as_data(frame: Any) -> None:
    assert is_frame(frame)
    assert list(frame_tasks(frame, None, "link")) == [
        {
            "url": "https://example.com/1",
            "id": "7",
            "tag": "x",
            "data": {"price": 1.5, "at": "2026-01-02T00:00:00+00:00"},
        },
        {"url": "https://example.com/2"},
    ]


def test_rows_for_a_function_are_objects() -> None:
    first, second = frame_tasks(LikePolars(), "python", None)
    assert first["ID"] == 7
    assert second == {"Link": "https://example.com/2"}


def test_a_table_without_the_column_says_which_it_has() -> None:
    with pytest.raises(BadInput, match=r"no column `url`. Its columns are `Link`, `ID`"):
        frame_tasks(LikePandas(), None, None)


def test_a_list_is_no_table() -> None:
    assert not any(map(is_frame, (["https://example.com"], "urls.txt", {"columns": 1}, iter([]))))


def test_a_missing_library_is_named_with_its_extra() -> None:
    with pytest.raises(FormatUnavailable, match=r"pip install 'conveyor-jobs\[parquet\]'"):
        optional("no_such_library", "parquet")
    with pytest.raises(FormatUnavailable, match=r"pip install no_such_library"):
        optional("no_such_library")


def test_columns_that_are_one_field_are_refused() -> None:
    table = pa.table({"url": ["https://example.com/"], "ID": ["a"], "id": ["b"]})
    with pytest.raises(BadInput, match="the same field"):
        list(frame_tasks(table, None, None))


def test_a_whole_number_stays_one_beside_an_empty_cell() -> None:
    table = pa.table({"url": ["https://example.com/"] * 2, "id": [123.0, None]})
    assert [task.get("id") for task in frame_tasks(table, None, None)] == ["123", None]
