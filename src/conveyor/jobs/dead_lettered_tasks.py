"""Dead-lettered tasks: failed tasks that wait for a redrive, because their retries were exhausted or because no worker
survived them.

The mark is part of the task's row, so it is written in one step with the failure. A document of kind `dead_letters`
names each run that may have such tasks; it is written first, and may be there without any. It goes with the job, or
once none is left and no run of the job is in progress.

A task is no dead letter of a run any more if a later run has an outcome of it, or will have one because it is in
progress. If a later run was cancelled before it finished the task, the task is a dead letter still.
"""

import base64
import re
from collections.abc import Collection, Sequence

import msgspec

from conveyor.engines.records import Document, DocumentRecords, Records
from conveyor.engines.tasks import TaskFilter, Tasks, is_reachable
from conveyor.errors import BadCursor
from conveyor.faults import crashpoint
from conveyor.model import OUTCOMES, Job, JobId, Lineage, Page, Run, RunId, RunKey, Task, TaskId, TenantId, is_task_id
from conveyor.states import ENDED, RunState, TaskStatus

DEAD_LETTERS = "dead_letters"
# The prefix of cursors into dead-lettered tasks; those into the dead letters of the queue have others.
CURSOR = "task:"

# Scans for one page at most: a page is short rather than slow.
_MAX_SCANS = 20
_LONGEST_CURSOR = 400
_MAX_SHARD = 100_000
_RUN_ID = re.compile(r"run_\w{1,60}", re.ASCII)
_ID = re.compile(r"(job_\w{1,60}):([0-9]{1,9}):([0-9]{1,15})", re.ASCII)


class DeadLetteredTask(msgspec.Struct, frozen=True):
    """A dead-lettered task, with its job and the run in which it failed."""

    job: Job
    run: Run
    task: Task

    @property
    def id(self) -> str:
        return f"{self.job.job_id}:{self.run.number}:{self.task.index}"


class DeadLetterFilter(msgspec.Struct, frozen=True):
    """Which dead letters a listing or a redrive takes. Every field that is set must match."""

    job_id: JobId | None = None
    error_code: str | None = None


class _Position(msgspec.Struct, frozen=True, array_like=True):
    """How far a listing is: in a run and its shard, after a task."""

    run_id: RunId
    shard: int = 0
    after: TaskId | None = None


_position = msgspec.json.Decoder(_Position)


async def write_run_document(documents: DocumentRecords, job: Job, at: float) -> None:
    """Name the run as one with dead-lettered tasks, unless it is named already. Call this before they fail."""
    if await documents.document(DEAD_LETTERS, job.tenant, job.run.run_id) is not None:
        return
    document = Document(DEAD_LETTERS, job.tenant, job.run.run_id, b"{}", due_at=at, job_id=job.job_id)
    crashpoint("dead_letters.name.before")
    await documents.create_documents([document])
    crashpoint("dead_letters.name.after")


async def oldest_dead_lettered(records: Records, tasks: Tasks, now: float, limit: int) -> tuple[int, float | None]:
    """How many tasks of all tenants are dead-lettered, counted up to `limit`, and since when the first run has some.
    It reads a bounded number of rows. Where it finds that a run has none left for good, it removes the document."""
    count = 0
    since: float | None = None
    for document in await records.documents.due_documents(DEAD_LETTERS, now, _MAX_SCANS):
        walk = None if count >= limit else await _open_walk(records, tasks, document)
        if walk is None:
            continue
        # Read before the walk: what fails during it is not overlooked.
        is_final = await walk.is_final(tasks)
        is_rerun = is_final and await walk.is_rerun_whole(tasks)
        position: _Position | None = None if is_rerun else _Position(RunId(document.id))
        scans = of_run = 0
        while position is not None and scans < _MAX_SCANS and count + of_run < limit:
            found, position = await walk.scan(tasks, position, limit - count - of_run, DeadLetterFilter())
            scans += 1
            of_run += len(found)
        if of_run and since is None:
            since = document.due_at
        if of_run == 0 and position is None and is_final and walk == await _open_walk(records, tasks, document):
            # No run was added during the walk, and the tasks were not moved to another engine.
            await records.documents.remove_document(document)
        count += of_run
    return count, since


