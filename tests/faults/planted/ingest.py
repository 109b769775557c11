"""Planted bugs of ingest, deadlines, housekeeping roles and downloads."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from conveyor import lifecycle
from conveyor.accept import resume
from conveyor.coordination.isolation import Isolation
from conveyor.engines.ingest_sums import sums_of
from conveyor.engines.queue import Delivery
from conveyor.engines.records import Records
from conveyor.engines.sqlite import ingests
from conveyor.engines.sqlite.ingests import SqliteIngests
from conveyor.ingest import ingester
from conveyor.ingest.ingester import Ingester
from conveyor.ingest.turns import Turn
from conveyor.lists import reader as lists
from conveyor.model import Counts, FailureThreshold, Ingested, InputJson, Job, JobId, RunId, TaskRef
from conveyor.process.executors.download.transfer import Transfer
from conveyor.process.task_progress import Track
from conveyor.recover import stuck
from tests.faults.planted import Planted
from tests.flow import test_download, test_ingest_again, test_ingest_turns, test_isolation, test_monitor


def divide_by_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def breach(threshold: FailureThreshold | None, counts: Counts) -> str | None:
        if threshold is None or threshold.ratio is None or counts.ended < threshold.after:
            return None
        return "failure threshold" if counts.failed / counts.ended > threshold.ratio else None

    monkeypatch.setattr(lifecycle, "_breach", breach)


def stop_at_the_first_bad_item(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def item(self: Isolation, name: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(Isolation, "item", item)


def resume_without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave_it(records: Records, job: Job, now: float) -> None:
        pass

    monkeypatch.setattr(resume, "restart_deadline", leave_it)


def requeue_as_never_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_again(index: int, input: InputJson, attempt: int, since: int) -> TaskRef:
        return TaskRef(index, input, attempt)

    monkeypatch.setattr(stuck, "TaskRef", made_again)


def forget_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Track, "since", property(lambda track: 0))


def count_every_restart_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def advanced(self: Transfer) -> bool:
        return self._resumable and self._stored > self._stored_before

    monkeypatch.setattr(Transfer, "advanced", property(advanced))


def keep_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turn, "step", lambda turn: False)


def end_batches_with_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    async def by_piece(groups: AsyncIterator[list[bytes]]) -> AsyncIterator[list[bytes]]:
        async for lines in groups:
            each = -(-len(lines) // -(-len(lines) // lists.BATCH))
            for start in range(0, len(lines), each):
                yield lines[start : start + each]

    monkeypatch.setattr(lists, "_batched", by_piece)


def close_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = SqliteIngests.seal

    async def sealed(
        self: SqliteIngests,
        job_id: JobId,
        run_id: RunId,
        reason: str | None,
        *,
        touched_at: float | None = None,
        code: str | None = None,
    ) -> bool:
        return await seal(self, job_id, run_id, reason, code=code)

    monkeypatch.setattr(SqliteIngests, "seal", sealed)


def add_up_all_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ingested(self: SqliteIngests, run_id: RunId) -> Ingested:
        return sums_of(*await self.ranges(run_id)).ingested

    monkeypatch.setattr(SqliteIngests, "ingested", ingested)


def add_up_at_every_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    added_up = (
        "UPDATE runs SET ranges = ranges + :ranges, total = (SELECT sum(tasks) FROM ranges WHERE run_id = :run_id) "
        "WHERE run_id = :run_id"
    )
    monkeypatch.setitem(ingests.SQL, "add_sums", added_up)


def count_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingester, "is_outage", lambda error: False)


def count_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(self: Ingester, job: Job, number: int | None, delivery: Delivery, error: Exception) -> None:
        self._failures[job.run.run_id, number] = delivery.receives - 1
        await by_failures(self, job, number, delivery, error)

    by_failures = Ingester._handle_failure
    monkeypatch.setattr(Ingester, "_handle_failure", handle)


PLANTED = [
    Planted(
        "an engine that is away spends the attempts of an ingest",
        count_outages,
        test_ingest_again.an_engine_that_is_away_fails_no_ingest,
    ),
    Planted(
        "an ingest gives up by how often its message came",
        count_receives,
        test_ingest_again.a_message_that_came_often_has_not_failed_often,
    ),
    Planted(
        "a long list makes the lists of others wait",
        keep_the_turn,
        test_ingest_turns.a_short_list_does_not_wait_for_a_long_one,
    ),
    Planted("ratio_of_no_task", divide_by_no_task, test_isolation.test_a_ratio_after_no_task_stops_nobody),
    Planted(
        "one_bad_run_stops_the_sweeper",
        stop_at_the_first_bad_item,
        test_isolation.test_the_sweeper_goes_on_after_a_run_that_makes_it_fail,
        (ZeroDivisionError,),
    ),
    Planted(
        "resumed_ingest_without_deadline",
        resume_without_a_deadline,
        test_monitor.test_a_resumed_ingest_has_its_deadline_again,
    ),
    Planted(
        "stuck_task_starts_its_deadline_over",
        requeue_as_never_begun,
        test_monitor.test_a_task_that_was_taken_over_keeps_to_its_deadline,
    ),
    Planted(
        "progress_without_the_first_attempt",
        forget_the_first_attempt,
        test_download.test_a_reference_that_knows_of_no_attempt_keeps_to_the_deadline_of_its_task,
    ),
    Planted(
        "download_restarts_for_ever",
        count_every_restart_as_progress,
        test_download.test_to_take_the_same_bytes_again_spends_an_attempt,
    ),
    Planted(
        "invalid_lines_twice",
        end_batches_with_pieces,
        test_ingest_again.test_invalid_lines_are_listed_once_after_checkpoints_that_failed,
    ),
    Planted(
        "idle_close_over_a_batch",
        close_without_another_look,
        test_ingest_again.test_a_batch_that_is_accepted_meanwhile_keeps_the_job_open,
    ),
    Planted(
        "status_adds_up_all_batches",
        add_up_all_ranges,
        test_ingest_again.test_a_batch_costs_the_same_whatever_was_added_before,
    ),
    Planted(
        "checkpoint_adds_up_all_batches",
        add_up_at_every_checkpoint,
        test_ingest_again.test_a_batch_costs_the_same_whatever_was_added_before,
    ),
]
