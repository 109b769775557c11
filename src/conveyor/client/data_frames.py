"""DataFrames in and out: rows of a table as tasks, and results as a table. Tables are those of pandas, polars and
pyarrow; none of them is imported before a caller asks for it, and a table is recognized by what it can do."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conveyor.errors import BadInput, FormatUnavailable

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "fetch": ("url", "method", "body", "id", "tag"),
    "download": ("url", "sha256", "id", "tag"),
}
_TEXTS = frozenset({"id", "tag"})
_URL = "url"
_BATCH = 1000
_SHOWN = 10


def is_frame(tasks: Any) -> bool:
    """Whether it is a table: a DataFrame of pandas or polars, or a table of pyarrow."""
    ways = ("itertuples", "iter_rows", "to_batches")
    return hasattr(tasks, "columns") and any(callable(getattr(tasks, way, None)) for way in ways)


def frame_tasks(frame: Any, kind: str | None, url: str | None) -> Iterator[Any]:
    """The rows as tasks. In a table of URLs, `url` names the column that has them; columns that no field of a task is
    named after are the task's `data`. Empty values are left out. Raises BadInput."""
    names = [str(name) for name in getattr(frame, "column_names", None) or frame.columns]
    if len(set(names)) < len(names):
        raise BadInput("The table has two columns of the same name. Rename one of them.")
    fields = _FIELDS.get(kind or "fetch")
    if fields is None:
        return (_filled(names, row) for row in _rows(frame))
    of_task = _fields_of(names, fields, url)
    return (_task(names, of_task, row) for row in _rows(frame))


def read_parquet(files: Sequence[Path]) -> Any:
    """The files of an export as one table of pyarrow. Raises FormatUnavailable."""
    parquet = optional("pyarrow.parquet", "parquet")
    # All parts have the same columns.
    return optional("pyarrow", "parquet").concat_tables([parquet.read_table(path) for path in files])


def optional(module: str, extra: str | None = None) -> Any:
    """A library that the caller has to install. Raises FormatUnavailable, which says how."""
    try:
        return importlib.import_module(module)
    except ImportError:
        what = module.partition(".")[0]
        package = what if extra is None else f"'conveyor-jobs[{extra}]'"
        raise FormatUnavailable(f"Tables need {what}. Install it: pip install {package}") from None


def _fields_of(names: Sequence[str], fields: Sequence[str], url: str | None) -> list[str | None]:
    wanted = _URL if url is None else url
    lower = [name.lower() for name in names]
    if wanted in names:
        place = names.index(wanted)
    elif wanted.lower() in lower:
        place = lower.index(wanted.lower())
    else:
        shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise BadInput(
            f'The table has no column `{wanted}`. Its columns are {shown}{more}. Name the one with the URLs: url="…".'
        )
    of_task = [name if name in fields and name != _URL else None for name in lower]
    of_task[place] = _URL
    taken = [field for field in of_task if field is not None]
    if len(set(taken)) < len(taken):
        raise BadInput("Two columns of the table are the same field of a task, but for their case. Rename one.")
    return of_task


def _rows(frame: Any) -> Iterator[Sequence[Any]]:
    if callable(getattr(frame, "iter_rows", None)):
        yield from frame.iter_rows()
    elif callable(getattr(frame, "itertuples", None)):
        yield from frame.itertuples(index=False, name=None)
    else:
        for batch in frame.to_batches(max_chunksize=_BATCH):
            columns = [column.to_pylist() for column in batch.columns]
            yield from zip(*columns, strict=True)


def _task(names: Sequence[str], of_task: Sequence[str | None], row: Sequence[Any]) -> dict[str, Any]:
    task: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for name, field, value in zip(names, of_task, row, strict=True):
        if _is_empty(value):
            continue
        if field is None:
            data[name] = _plain(value)
        else:
            task[field] = _label(value) if field in _TEXTS else value
    return {**task, "data": data} if data else task


def _label(value: Any) -> str:
    """A text. pandas turns whole numbers into floats where a cell of the column is empty."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _filled(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in zip(names, row, strict=True) if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    """None, NaN and the like, which are not equal to themselves."""
    if value is None:
        return True
    try:
        return bool(value != value)  # noqa: PLR0124  (only NaN, NaT and NA differ from themselves)
    except (TypeError, ValueError):
        # pandas.NA has no truth value; an array has none either.
        return type(value).__name__ == "NAType"


def _plain(value: Any) -> Any:
    """Arrays as lists, and times of pandas as ISO 8601."""
    if callable(getattr(value, "tolist", None)) and hasattr(value, "ndim") and value.ndim > 0:
        return value.tolist()
    return value.isoformat() if callable(getattr(value, "isoformat", None)) else value
