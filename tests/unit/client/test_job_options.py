"""Typed options are those of the server, name by name."""

import typing
from typing import Any

import msgspec
import pytest

from conveyor import model
from conveyor.accept.rerun import Selection
from conveyor.accept.spec import JobSpec
from conveyor.client import job_options as options
from conveyor.errors import BadInput
from conveyor.export.request import ExportBodies, ExportCompression, ExportFormat, ExportSelect, ExportSpec
from conveyor.states import TaskStatus

PAIRS: list[tuple[Any, type[msgspec.Struct]]] = [
    (options.JobOptions, model.Options),
    (options.BackoffOptions, model.Backoff),
    (options.GatewayOptions, model.Gateway),
    (options.PooledGatewayOptions, model.PooledGateway),
    (options.FailureThresholdOptions, model.FailureThreshold),
    (options.OutageOptions, model.Outage),
    (options.BreakerOptions, model.Breaking),
    (options.DownloadOptions, model.Download),
    (options.ExportApiOptions, model.ExportApi),
    (options.ExportCallOptions, model.ExportCall),
    (options.ExportPollOptions, model.ExportPoll),
    (options.ExportRetryOptions, model.ExportRetry),
]


def test_names_of_filters() -> None:
    assert {*typing.get_type_hints(options.Filter), "changed"} == set(ExportSelect.__struct_fields__)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda kind: kind.__name__)
def test_names(ours: Any, theirs: type[msgspec.Struct]) -> None:
    assert set(typing.get_type_hints(ours)) == set(theirs.__struct_fields__)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda kind: kind.__name__)
def test_what_may_be_left_out(ours: Any, theirs: type[msgspec.Struct]) -> None:
    needed = {field.name for field in msgspec.structs.fields(theirs) if field.required}
    assert ours.__required_keys__ == needed


def test_exports() -> None:
    named = set(typing.get_type_hints(options.ExportOptions)) - set(ExportSelect.__struct_fields__)
    # `to` is an argument of export_to.
    assert named == set(ExportSpec.__struct_fields__) - {"select", "to"}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (options.Kind, model.JobKind),
        (options.ListFormat, model.ListFormat),
        (options.Compression, model.Compression),
        (options.ResultLayout, model.ResultLayout),
        (options.ExportFormat, ExportFormat),
        (options.ExportCompression, ExportCompression),
        (options.ExportBodies, ExportBodies),
    ],
)
def test_words(words: Any, values: Any) -> None:
    assert set(typing.get_args(words)) == {value.value for value in values}


def test_statuses() -> None:
    assert set(typing.get_args(options.Status)) == {status.label for status in TaskStatus}


def test_a_submit_can_say_all_that_a_job_can() -> None:
    """Beside its options: what Client.submit has as parameters, and `mode` of open_job."""
    beside = set(JobSpec.__struct_fields__) - set(model.Options.__struct_fields__)
    assert beside == {"kind", "name", "tasks", "source", "mode", "result_layout", "notify", "replaces"}


@pytest.mark.parametrize(
    "given", [{}, {"failed": True}, {"cancelled": True, "tag": "x"}, {"http_status": 500}, {"damaged": True}]
)
def test_a_choice_is_one_that_the_server_takes(given: dict[str, Any]) -> None:
    choice = options.rerun_choice(**given)
    assert choice == "failed" or msgspec.convert(choice, Selection)


@pytest.mark.parametrize("extract_only", [False, True])
def test_an_empty_choice_of_tasks_is_not_all_of_them(extract_only: bool) -> None:
    with pytest.raises(BadInput, match="`indexes` is empty"):
        options.rerun_choice(indexes=[], extract_only=extract_only)
