"""Fixed bugs of the engines and of retention."""

from typing import Any

import pytest

from conveyor.engines.sqlite import access, database
from conveyor.engines.sqlite import tasks as sqlite_tasks
from conveyor.engines.sqlite.expiring import Expiring
from conveyor.faults import crashpoint
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from tests.faults.planted import Planted
from tests.flow.test_retention import (
    test_a_death_between_an_uploads_object_and_its_row_leaves_neither,
    test_an_upload_is_kept_while_a_job_or_a_schedule_refers_to_it,
    test_expired_rows_are_removed_as_fast_as_they_come,
)
from tests.security.test_file_modes import new_files_are_private
from tests.support.places import quick_place
from tests.unit.engines import test_sqlite_database as test_database
from tests.unit.engines.test_sqlite_expiring import test_a_call_costs_the_same_however_many_are_live
from tests.unit.engines.test_sqlite_shrinking import the_file_shrinks_while_nothing_is_written


def reuse_run_numbers(patch: pytest.MonkeyPatch) -> None:
    """The table as it was made at first, whose highest number is given away again once its row is deleted."""
    changed = ["SELECT 1" if "numbered_runs" in script else script for script in database.MIGRATIONS]
    patch.setattr(database, "MIGRATIONS", tuple(changed))


def keep_uploads_for_jobs_alone(patch: pytest.MonkeyPatch) -> None:
    """References of rows are not looked for."""
    for name, text in access.SQL.items():
        ignored = text.replace(
            "EXISTS (SELECT 1 FROM documents WHERE upload_id = uploads.upload_id)", "EXISTS (SELECT 1 WHERE 0)"
        )
        patch.setitem(access.SQL, name, ignored)


def remove_the_row_of_an_upload_first(patch: pytest.MonkeyPatch) -> None:
    async def remove(self: Retention, removed: Removed) -> None:
        for upload in await self._records.access.expired_uploads(self._clock.now() - SETTLE_SECONDS, 1000):
            crashpoint("retention.upload.before")
            removed.uploads += await self._records.access.purge_upload(upload.upload_id)
            crashpoint("retention.upload.between")
            await self._blobs.delete([upload.key])
            crashpoint("retention.upload.after")

    patch.setattr(Retention, "_remove_uploads", remove)


def rest_while_there_is_more(patch: pytest.MonkeyPatch) -> None:
    """Expired rows that were removed do not count, so that the next step is made seconds later."""
    once = Retention.run_once

    async def uncounted(self: Retention) -> Removed:
        removed = await once(self)
        removed.expired = 0
        return removed

    patch.setattr(Retention, "run_once", uncounted)


def look_through_all_that_expire(patch: pytest.MonkeyPatch) -> None:
    """Past so many, every write makes the table anew."""
    put = Expiring.put

    def rebuild(self: Expiring[Any], key: str, value: Any, until: float, now: float) -> None:
        put(self, key, value, until, now)
        if len(self) > 4990:
            self._values = {name: entry for name, entry in self._values.items() if entry[1] > now}

    patch.setattr(Expiring, "put", rebuild)


def read_for_everyone_on_the_same_threads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(database, "is_in_role", lambda: False)
    patch.setattr(test_database, "PATIENCE", 0.5)


def read_until_the_page_is_full(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sqlite_tasks, "MAX_SCANNED", 1 << 40)


def keep_the_last_batch(patch: pytest.MonkeyPatch) -> None:
    """The thread that writes refers to the last batch while it waits for the next."""
    commit = database.SqliteDatabase._commit

    def remember(self: Any, batch: list[Any]) -> None:
        commit(self, batch)
        self.last_batch = batch

    patch.setattr(database.SqliteDatabase, "_commit", remember)


async def _written_rows_are_not_kept() -> None:
    with quick_place() as place:
        await test_database.TestGroupCommit().test_what_was_written_is_not_kept_until_the_next_write(place)


def leave_modes_to_the_umask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(database, "_URI", "file:{path}")


def keep_all_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(database, "shrink", lambda db: False)


PLANTED = [
    Planted("the file keeps its size after deletes", keep_all_pages, the_file_shrinks_while_nothing_is_written),
    Planted("others can read a new database", leave_modes_to_the_umask, new_files_are_private),
    Planted(
        "the rows of the last commit stay in memory",
        keep_the_last_batch,
        _written_rows_are_not_kept,
        faults=(TimeoutError,),
    ),
    Planted(
        "listings hold up roles",
        read_for_everyone_on_the_same_threads,
        test_database.test_a_role_reads_while_requests_hold_their_readers,
    ),
    Planted(
        "a filter that matches nothing reads a whole run",
        read_until_the_page_is_full,
        test_database.test_a_filter_that_matches_nothing_reads_so_many_rows_at_once,
    ),
    Planted(
        "an upload goes with its last job",
        keep_uploads_for_jobs_alone,
        test_an_upload_is_kept_while_a_job_or_a_schedule_refers_to_it,
    ),
    Planted(
        "the row of an upload goes before its object",
        remove_the_row_of_an_upload_first,
        test_a_death_between_an_uploads_object_and_its_row_leaves_neither,
    ),
    Planted(
        "retention rests while there are expired rows",
        rest_while_there_is_more,
        test_expired_rows_are_removed_as_fast_as_they_come,
    ),
    Planted(
        "the coordinator looks through all that is live",
        look_through_all_that_expire,
        test_a_call_costs_the_same_however_many_are_live,
    ),
    Planted(
        "the number of a deleted run is reused",
        reuse_run_numbers,
        test_database.test_a_late_writer_of_a_deleted_run_changes_no_later_one,
    ),
]