async def jobs_with_dead_letters(records: Records, tenant: TenantId, job_id: JobId | None) -> list[JobId]:
    """The jobs of the tenant, or the one job, with runs that may have dead-lettered tasks."""
    found: dict[JobId, None] = {}
    cursor: str | None = None
    while True:
        page = await records.documents.documents(DEAD_LETTERS, tenant, cursor, 1000, job_id)
        found |= dict.fromkeys(row.job_id for row in page.items if row.job_id is not None)
        cursor = page.next_cursor
        if cursor is None:
            return list(found)


async def dead_lettered_page(
    records: Records, tasks: Tasks, tenant: TenantId, where: DeadLetterFilter, limit: int, cursor: str | None
) -> Page[DeadLetteredTask]:
    """Up to `limit` dead-lettered tasks of the tenant, oldest run first. A page reads a bounded number of rows, so it
    may have fewer and still not be the last. Raises BadCursor."""
    position = None if cursor is None else _decode(cursor)
    document = await _document_at(records.documents, tenant, where.job_id, position)
    walk: _RunWalk | None = None
    items: list[DeadLetteredTask] = []
    for _ in range(_MAX_SCANS):
        if document is None:
            return Page(items)
        if position is None or position.run_id != document.id:
            position = _Position(RunId(document.id))
        walk = walk or await _open_walk(records, tasks, document)
        following = None
        if walk is not None:
            found, following = await walk.scan(tasks, position, limit - len(items), where)
            items += found
        position = following
        if position is None:
            document = await _document_after(records.documents, tenant, where.job_id, document.id)
            walk = None
        if len(items) >= limit:
            break
    if document is None:
        return Page(items)
    return Page(items, _encode(position or _Position(RunId(document.id))))


async def find_dead_lettered(
    records: Records, tasks: Tasks, tenant: TenantId, ids: Collection[str]
) -> list[DeadLetteredTask]:
    """The tenant's dead-lettered tasks with these ids, without those that were redriven and those of jobs whose task
    engine is not open."""
    wanted: dict[tuple[JobId, int], set[int]] = {}
    for match in filter(None, map(_ID.fullmatch, ids)):
        wanted.setdefault((JobId(match[1]), int(match[2])), set()).add(int(match[3]))
    found: list[DeadLetteredTask] = []
    for (job_id, number), indexes in wanted.items():
        job = await records.jobs.job(tenant, job_id)
        if job is None or not is_reachable(tasks, job.key):
            continue
        runs = await records.jobs.runs(job_id)
        run = next((run for run in runs if run.number == number), None)
        if run is not None:
            walk = _RunWalk(job, run, _later_runs(runs, run))
            found += await walk.select(tasks, await tasks.at(walk.key, sorted(indexes)))
    return found


def is_task_letter(letter_id: str) -> bool:
    """Whether this is the id of a dead-lettered task, not of a message."""
    return _ID.fullmatch(letter_id) is not None


