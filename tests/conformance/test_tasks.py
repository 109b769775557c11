"""The Tasks seam, over every engine behind it."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.dynamodb import tasks as dynamodb_tasks
from conveyor.engines.dynamodb.counters import Tally
from conveyor.engines.dynamodb.tasks import DynamoTasks
from conveyor.engines.postgres import tasks as postgres_tasks
from conveyor.engines.postgres.queries import parse
from conveyor.engines.sqlite import tasks as sqlite_tasks
from conveyor.engines.tasks import CopiesRuns, RunTally, TaskEvent, TaskFilter, Tasks
from conveyor.errors import BadCursor
from conveyor.lists.inputs import MAX_INPUT_BYTES
from conveyor.model import (
    UNCHANGED,
    BodyRef,
    Counts,
    InputJson,
    Outcome,
    Replaced,
    ResultDetail,
    RunId,
    RunKey,
    Task,
    TaskEnd,
    TaskError,
    TaskId,
    TaskSeed,
    shard_of,
    task_id,
)
from conveyor.process.outcomes import detail_json
from conveyor.read.results import result_page
from conveyor.read.walk import matches
from conveyor.states import TERMINAL, TaskStatus
from tests.conformance.conftest import ENGINES
from tests.support.clocks import ManualClock
from tests.support.make_jobs import OTHER, end, make_run, seeds

SUCCEEDED, FAILED, CANCELLED, PENDING = (
    TaskStatus.SUCCEEDED,
    TaskStatus.FAILED,
    TaskStatus.CANCELLED,
    TaskStatus.PENDING,
)
SHARDS = [1, 4, 16]
EVERYTHING = TaskFilter()

several = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def filled(tasks: Tasks, clock: ManualClock, count: int, shards: int = 1) -> RunKey:
    run = make_run(clock, shards)
    await tasks.put(run, seeds(count))
    return run


async def one(tasks: Tasks, run: RunKey, index: int) -> Task:
    found = await tasks.task(run, task_id(run.run_id, index))
    assert found is not None
    return found


async def walk(tasks: Tasks, run: RunKey, shard: int, limit: int, where: TaskFilter = EVERYTHING) -> list[Task]:
    """A shard in pages, each asked for only while the last was full."""
    got: list[Task] = []
    after: TaskId | None = None
    while True:
        page = await tasks.page(run, shard, after, limit, where)
        assert len(page) <= limit
        got += page
        if len(page) < limit:
            return got
        after = page[-1].task_id


def model_counts(statuses: dict[int, TaskStatus]) -> Counts:
    seen = Counter(statuses.values())
    return Counts(seen[SUCCEEDED], seen[FAILED], seen[CANCELLED])


@pytest.mark.parametrize("shards", [1, 4])
async def test_a_plain_cursor_resumes_after_its_task(tasks: Tasks, clock: ManualClock, shards: int) -> None:
    """One from a listing before the job had shards, too: nothing is missed, and nothing listed twice."""
    run = await filled(tasks, clock, 60, shards)
    ids = sorted(task_id(run.run_id, index) for index in range(60))
    for limit in (1, 7, 100):
        for at in (0, 23, 58, 59):
            cursor: str | None = ids[at]
            listed: list[TaskId] = []
            while cursor is not None:
                page = await result_page(tasks, run, EVERYTHING, limit, cursor)
                listed += [task.task_id for task in page.items]
                cursor = page.next_cursor
            assert listed == ids[at + 1 :], (limit, at)


class TestPut:
    async def test_a_task_starts_pending(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 3)
        found = await one(tasks, run, 1)
        assert found == Task(task_id(run.run_id, 1), 1, msgspec.Raw(b'"input 1"'), PENDING)
        assert await tasks.counts(run) == Counts()

    async def test_a_task_that_is_there_stays_as_it_is(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 4)
        await tasks.finish(run, [end(0), end(1, FAILED, code="boom")])
        before = [await one(tasks, run, index) for index in range(4)]
        await tasks.put(run, [TaskSeed(index, InputJson('"another"')) for index in range(6)])
        assert [await one(tasks, run, index) for index in range(4)] == before
        assert bytes((await one(tasks, run, 5)).input) == b'"another"'
        assert await tasks.counts(run) == Counts(succeeded=1, failed=1)
        assert await tasks.recount(run) == Counts(succeeded=1, failed=1)

    async def test_the_same_index_twice_in_one_batch_is_one_task(self, tasks: Tasks, clock: ManualClock) -> None:
        run = make_run(clock)
        await tasks.put(run, [*seeds(3), *seeds(3)])
        assert len(await tasks.page(run, 0, None, 10, EVERYTHING)) == 3

    async def test_putting_at_once_makes_each_once(self, tasks: Tasks, clock: ManualClock) -> None:
        run = make_run(clock, 4)
        await asyncio.gather(*(tasks.put(run, seeds(60, start)) for start in range(0, 100, 10)))
        got = [task.index for shard in range(4) for task in await walk(tasks, run, shard, 1000)]
        assert sorted(got) == list(range(150))

    async def test_nothing_is_put(self, tasks: Tasks, clock: ManualClock) -> None:
        run = make_run(clock)
        await tasks.put(run, [])
        assert await tasks.page(run, 0, None, 10, EVERYTHING) == []

    async def test_large_indexes_and_inputs(self, tasks: Tasks, clock: ManualClock) -> None:
        run = make_run(clock)
        text = InputJson(json.dumps("x" * 250_000))
        await tasks.put(run, [TaskSeed((1 << 40) - 1, text)])
        assert bytes((await one(tasks, run, (1 << 40) - 1)).input) == text.encode()

    @several
    @given(values=st.lists(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists), max_size=6))
    async def test_inputs_come_back_byte_for_byte(self, tasks: Tasks, clock: ManualClock, values: list[object]) -> None:
        run = make_run(clock)
        texts = [json.dumps(value, ensure_ascii=number % 2 == 0) for number, value in enumerate(values)]
        await tasks.put(run, [TaskSeed(index, InputJson(text)) for index, text in enumerate(texts)])
        page = await tasks.page(run, 0, None, 100, EVERYTHING)
        assert {task.index: bytes(task.input).decode() for task in page} == dict(enumerate(texts))


class TestGuard:
    async def test_it_names_those_that_exist_and_have_not_ended(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 10)
        await tasks.finish(run, [end(1), end(2, FAILED, code="x"), end(3, CANCELLED)])
        assert await tasks.unfinished(run, [0, 1, 2, 3, 4, 4, 99]) == frozenset({0, 4})
        assert await tasks.unfinished(run, []) == frozenset()
        assert await tasks.unfinished(make_run(clock), [0, 1]) == frozenset()

    async def test_it_takes_a_large_batch(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 6400, 4)
        assert await tasks.unfinished(run, range(6400)) == frozenset(range(6400))


class TestFinish:
    async def test_an_end_is_read_back(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 3)
        detail = ResultDetail(
            error=TaskError("http_503", 'the target says: "no" ü'),
            content_type="text/html; charset=utf-8",
            final_url="https://example.com/é?a=1",
            headers=[("set-cookie", "a=1"), ("set-cookie", "b=2\u2028")],
            body=BodyRef("results/acme/j/r/seg_1", 12, "ab" * 32, 4096),
            elapsed=1.25,
            extracted=BodyRef("", 9, "cd" * 32, inline=b'{"a":"\xc3\xbc"}'),
        )
        text = msgspec.json.encode(detail).decode()
        await tasks.finish(run, [end(1, FAILED, code="http_503", http_status=503, attempts=4, detail=text, at=5.5)])
        found = await one(tasks, run, 1)
        assert (found.status, found.attempts, found.http_status, found.error_code) == (FAILED, 4, 503, "http_503")
        assert found.detail == detail
        assert found.finished_at == pytest.approx(5.5)
        assert bytes(found.input) == b'"input 1"'

    async def test_it_says_what_moved_and_counts_it(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 6)
        finished = await tasks.finish(run, [end(0), end(1, FAILED, code="x"), end(2, CANCELLED)])
        assert finished.moved == frozenset({0, 1, 2})
        assert finished.counts == Counts(1, 1, 1)
        finished = await tasks.finish(run, [end(0, FAILED, code="y"), end(3), end(77)])
        assert finished.moved == frozenset({3})
        assert finished.counts == Counts(2, 1, 1)
        assert (await one(tasks, run, 0)).status is SUCCEEDED
        assert await tasks.counts(run) == await tasks.recount(run) == Counts(2, 1, 1)
        assert await tasks.error_codes(run, 10) == [("x", 1)]

    async def test_the_first_of_several_ends_in_a_batch_counts(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 2)
        finished = await tasks.finish(
            run, [end(0, attempts=1), end(0, FAILED, code="late", attempts=2), end(0, attempts=3)]
        )
        assert finished.moved == frozenset({0})
        assert finished.counts == Counts(succeeded=1)
        found = await one(tasks, run, 0)
        assert (found.status, found.attempts) == (SUCCEEDED, 1)
        assert await tasks.error_codes(run, 10) == []

    async def test_an_ended_task_keeps_its_first_end(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 1)
        await tasks.finish(run, [end(0, FAILED, code="x", http_status=500, attempts=2, at=7.0)])
        before = await one(tasks, run, 0)
        for status in sorted(TERMINAL):
            finished = await tasks.finish(run, [end(0, status, code="z", attempts=9, at=8.0)])
            assert finished.moved == frozenset()
            assert finished.counts == Counts(failed=1)
        assert await one(tasks, run, 0) == before

    async def test_a_run_that_nobody_knows_moves_nothing(self, tasks: Tasks, clock: ManualClock) -> None:
        finished = await tasks.finish(make_run(clock), [end(0), end(1)])
        assert finished.moved == frozenset()
        assert finished.counts == Counts()

    async def test_nothing_is_finished(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 2)
        await tasks.finish(run, [end(0)])
        finished = await tasks.finish(run, [])
        assert finished.moved == frozenset()
        assert finished.counts == Counts(succeeded=1)

    async def test_a_failure_need_not_have_a_code(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 2)
        finished = await tasks.finish(run, [end(0, FAILED), end(1, FAILED, code="x")])
        assert finished.counts == Counts(failed=2)
        assert (await one(tasks, run, 0)).error_code is None
        assert await tasks.error_codes(run, 10) == [("x", 1)]

    async def test_callers_at_once_move_each_task_once(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 300, 4)
        statuses = sorted(TERMINAL)
        batches = [
            [
                end(index, statuses[caller % 3], code="x" if statuses[caller % 3] is FAILED else None, attempts=caller)
                for index in range(caller * 10, caller * 10 + 120)
            ]
            for caller in range(20)
        ]
        finished = await asyncio.gather(*(tasks.finish(run, batch) for batch in batches))
        moved = Counter(index for each in finished for index in each.moved)
        assert moved == Counter(range(300))
        counts = await tasks.counts(run)
        assert counts == await tasks.recount(run)
        assert counts.ended == 300
        winners = {index: caller for caller, each in enumerate(finished) for index in each.moved}
        for index in range(0, 300, 37):
            found = await one(tasks, run, index)
            assert (found.attempts, found.status) == (winners[index], statuses[winners[index] % 3])
        assert max(each.counts.ended for each in finished) == 300

    @several
    @given(
        count=st.integers(1, 12),
        batches=st.lists(
            st.lists(
                st.tuples(st.integers(0, 14), st.sampled_from(sorted(TERMINAL)), st.sampled_from(["a", "b", "c"])),
                max_size=12,
            ),
            max_size=6,
        ),
        shards=st.sampled_from(SHARDS),
    )
    async def test_counts_are_exact_whatever_is_reported(
        self,
        tasks: Tasks,
        clock: ManualClock,
        count: int,
        batches: list[list[tuple[int, TaskStatus, str]]],
        shards: int,
    ) -> None:
        run = await filled(tasks, clock, count, shards)
        model: dict[int, TaskStatus] = {}
        codes: Counter[str] = Counter()
        for batch in batches:
            expected = set()
            for index, status, code in batch:
                if index < count and index not in model:
                    model[index] = status
                    expected.add(index)
                    if status is FAILED:
                        codes[code] += 1
            ends = [end(index, status, code=code if status is FAILED else None) for index, status, code in batch]
            finished = await tasks.finish(run, ends)
            assert finished.moved == expected
            assert finished.counts == model_counts(model)
        assert await tasks.counts(run) == await tasks.recount(run) == model_counts(model)
        assert dict(await tasks.error_codes(run, 100)) == dict(codes)
        assert await tasks.unfinished(run, range(15)) == set(range(count)) - set(model)


class TestCancel:
    async def test_it_is_bounded_and_exact(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 25, 4)
        await tasks.finish(run, [end(index) for index in range(5)])
        moved = []
        while step := await tasks.cancel_pending(run, 8, 9.0):
            moved.append(step)
            counts = await tasks.counts(run)
            assert counts == Counts(succeeded=5, cancelled=sum(moved))
        assert sum(moved) == 20
        assert max(moved) <= 8
        assert await tasks.recount(run) == Counts(succeeded=5, cancelled=20)
        found = await one(tasks, run, 10)
        assert (found.status, found.finished_at) == (CANCELLED, pytest.approx(9.0))
        assert (await one(tasks, run, 0)).status is SUCCEEDED

    async def test_cancelled_tasks_do_not_finish(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 3)
        await tasks.cancel_pending(run, 100, 9.0)
        finished = await tasks.finish(run, [end(0), end(1, FAILED, code="x")])
        assert finished.moved == frozenset()
        assert finished.counts == Counts(cancelled=3)
        assert await tasks.unfinished(run, range(3)) == frozenset()

    async def test_it_races_with_finish_and_each_task_ends_once(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 200, 4)
        results = await asyncio.gather(
            *(tasks.cancel_pending(run, 15, 9.0) for _ in range(8)),
            *(tasks.finish(run, [end(index) for index in range(start, start + 40)]) for start in range(0, 200, 20)),
        )
        cancelled = sum(each for each in results if isinstance(each, int))
        finished = sum(len(each.moved) for each in results if not isinstance(each, int))
        counts = await tasks.counts(run)
        assert counts == await tasks.recount(run) == Counts(succeeded=finished, cancelled=cancelled)

    async def test_an_unknown_run_has_nothing_to_cancel(self, tasks: Tasks, clock: ManualClock) -> None:
        assert await tasks.cancel_pending(make_run(clock), 10, 9.0) == 0


class TestRecount:
    async def test_it_tells_the_truth_of_the_rows(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 10, 4)
        assert await tasks.recount(run) == Counts()
        await tasks.finish(run, [end(0), end(1), end(2, FAILED, code="x")])
        assert await tasks.recount(run) == Counts(2, 1, 0)
        assert await tasks.counts(run) == Counts(2, 1, 0)
        assert await tasks.error_codes(run, 10) == [("x", 1)]
        assert await tasks.recount(make_run(clock)) == Counts()
        assert await tasks.counts(make_run(clock)) == Counts()


class TestReplaced:
    """A task of a rerun has the outcome from before, and a run counts those that its own outcomes replace."""

    PRIORS = ("1", "2timeout", "3", "2", "2http_500", "2timeout")

    async def rerun(self, tasks: Tasks, clock: ManualClock, shards: int, count: int = 12) -> RunKey:
        run = make_run(clock, shards)
        priors = [self.PRIORS[index % 6] for index in range(count)]
        await tasks.put(run, [TaskSeed(seed.index, seed.input, priors[seed.index]) for seed in seeds(count)])
        return run

    @pytest.mark.parametrize("shards", SHARDS)
    async def test_it_counts_by_status_and_code(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        run = await self.rerun(tasks, clock, shards)
        assert await tasks.replaced(run) == Replaced()
        await tasks.finish(run, [end(0), end(1), end(2, FAILED, code="x"), end(2)])
        assert await tasks.replaced(run) == Replaced(Counts(1, 1, 1), {"timeout": 1})
        await tasks.finish(run, [end(0, FAILED), end(3, FAILED, code="timeout"), end(4), end(5)])
        assert await tasks.replaced(run) == Replaced(Counts(1, 4, 1), {"timeout": 2, "http_500": 1})
        assert await tasks.error_codes(run, 10) == [("timeout", 1), ("x", 1)], "its own codes, and no others"
        assert await tasks.counts(run) == Counts(4, 2, 0)

    async def test_a_cancelled_task_replaces_nothing(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await self.rerun(tasks, clock, 1)
        await tasks.finish(run, [end(1), end(7, CANCELLED)])
        while await tasks.cancel_pending(run, 5, 1.0):
            pass
        assert await tasks.replaced(run) == Replaced(Counts(0, 1, 0), {"timeout": 1})
        assert await tasks.counts(run) == Counts(1, 0, 11)

    async def test_a_first_run_replaces_nothing(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 3)
        await tasks.finish(run, [end(0), end(1, FAILED, code="x")])
        assert await tasks.replaced(run) == Replaced()
        assert await tasks.replaced(make_run(clock)) == Replaced()

    async def test_a_part_of_a_rerun_without_tasks_decides_nothing(self, tasks: Tasks, clock: ManualClock) -> None:
        """One range of its ingest selects no task, and it may be the first."""
        run = make_run(clock)
        await tasks.put(run, [])
        await tasks.put(run, [TaskSeed(0, InputJson('"input 0"'), "2timeout")])
        await tasks.finish(run, [end(0)])
        assert await tasks.replaced(run) == Replaced(Counts(0, 1, 0), {"timeout": 1})

    async def test_a_task_keeps_its_first_prior(self, tasks: Tasks, clock: ManualClock) -> None:
        """An ingest that resumes after a crash puts its tasks again."""
        run = await self.rerun(tasks, clock, 1)
        await self.rerun(tasks, clock, 1)
        await tasks.put(run, [TaskSeed(0, InputJson('"input 0"'), "2other")])
        await tasks.finish(run, [end(0)])
        assert await tasks.replaced(run) == Replaced(Counts(1, 0, 0), {})

    @pytest.mark.parametrize("shards", [1, 4])
    async def test_a_recount_counts_them_too(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        run = await self.rerun(tasks, clock, shards, 60)
        await tasks.finish(run, [end(index) for index in range(30)])
        expected = await tasks.replaced(run)
        assert expected == Replaced(Counts(5, 20, 5), {"timeout": 10, "http_500": 5})
        await spoil_counts(tasks, run)
        assert await tasks.replaced(run) != expected
        assert await tasks.recount(run) == Counts(30, 0, 0)
        assert (await tasks.replaced(run)).counts == expected.counts
        await tasks.finish(run, [end(30)])
        assert (await tasks.replaced(run)).counts == Counts(6, 20, 5)

    async def test_another_process_knows_it(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await self.rerun(tasks, clock, 1)
        other = as_it_stands(tasks)
        for value in vars(other).values():
            if isinstance(value, dict | set):
                value.clear()
        await other.finish(run, [end(1)])
        assert await tasks.replaced(run) == await other.replaced(run) == Replaced(Counts(0, 1, 0), {"timeout": 1})

    async def test_a_deleted_rerun_leaves_nothing(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await self.rerun(tasks, clock, 1)
        await tasks.finish(run, [end(1)])
        while await tasks.delete(run, 100):
            pass
        assert await tasks.replaced(run) == Replaced()


class TestUnchanged:
    """A succeeded task may be unchanged: it counts as succeeded, and as unchanged beside that."""

    @pytest.mark.parametrize("shards", SHARDS)
    async def test_it_counts_them(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        run = await filled(tasks, clock, 9, shards)
        ends = [end(0, code=UNCHANGED), end(1), end(2, FAILED, code="x"), end(3, FAILED, code=UNCHANGED)]
        assert (await tasks.finish(run, ends)).counts == Counts(2, 2, 0, 1), "an error with that name is one"
        assert (await tasks.finish(run, [end(0), end(1, code=UNCHANGED), end(4, code=UNCHANGED)])).counts == Counts(
            3, 2, 0, 2
        ), "the first outcome counts"
        assert await tasks.counts(run) == await tasks.recount(run) == Counts(3, 2, 0, 2)
        assert await tasks.error_codes(run, 10) == [(UNCHANGED, 1), ("x", 1)]
        shown = {task.index: task.is_unchanged for task in await tasks.at(run, range(9))}
        assert [index for index in shown if shown[index]] == [0, 4]
        where = TaskFilter(SUCCEEDED, UNCHANGED)
        listed = [task for shard in range(max(1, shards)) for task in await tasks.page(run, shard, None, 9, where)]
        assert sorted(task.index for task in listed) == [0, 4]

    async def test_a_rerun_replaces_them(self, tasks: Tasks, clock: ManualClock) -> None:
        run = make_run(clock)
        await tasks.put(
            run, [TaskSeed(index, InputJson('"x"'), f"1{UNCHANGED if index else ''}") for index in range(4)]
        )
        await tasks.finish(run, [end(0, code=UNCHANGED), end(1), end(2, FAILED, code="x"), end(3, CANCELLED)])
        assert await tasks.counts(run) == Counts(2, 1, 1, 1)
        assert await tasks.replaced(run) == Replaced(Counts(3, 0, 0, 2), {})

    @pytest.mark.parametrize("shards", [1, 4])
    async def test_a_recount_counts_them_too(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        run = make_run(clock, shards)
        await tasks.put(run, [TaskSeed(index, InputJson('"x"'), f"1{UNCHANGED}") for index in range(40)])
        await tasks.finish(run, [end(index, code=UNCHANGED if index < 20 else None) for index in range(30)])
        await spoil_counts(tasks, run)
        assert await tasks.replaced(run) != Replaced(Counts(30, 0, 0, 30), {})
        assert await tasks.recount(run) == await tasks.counts(run) == Counts(30, 0, 0, 20)
        assert (await tasks.replaced(run)).counts == Counts(30, 0, 0, 30)


async def spoil_counts(tasks: Tasks, run: RunKey) -> None:
    """Lose the counts of a run: those of replaced outcomes lag."""
    if isinstance(tasks, DynamoTasks):
        items = await tasks._counters.standing(run)
        assert await tasks._counters.mend(run, items, Tally(Counts(30, 0, 0), Counter()))
    elif isinstance(tasks, postgres_tasks.PostgresTasks):
        await tasks._database.change(
            parse("UPDATE task_counts SET replaced_failed = 0, replaced_succeeded = 0, unchanged = 7"), {}
        )
    else:
        assert isinstance(tasks, sqlite_tasks.SqliteTasks)
        await tasks._database.change(
            "UPDATE task_runs SET replaced_failed = 0, replaced_succeeded = 0, unchanged = 7", {}
        )


class TestErrorCodes:
    async def test_the_most_frequent_come_first(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 12)
        codes = ["timeout"] * 3 + ["http_500"] * 5 + ["dns_failed"] * 2
        await tasks.finish(run, [end(index, FAILED, code=code) for index, code in enumerate(codes)])
        await tasks.finish(run, [end(10, FAILED, code="timeout"), end(11)])
        assert await tasks.error_codes(run, 10) == [("http_500", 5), ("timeout", 4), ("dns_failed", 2)]
        assert await tasks.error_codes(run, 1) == [("http_500", 5)]
        assert await tasks.error_codes(make_run(clock), 10) == []

    async def test_only_failures_count(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 3)
        await tasks.finish(run, [end(0, CANCELLED, code="stopped"), end(1, SUCCEEDED, code="odd")])
        assert await tasks.error_codes(run, 10) == []


class TestPages:
    @pytest.mark.parametrize("shards", SHARDS)
    @pytest.mark.parametrize("limit", [1, 7, 1000])
    async def test_each_shard_is_in_order_and_all_are_everything(
        self, tasks: Tasks, clock: ManualClock, shards: int, limit: int
    ) -> None:
        run = await filled(tasks, clock, 97, shards)
        everything = []
        for shard in range(shards):
            got = await walk(tasks, run, shard, limit)
            ids = [task.task_id for task in got]
            assert ids == sorted(ids)
            assert {shard_of(each, shards) for each in ids} <= {shard}
            everything += got
        assert sorted(task.index for task in everything) == list(range(97))
        for task in everything:
            assert task.task_id == task_id(run.run_id, task.index)
        assert await tasks.page(run, shards, None, 10, EVERYTHING) == []

    @pytest.mark.parametrize("shards", SHARDS)
    @pytest.mark.parametrize(
        "where",
        [
            TaskFilter(status=PENDING),
            TaskFilter(status=SUCCEEDED),
            TaskFilter(status=FAILED),
            TaskFilter(status=CANCELLED),
            TaskFilter(error_code="timeout"),
            TaskFilter(http_status=503),
            TaskFilter(status=FAILED, error_code="http_503"),
            TaskFilter(status=FAILED, http_status=503),
            TaskFilter(status=SUCCEEDED, http_status=200),
            TaskFilter(status=SUCCEEDED, error_code="http_503"),
            TaskFilter(status=FAILED, error_code="http_503", http_status=503),
        ],
        ids=str,
    )
    async def test_filters(self, tasks: Tasks, clock: ManualClock, shards: int, where: TaskFilter) -> None:
        run = await filled(tasks, clock, 60, shards)
        ends: dict[int, TaskEnd] = {}
        for index in range(50):
            ends[index] = [
                end(index, http_status=200),
                end(index, FAILED, code="http_503", http_status=503),
                end(index, FAILED, code="timeout"),
                end(index, CANCELLED),
                end(index, http_status=204),
            ][index % 5]
        await tasks.finish(run, list(ends.values()))
        expected = {
            index
            for index in range(60)
            if (where.status is None or where.status == (ends[index].status if index in ends else PENDING))
            and (where.error_code is None or (index in ends and ends[index].error_code == where.error_code))
            and (where.http_status is None or (index in ends and ends[index].http_status == where.http_status))
        }
        got = [task for shard in range(shards) for task in await walk(tasks, run, shard, 3, where)]
        assert sorted(task.index for task in got) == sorted(expected)

    @pytest.mark.parametrize("shards", [1, 4])
    async def test_by_tag(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        """The user's own, in the input; an input of another shape has none."""
        run = make_run(clock, shards)
        inputs = [
            {"url": "http://a", "tag": "red"},
            {"url": "http://a", "tag": "ré'd \""},
            {"url": "http://a"},
            {"url": "http://a", "tag": None},
            {"tag": {"tag": "red"}},
            {"a": {"tag": "red"}},
            "red",
            "tag",
            ["tag", "red"],
            [{"tag": "red"}],
            5,
            None,
            True,
        ]
        count = 3 * len(inputs)
        texts = [json.dumps(inputs[index % len(inputs)], ensure_ascii=index % 2 == 0) for index in range(count)]
        await tasks.put(run, [TaskSeed(index, InputJson(text)) for index, text in enumerate(texts)])
        await tasks.finish(run, [end(0, FAILED, code="x"), end(1, FAILED, code="x"), end(13)])

        async def found(**fields: object) -> list[int]:
            where = TaskFilter(**fields)  # type: ignore[arg-type]
            got = [task for shard in range(shards) for task in await walk(tasks, run, shard, 2, where)]
            return sorted(task.index for task in got)

        assert await found(tag="red") == [0, 13, 26]
        assert await found(tag="ré'd \"") == [1, 14, 27]
        assert await found(tag="re") == []
        assert await found(tag="") == []
        assert await found(tag="red", status=FAILED) == [0]
        assert await found(tag="red", status=SUCCEEDED) == [13]
        assert await found(tag="red", status=PENDING) == [26]
        assert await found(tag="red", error_code="y") == []

    async def test_a_page_follows_a_task_that_no_longer_matches(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 20)
        where = TaskFilter(status=PENDING)
        first = await tasks.page(run, 0, None, 5, where)
        await tasks.finish(run, [end(task.index) for task in first])
        second = await tasks.page(run, 0, first[-1].task_id, 100, where)
        assert len(second) == 15
        assert second[0].task_id > first[-1].task_id

    async def test_a_page_follows_an_id_that_is_not_there(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 50)
        ids = sorted(task_id(run.run_id, index) for index in range(50))
        after = TaskId("8" * 64)
        page = await tasks.page(run, 0, after, 100, EVERYTHING)
        assert [task.task_id for task in page] == [each for each in ids if each > after]

    async def test_an_unknown_run_has_no_pages(self, tasks: Tasks, clock: ManualClock) -> None:
        assert await tasks.page(make_run(clock), 0, None, 10, EVERYTHING) == []


