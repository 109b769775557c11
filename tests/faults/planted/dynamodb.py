"""Fixed bugs of the DynamoDB engine, and of what is made for it: bounded details, sorted exports."""

from collections.abc import Iterable
from typing import Any

import pytest

from conveyor.engines.dynamodb import active_index, statements
from conveyor.engines.dynamodb import tasks as dynamodb_tasks
from conveyor.errors import EngineFailed, EngineRefused
from conveyor.export import sorting, spool
from conveyor.export.spool import SortedSpool
from conveyor.process import outcomes
from tests.faults import test_dynamodb
from tests.faults.planted import Planted
from tests.unit.export import test_sorting
from tests.unit.process import test_outcomes


def fail_a_batch_at_its_invalid_statement(patch: pytest.MonkeyPatch) -> None:
    """As if none of its statements had been executed."""
    code = statements._Batches._code

    def raising(self: Any, response: statements.Raw) -> str | None:
        found = code(self, response)
        if found == statements._REFUSED:
            raise EngineRefused("DynamoDB refused a statement: ValidationError")
        return found

    patch.setattr(statements._Batches, "_code", raising)


def read_a_whole_shard_for_a_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dynamodb_tasks, "_LEAST_SCANNED", 1 << 40)


def fail_a_listing_at_an_unknown_item(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(active_index, "readable", lambda items, read: [read(item) for item in items])


def merge_all_lists_at_once(patch: pytest.MonkeyPatch) -> None:
    test_sorting.make_small(patch)
    patch.setattr(sorting, "_next_merge", lambda state: state)


def keep_all_files_open(patch: pytest.MonkeyPatch) -> None:
    write = SortedSpool._write

    def write_one(self: SortedSpool, level: int, lines: Iterable[bytes]) -> None:
        patch.setattr(spool, "FAN_IN", 1 << 40)
        write(self, level, lines)

    patch.setattr(SortedSpool, "_write", write_one)


def keep_all_headers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outcomes, "_MAX_DETAIL", 1 << 40)


PLANTED = [
    Planted(
        "the memory of an export grows with its tasks",
        merge_all_lists_at_once,
        test_sorting.merges_read_few_lists_at_once,
    ),
    Planted("the open files of an export grow with its tasks", keep_all_files_open, test_sorting.spool_opens_few_files),
    Planted(
        "a response with huge headers makes its task unwritable",
        keep_all_headers,
        test_outcomes.huge_headers_are_bounded,
    ),
    Planted(
        "an invalid statement loses the counts of its batch",
        fail_a_batch_at_its_invalid_statement,
        test_dynamodb.ends_beside_an_invalid_one,
    ),
    Planted(
        "a filter that matches nothing reads a whole shard",
        read_a_whole_shard_for_a_page,
        test_dynamodb.test_a_filter_that_matches_nothing_reads_so_many_items,
    ),
    Planted(
        "a job of a newer version hides all active ones",
        fail_a_listing_at_an_unknown_item,
        test_dynamodb.test_a_job_of_a_newer_version_hides_no_other,
        (EngineFailed,),
    ),
]