class _RunWalk(msgspec.Struct, frozen=True):
    """The tasks of one run, and the runs that may have redriven them."""

    job: Job
    run: Run
    later: Sequence[Run]

    @property
    def key(self) -> RunKey:
        return self.job.key_of(self.run)

    async def scan(
        self, tasks: Tasks, position: _Position, limit: int, where: DeadLetterFilter
    ) -> tuple[list[DeadLetteredTask], _Position | None]:
        """Read on from a position. Returns None as the next one at the end of the run."""
        failed = TaskFilter(TaskStatus.FAILED, where.error_code)
        scanned = await tasks.scan(self.key, position.shard, position.after, limit, failed)
        found = await self.select(tasks, scanned.tasks)
        if scanned.last is not None:
            return found, _Position(position.run_id, position.shard, scanned.last)
        has_next = position.shard + 1 < self.key.shard_count
        return found, _Position(position.run_id, position.shard + 1) if has_next else None

    async def select(self, tasks: Tasks, candidates: Sequence[Task]) -> list[DeadLetteredTask]:
        """Those that are dead-lettered, and that no later run has an outcome of or will have one."""
        chosen = [task for task in candidates if task.status is TaskStatus.FAILED and task.detail.dead_lettered]
        for run in self.later:
            if chosen:
                hiding = OUTCOMES if run.state in ENDED else OUTCOMES | {TaskStatus.PENDING}
                newer = await tasks.at(self.job.key_of(run), [task.index for task in chosen])
                redriven = {task.index for task in newer if task.status in hiding}
                chosen = [task for task in chosen if task.index not in redriven]
        return [DeadLetteredTask(self.job, self.run, task) for task in chosen]

    async def is_final(self, tasks: Tasks) -> bool:
        """Whether the run gets no dead letter any more: all its tasks have finished, and no run of the job is in
        progress, which could be cancelled."""
        if not self.run.last_batch or any(run.state not in ENDED for run in (self.run, *self.later)):
            return False
        return (await tasks.counts(self.key)).ended >= self.run.total

    async def is_rerun_whole(self, tasks: Tasks) -> bool:
        """Whether a later run took all dead letters, and finished each. This needs no walk, however many they were."""
        for run in self.later:
            if run.state is RunState.COMPLETED and run.lineage is not None and _takes_all(run.lineage):
                counts = await tasks.counts(self.job.key_of(run))
                if counts.cancelled == 0 and counts.ended >= run.total:
                    return True
        return False


def _takes_all(lineage: Lineage) -> bool:
    """Whether a rerun selects every dead letter of the runs before it."""
    if lineage.error_code is not None or lineage.http_status is not None or lineage.tag is not None or lineage.indexes:
        return False
    if lineage.damaged or lineage.extract_only or lineage.host is not None:
        return False
    return not lineage.statuses or TaskStatus.FAILED in lineage.statuses


async def _open_walk(records: Records, tasks: Tasks, document: Document) -> _RunWalk | None:
    """None if the job was deleted, or its task engine is not open."""
    job = None if document.job_id is None else await records.jobs.job(document.tenant, document.job_id)
    if job is None or not is_reachable(tasks, job.key):
        return None
    runs = await records.jobs.runs(job.job_id)
    run = next((run for run in runs if run.run_id == document.id), None)
    return None if run is None else _RunWalk(job, run, _later_runs(runs, run))


def _later_runs(runs: Sequence[Run], run: Run) -> list[Run]:
    return [later for later in runs if later.number > run.number]


async def _document_at(
    documents: DocumentRecords, tenant: TenantId, job_id: JobId | None, position: _Position | None
) -> Document | None:
    """The document of the run at a position, or the first one after it."""
    if position is None:
        return await _document_after(documents, tenant, job_id, None)
    document = await documents.document(DEAD_LETTERS, tenant, position.run_id)
    if document is not None and job_id in (None, document.job_id):
        return document
    return await _document_after(documents, tenant, job_id, position.run_id)


async def _document_after(
    documents: DocumentRecords, tenant: TenantId, job_id: JobId | None, run_id: str | None
) -> Document | None:
    page = await documents.documents(DEAD_LETTERS, tenant, run_id, 1, job_id)
    return page.items[0] if page.items else None


def _encode(position: _Position) -> str:
    return CURSOR + base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def _decode(cursor: str) -> _Position:
    """Cursors come from outside: only text that `_encode` could have made is valid."""
    text = cursor.removeprefix(CURSOR)[:_LONGEST_CURSOR]
    try:
        position = _position.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, msgspec.MsgspecError):
        raise BadCursor from None
    is_valid = _RUN_ID.fullmatch(position.run_id) and (position.after is None or is_task_id(position.after))
    if not is_valid or not 0 <= position.shard <= _MAX_SHARD or _encode(position) != cursor:
        raise BadCursor
    return position
