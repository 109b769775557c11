"""Atomic accept on SQLite: jobs that are accepted at the same time, in one transaction and a few statements for all of
them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import apsw
import msgspec

from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.engines.sqlite.access import answer_claim, standing_claim
from conveyor.engines.sqlite.database import named_queries
from conveyor.engines.sqlite.documents import insert_documents
from conveyor.engines.sqlite.jobs import job_values, run_values
from conveyor.engines.sqlite.outbox import insert_events
from conveyor.engines.sqlite.queue import insert_queued
from conveyor.model import Job, OutboxEvent

SQL = named_queries("accepts.sql")

# Tenant, route and key of claims.
_keys = msgspec.json.Decoder(list[tuple[str, str, str]])

_JOB_COLUMNS = (
    *("job_id", "tenant", "name", "kind", "mode", "options", "task_shard_count", "result_layout", "state", "reason"),
    *("created_at", "expires_at", "run_id", "source", "source_key", "version", "task_store", "bucket"),
)
_RUN_COLUMNS = (
    *("run_id", "job_id", "number", "state", "total", "last_batch", "created_at", "ended_at", "sealed", "invalid"),
    *("created_at", "lineage", "reason_code"),
)


class Acceptance(NamedTuple):
    """A job to write, with all that belongs to it."""

    job: Job
    notice: OutboxEvent
    answer: IdempotencyClaim | None
    # Whether the claim is held in memory, and not stored.
    is_held: bool
    # The parameters of the statement that puts its tasks; None if it has none yet.
    seeds: str | None
    queue: QueueName
    messages: Sequence[Outgoing]
    rows: Sequence[Document]
    now: float


def accept_jobs(db: apsw.Connection, acceptances: list[Acceptance]) -> list[IdempotencyClaim | None]:
    """The whole transaction. Returns the stored claim of each job whose claim was lost: nothing of it is written."""
    standing = _answer(db, acceptances)
    accepted = [each for each, lost in zip(acceptances, standing, strict=True) if lost is None]
    if accepted:
        _insert_jobs(db, accepted)
        _insert_tasks(db, accepted)
        insert_events(db, [each.notice for each in accepted])
        for each in accepted:
            insert_documents(db, each.rows, each.now)
        insert_queued(db, accepted[0].now, [(each.queue, message) for each in accepted for message in each.messages])
    return standing


def _answer(db: apsw.Connection, acceptances: Sequence[Acceptance]) -> list[IdempotencyClaim | None]:
    held = [each.answer for each in acceptances if each.answer is not None and each.is_held]
    won = _answer_held(db, held, acceptances[0].now) if held else set()
    standing: list[IdempotencyClaim | None] = []
    for each in acceptances:
        if each.answer is None or (each.is_held and (each.answer.tenant, each.answer.route, each.answer.key) in won):
            standing.append(None)
        elif each.is_held:
            standing.append(standing_claim(db, each.answer))
        else:
            standing.append(answer_claim(db, each.answer))
    return standing


def _answer_held(db: apsw.Connection, held: Sequence[IdempotencyClaim], now: float) -> set[tuple[str, str, str]]:
    """The keys of the claims that are answered now."""
    rows = [(*msgspec.structs.astuple(claim)[:-1], claim.body.hex()) for claim in held]
    values = {"claims": _text(rows), "now": now}
    standing: Any = db.execute(SQL["standing_claims"], values).fetchall()[0][0]
    db.execute(SQL["answer_held"], values)
    keys: set[tuple[str, str, str]] = {(claim.tenant, claim.route, claim.key) for claim in held}
    return keys.difference(_keys.decode(standing))


def _insert_jobs(db: apsw.Connection, accepted: Sequence[Acceptance]) -> None:
    jobs, runs = [], []
    for each in accepted:
        job, run = job_values(each.job), run_values(each.job)
        jobs.append([job[column] for column in _JOB_COLUMNS])
        runs.append([run[column] for column in _RUN_COLUMNS])
    db.execute(SQL["insert_jobs"], {"jobs": _text(jobs)})
    db.execute(SQL["insert_runs"], {"runs": _text(runs)})


def _insert_tasks(db: apsw.Connection, accepted: Sequence[Acceptance]) -> None:
    parts = [
        f"[{_text(each.job.run.run_id)},{_text(each.job.tenant)},{each.seeds}]"
        for each in accepted
        if each.seeds is not None
    ]
    if parts:
        runs = f"[{','.join(parts)}]"
        db.execute(SQL["number_runs"], {"runs": runs})
        db.execute(SQL["insert_tasks"], {"runs": runs})


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
