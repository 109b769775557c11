"""The list's own columns in tables: which there are, their titles, their types, and what becomes of odd values."""

from typing import Any

import msgspec
import pytest

from conveyor.export.columns import MAX_COLUMNS, ColumnScan, OwnColumn
from conveyor.export.lines import csv_header, csv_row
from conveyor.model import JobKind, RunId, Task, task_id
from conveyor.read.task_labels import labels_of
from conveyor.states import TaskStatus


def task(given_input: object, index: int = 0) -> Task:
    raw = msgspec.Raw(msgspec.json.encode(given_input))
    return Task(task_id(RunId("run_1"), index), index, raw, TaskStatus.SUCCEEDED)


def with_data(**data: Any) -> Task:
    return task({"url": "https://example.com/", "data": data})


def scanned(*tasks: Task, kind: JobKind = JobKind.FETCH) -> list[OwnColumn]:
    scan = ColumnScan(kind)
    scan.add(tasks)
    return scan.columns(["index", "status"])


def test_columns_keep_the_order_and_the_names_of_the_list() -> None:
    columns = scanned(with_data(sku="a", Price="9"), task("https://example.com/plain"), with_data(sku="b", more="x"))
    assert [column.title for column in columns] == ["sku", "Price", "more"]


def test_a_name_of_the_results_gets_a_prefix_whatever_its_case() -> None:
    columns = scanned(with_data(Status="x", **{"data.Status": "y", "a": "1", "A": "2"}))
    assert [column.title for column in columns] == ["data.Status", "data.data.Status", "a", "data.A"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2"], "text"),
        ([1, 2], "int"),
        ([1, 2.5], "float"),
        ([1, True], "text"),
        ([True, False], "bool"),
        ([1 << 70], "text"),
        ([{"a": 1}], "text"),
        ([None, 3], "int"),
    ],
)
def test_types(values: list[Any], kind: str) -> None:
    [column] = scanned(*(with_data(n=value) for value in values))
    assert column.type == kind


def test_a_value_of_another_type_is_left_to_the_input() -> None:
    column = OwnColumn("n", "n", "int")
    tasks = [with_data(n=value) for value in (7, "7", True, 1.5, None)]
    values = [column.value(task, labels_of(task.input, JobKind.FETCH)) for task in tasks]
    assert values == [7, None, None, None, None]
    task = with_data(n={"a": [1]})
    nested = OwnColumn("n", "n").value(task, labels_of(task.input, JobKind.FETCH))
    assert nested == '{"a":[1]}'


def test_columns_are_bounded() -> None:
    many = with_data(**{f"c{number}": "x" for number in range(MAX_COLUMNS + 50)})
    assert len(scanned(many)) == MAX_COLUMNS
    assert scanned(with_data(**{"n" * 201: "x", "": "y", "a\nb": "z"})) == []
    assert sum(len(column.name) for column in scanned(with_data(**{f"{n:0200d}": 1 for n in range(200)}))) <= 16 * 1024


def test_the_columns_of_a_handler_are_those_of_its_input() -> None:
    given = task({"city": "Rome", "n": 1, "id": 7, "tag": "t"})
    columns = scanned(given, kind=JobKind.PYTHON)
    assert [column.name for column in columns] == ["city", "n"]
    labels = labels_of(given.input, JobKind.PYTHON)
    assert (labels.id, labels.tag, labels.url) == ("7", "t", None)


@pytest.mark.parametrize("raw", [b"12", b'"x"', b"null", b"[1]", b'{"data":1e999}', b'{"data":"x","id":{}}'])
def test_any_input_has_labels(raw: bytes) -> None:
    labels_of(msgspec.Raw(raw), JobKind.FETCH)
    assert labels_of(msgspec.Raw(raw), JobKind.PYTHON).id is None


def test_a_csv_cell_is_never_a_formula() -> None:
    columns = [OwnColumn("=a", "=a")]
    assert csv_header(columns).decode().rstrip().endswith("url,id,tag,'=a")
    row = csv_row(with_data(**{"=a": "=1+1"}), JobKind.FETCH, columns).decode()
    assert row.rstrip().endswith("https://example.com/,,,'=1+1")


def test_a_file_of_the_version_before_keeps_its_columns() -> None:
    assert csv_header(None).decode().rstrip().endswith("finished_at")
    assert csv_row(with_data(a="x"), JobKind.FETCH, None).count(b"https://example.com/") == 1