class TestTask:
    @pytest.mark.parametrize("shards", SHARDS)
    async def test_each_is_found_by_its_id(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        run = await filled(tasks, clock, 30, shards)
        for index in range(30):
            assert (await one(tasks, run, index)).index == index

    async def test_what_is_not_there_is_none(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 3)
        near = task_id(run.run_id, 0)
        strangers = [task_id(run.run_id, 3), near[:-1] + ("0" if near[-1] != "0" else "1"), near[:20], "", "no id", "é"]
        for stranger in strangers:
            assert await tasks.task(run, TaskId(stranger)) is None
        assert await tasks.task(make_run(clock), near) is None


class TestAt:
    @pytest.mark.parametrize("shards", SHARDS)
    async def test_those_that_are_there_in_order(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        run = await filled(tasks, clock, 300, shards)
        await tasks.finish(run, [end(7, FAILED, code="x"), end(8)])
        wanted = [299, 7, 1000, 0, 7, 8, 150, (1 << 40) - 1]
        found = await tasks.at(run, wanted)
        assert found == [await one(tasks, run, index) for index in (0, 7, 8, 150, 299)]
        assert await tasks.at(run, []) == []
        assert await tasks.at(make_run(clock), [0, 1]) == []
        assert await tasks.at(msgspec.structs.replace(run, tenant=OTHER), [0, 1]) == []

    async def test_it_takes_a_large_batch(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 1500, 4)
        assert [task.index for task in await tasks.at(run, range(1500, -1, -1))] == list(range(1500))


class TestEvents:
    async def test_they_come_in_the_order_of_noting(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 5, 4)
        noted = [TaskEvent(index % 5, 100.0 + index, f"event {index}", json.dumps({"n": index})) for index in range(23)]
        for start in range(0, 23, 6):
            await tasks.note(run, noted[start : start + 6])
        got, cursor = [], None
        while True:
            page = await tasks.events(run, None, cursor, 4)
            got += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page.items) == 4
        assert [(each.index, each.at, each.event, each.data) for each in got] == [
            (each.index, each.at, each.event, json.loads(each.data)) for each in noted
        ]
        assert [each.seq for each in got] == sorted({each.seq for each in got})
        assert {each.run_id for each in got} == {run.run_id}

    async def test_those_of_one_task(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 3)
        await tasks.note(run, [TaskEvent(index % 3, 1.0, f"event {index}", "{}") for index in range(9)])
        first = await tasks.events(run, task_id(run.run_id, 1), None, 2)
        rest = await tasks.events(run, task_id(run.run_id, 1), first.next_cursor, 2)
        assert [each.event for each in [*first.items, *rest.items]] == ["event 1", "event 4", "event 7"]
        assert rest.next_cursor is None
        assert (await tasks.events(run, task_id(run.run_id, 77), None, 10)).items == []

    async def test_a_run_has_its_own(self, tasks: Tasks, clock: ManualClock) -> None:
        one_run, two = await filled(tasks, clock, 1), await filled(tasks, clock, 1)
        await tasks.note(one_run, [TaskEvent(0, 1.0, "mine", "{}")])
        assert (await tasks.events(two, None, None, 10)).items == []
        assert (await tasks.events(make_run(clock), None, None, 10)).items == []

    @pytest.mark.parametrize("cursor", ["x", "-1", "", "9" * 40])
    async def test_a_bad_cursor_is_refused(self, tasks: Tasks, clock: ManualClock, cursor: str) -> None:
        run = await filled(tasks, clock, 1)
        with pytest.raises(BadCursor):
            await tasks.events(run, None, cursor, 10)


class TestDelete:
    @pytest.mark.parametrize("shards", [1, 4])
    async def test_it_is_bounded_down_to_nothing(self, tasks: Tasks, clock: ManualClock, shards: int) -> None:
        run = await filled(tasks, clock, 40, shards)
        other = await filled(tasks, clock, 5, shards)
        await tasks.finish(run, [end(0), end(1, FAILED, code="x")])
        await tasks.note(run, [TaskEvent(index, 1.0, "noted", "{}") for index in range(25)])
        steps = []
        while step := await tasks.delete(run, 10):
            steps.append(step)
        assert max(steps) <= 10
        assert sum(steps) >= 40
        for shard in range(shards):
            assert await tasks.page(run, shard, None, 100, EVERYTHING) == []
        assert (await tasks.events(run, None, None, 100)).items == []
        assert await tasks.error_codes(run, 10) == []
        assert await tasks.counts(run) == Counts()
        assert await tasks.delete(run, 10) == 0
        assert await tasks.unfinished(other, range(5)) == frozenset(range(5))

    async def test_a_deleted_run_can_be_written_again(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 5)
        await tasks.finish(run, [end(0)])
        while await tasks.delete(run, 100):
            pass
        await tasks.put(run, seeds(3))
        assert await tasks.unfinished(run, range(5)) == frozenset(range(3))
        assert await tasks.counts(run) == Counts()

    async def test_a_late_writer_of_a_deleted_run_changes_no_later_one(self, tasks: Tasks, clock: ManualClock) -> None:
        await late_writer_of_a_deleted_run(tasks, clock)


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> int:
    """The rows that a scan looks at, of the engines that have such a bound."""
    for module in (sqlite_tasks, postgres_tasks, dynamodb_tasks):
        monkeypatch.setattr(module, "MAX_SCANNED", 20)
    monkeypatch.setattr(dynamodb_tasks, "_LEAST_SCANNED", 5)
    return 20


async def test_the_largest_task_can_be_put_and_ended(tasks: Tasks, clock: ManualClock) -> None:
    """The longest input, with a tag that is as long, and a target that sends headers without end."""
    run = make_run(clock)
    longest = msgspec.json.encode({"tag": "t" * 130_000, "more": "m" * 130_000}).decode()
    assert len(longest) <= MAX_INPUT_BYTES
    await tasks.put(run, [TaskSeed(0, InputJson(longest)), TaskSeed(1, InputJson("1"))])
    headers = [(f"x-{number}", "\xff" * 1000) for number in range(1000)]
    error = TaskError("http_500", "m" * 100_000)
    detail = detail_json(Outcome(FAILED, http_status=500, error=error, headers=headers))
    ends = [TaskEnd(index, FAILED, 1, 500, "http_500", detail, 1.0) for index in range(2)]
    assert (await tasks.finish(run, ends)).moved == {0, 1}
    first, second = await tasks.at(run, [0, 1])
    assert first.detail == second.detail == msgspec.json.decode(detail, type=ResultDetail)
    assert bytes(first.input).decode() == longest


class TestScan:
    FILTERS = (
        EVERYTHING,
        TaskFilter(status=FAILED),
        TaskFilter(status=SUCCEEDED),
        TaskFilter(status=PENDING),
        TaskFilter(error_code="rare"),
        TaskFilter(status=FAILED, error_code="rare"),
        TaskFilter(http_status=599),
        TaskFilter(tag="no such tag"),
    )

    @pytest.mark.parametrize("shards", [1, 4])
    async def test_scans_one_after_another_are_the_page(
        self, tasks: Tasks, clock: ManualClock, scanned: int, shards: int
    ) -> None:
        run = await self.mixed(tasks, clock, shards)
        for where in self.FILTERS:
            for shard in range(shards):
                whole = await tasks.page(run, shard, None, 1000, where)
                assert whole == [
                    task for task in await tasks.page(run, shard, None, 1000, EVERYTHING) if matches(task, where)
                ]
                for limit in (7, 1000):
                    assert await self.by_scans(tasks, run, shard, limit, where) == whole

    async def test_one_looks_at_so_many_rows(self, tasks: Tasks, clock: ManualClock, scanned: int) -> None:
        await a_scan_is_bounded(tasks, await self.mixed(tasks, clock), scanned)

    async def mixed(self, tasks: Tasks, clock: ManualClock, shards: int = 1) -> RunKey:
        run = await filled(tasks, clock, 150, shards)
        ends = [end(index, FAILED, code="rare" if index == 77 else "x") for index in range(0, 120, 2)]
        await tasks.finish(run, [*ends, *(end(index) for index in range(1, 60, 2))])
        return run

    async def by_scans(self, tasks: Tasks, run: RunKey, shard: int, limit: int, where: TaskFilter) -> list[Task]:
        found: list[Task] = []
        after: TaskId | None = None
        while True:
            one = await tasks.scan(run, shard, after, limit, where)
            assert len(one.tasks) <= limit
            found += one.tasks
            if one.last is None:
                return found
            assert after is None or one.last > after
            assert not one.tasks or one.last >= one.tasks[-1].task_id
            after = one.last


async def a_scan_is_bounded(tasks: Tasks, run: RunKey, rows: int) -> None:
    """Where nothing matches, it ends at the last row that it may look at, of each of the two tables that a run may
    have."""
    ids = [task.task_id for task in await tasks.page(run, 0, None, 10_000, EVERYTHING)]
    nothing = await tasks.scan(run, 0, None, 10, TaskFilter(tag="no such tag"))
    assert nothing.tasks == []
    assert nothing.last is not None
    assert rows <= ids.index(nothing.last) + 1 <= 2 * rows
    at_the_end = await tasks.scan(run, 0, ids[-5], 10, TaskFilter(tag="no such tag"))
    assert (at_the_end.tasks, at_the_end.last) == ([], None)


async def late_writer_of_a_deleted_run(tasks: Tasks, clock: ManualClock) -> None:
    """What a writer knew of a run before it was deleted leads to none that came after."""
    run = await filled(tasks, clock, 5)
    await tasks.counts(run)
    late = as_it_stands(tasks)
    while await tasks.delete(run, 100):
        pass
    new = await filled(tasks, clock, 5)
    assert (await late.finish(run, [end(0), end(1, FAILED, code="late")])).moved == frozenset()
    assert await late.cancel_pending(run, 10, 1.0) == 0
    await late.note(run, [TaskEvent(2, 1.0, "late", "{}")])
    assert await late.at(run, range(5)) == []
    assert await tasks.unfinished(new, range(5)) == frozenset(range(5))
    assert (await tasks.counts(new), await tasks.recount(new)) == (Counts(), Counts())
    assert await tasks.error_codes(new, 10) == []
    assert (await tasks.events(new, None, None, 10)).items == []


def as_it_stands(tasks: Tasks) -> Tasks:
    """The same engine with what it remembers now, as another process has it whatever becomes of it here."""
    late = copy.copy(tasks)
    for name, value in vars(tasks).items():
        if isinstance(value, dict):
            setattr(late, name, dict(value))
    return late


class TestTenants:
    async def test_a_run_is_found_only_under_its_tenant(self, tasks: Tasks, clock: ManualClock) -> None:
        run = await filled(tasks, clock, 5)
        await tasks.finish(run, [end(0), end(1, FAILED, code="x")])
        await tasks.note(run, [TaskEvent(0, 1.0, "mine", "{}")])
        foreign = msgspec.structs.replace(run, tenant=OTHER)
        assert await tasks.unfinished(foreign, range(5)) == frozenset()
        assert (await tasks.finish(foreign, [end(2)])).moved == frozenset()
        assert await tasks.cancel_pending(foreign, 10, 1.0) == 0
        assert await tasks.counts(foreign) == Counts()
        assert await tasks.recount(foreign) == Counts()
        assert await tasks.error_codes(foreign, 10) == []
        assert await tasks.task(foreign, task_id(run.run_id, 0)) is None
        assert await tasks.page(foreign, 0, None, 10, EVERYTHING) == []
        await tasks.note(foreign, [TaskEvent(0, 1.0, "theirs", "{}")])
        assert (await tasks.events(foreign, None, None, 10)).items == []
        assert await tasks.delete(foreign, 10) == 0
        assert await tasks.unfinished(run, range(5)) == frozenset({2, 3, 4})
        assert [each.event for each in (await tasks.events(run, None, None, 10)).items] == ["mine"]

    async def test_two_tenants_may_use_one_run_id(self, tasks: Tasks, clock: ManualClock) -> None:
        """Ids are ours and never meet; if two did, each tenant would still see its own."""
        run = await filled(tasks, clock, 2)
        foreign = msgspec.structs.replace(run, tenant=OTHER)
        await tasks.put(foreign, seeds(4))
        await tasks.finish(foreign, [end(0)])
        assert await tasks.unfinished(run, range(5)) == frozenset({0, 1})
        assert await tasks.unfinished(foreign, range(5)) == frozenset({1, 2, 3})
        assert await tasks.counts(run) == Counts()

    async def test_runs_do_not_mix(self, tasks: Tasks, clock: ManualClock) -> None:
        runs = [await filled(tasks, clock, 10, shards) for shards in SHARDS]
        await tasks.finish(runs[1], [end(index) for index in range(10)])
        assert [(await tasks.counts(run)).ended for run in runs] == [0, 10, 0]
        assert len({run.run_id for run in runs}) == 3
        assert await tasks.unfinished(msgspec.structs.replace(runs[0], run_id=RunId("run_x")), [0]) == frozenset()


@pytest.mark.server
class TestCopy:
    """Engines to which runs can be copied: every step may repeat."""

    @pytest.fixture
    async def target(self, place: Path, clock: ManualClock) -> AsyncIterator[Any]:
        async with ENGINES["postgres"].open(place, clock) as engine:
            assert isinstance(engine.tasks, CopiesRuns)
            yield engine.tasks

    async def test_events_are_copied_once_however_often(self, target: Any, clock: ManualClock) -> None:
        # Above 50, a run has tables of its own here.
        run = make_run(clock, 4)
        await target.put(run, seeds(80))
        noted = [TaskEvent(n % 80, 10.0 + n, "task.retried", f'{{"n":{n}}}') for n in range(200)]
        for start in (0, 0, 50, 100, 150, 50):
            await target.copy_events(run, noted[start : start + 50])
        await target.copy_events(run, [])
        found = (await target.events(run, None, None, 1000)).items
        assert sorted((event.index, event.at) for event in found) == sorted((each.index, each.at) for each in noted)

    async def test_the_tally_counts_rows(self, target: Any, clock: ManualClock) -> None:
        run = make_run(clock)
        assert await target.tally(run) == RunTally(0, Counts(), 0)
        await target.put(run, seeds(80))
        await target.finish(run, [end(index) for index in range(70)])
        await target.finish(run, [end(70, FAILED, code="x"), end(71, CANCELLED)])
        await target.copy_events(run, [TaskEvent(3, 1.0, "task.retried", "{}"), TaskEvent(75, 1.0, "a", "{}")])
        assert await target.tally(run) == RunTally(80, Counts(70, 1, 1), 2)
