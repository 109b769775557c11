"""Atomic accept on Postgres: a small job in one statement, which is one round trip and one transaction."""

from collections.abc import Mapping, Sequence
from typing import Any

from conveyor.engines.postgres.access import standing_claim
from conveyor.engines.postgres.database import PostgresSession
from conveyor.engines.postgres.jobs import job_values, run_values
from conveyor.engines.postgres.outbox import event_values, is_own
from conveyor.engines.postgres.queries import named_queries
from conveyor.engines.postgres.seeds import seed_columns
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import IdempotencyClaim
from conveyor.model import Job, OutboxEvent, TaskSeed

SQL = named_queries("accepts.sql")


def accept_values(
    job: Job,
    notice: OutboxEvent,
    answer: IdempotencyClaim | None,
    seeds: Sequence[TaskSeed],
    queue: QueueName,
    messages: Sequence[Outgoing],
    now: float,
) -> Mapping[str, Any]:
    """The parameters of the statement."""
    claim = answer or IdempotencyClaim(job.tenant, "", "", "", "", 0.0, 0.0)
    return {
        **run_values(job),
        **job_values(job),
        **event_values(notice),
        **seed_columns(job.key, seeds),
        "run_state": job.run.state,
        "run_created_at": job.run.created_at,
        "is_claimed": answer is not None,
        "route": claim.route,
        "key": claim.key,
        "fingerprint": claim.fingerprint,
        "subject": claim.subject,
        "claim_expires_at": claim.expires_at,
        "status": claim.status,
        "body": claim.body,
        "queue": queue,
        "times": [now + message.delay for message in messages],
        "bodies": [message.body for message in messages],
    }


async def accept(
    db: PostgresSession, notice: OutboxEvent, answer: IdempotencyClaim | None, values: Mapping[str, Any]
) -> IdempotencyClaim | None:
    """A statement of its own: write the job with all that belongs to it. If the caller lost the claim, write nothing
    and return the stored claim."""
    if await is_own(db, notice) or await db.value(SQL["accept"], values):
        return None
    assert answer is not None
    return await standing_claim(db, answer)
