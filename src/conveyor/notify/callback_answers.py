"""Answers to state machines: gets the outbox event of a finished run, and writes the answer into the documents of the
callbacks that wait for it (jobs/callbacks.py); the callback monitor sends it from there.

A success has a summary of the run, a failure has it as its cause; both name the event that they pass on. A wanted
export is requested first, and the answer follows when it is ready.
"""

import dataclasses
from typing import Any

import msgspec
import structlog

from conveyor.clock import iso_text
from conveyor.engines.records import Document, Records
from conveyor.errors import BadInput, Conflict, ConveyorError, EngineFailed, IdempotencyInFlight, NotFound
from conveyor.export.exports import Exports, ExportState, export_json
from conveyor.export.request import ExportFormat, ExportSpec
from conveyor.faults import crashpoint
from conveyor.jobs.callbacks import (
    CALLBACK,
    Callback,
    CallbackAnswer,
    CallbackStatus,
    attached_document,
    callback_of,
    callbacks_cursor,
    is_callback_of,
    with_callback,
)
from conveyor.jobs.event_names import FINAL_EVENTS, MAX_NOTIFY, StepFunctionsNotify
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import Job, JobId, OutboxEvent, TenantId
from conveyor.settings import public_link
from conveyor.states import ENDED
from conveyor.system import System

log = structlog.get_logger()

_EXPORTED = frozenset({"export.ready", "export.failed"})
_ERRORS = {"run.failed": "JOB_FAILED", "run.cancelled": "JOB_CANCELLED"}
_TRIES = 20
# The callbacks of a job that are answered and shown.
_MAX_CALLBACKS = MAX_NOTIFY + 90
_EVENTS = 1000
# The maximum number of links in an answer.
_PARTS = 50


async def callbacks_of(records: Records, tenant: TenantId, job_id: JobId) -> list[Document]:
    """The callbacks of a job: those of its `notify`, and those that were attached."""
    page = await records.documents.documents(CALLBACK, tenant, callbacks_cursor(job_id), _MAX_CALLBACKS)
    return [row for row in page.items if is_callback_of(row, job_id)]


class StepAnswers:
    """Handles each outbox event once; handling it again changes nothing."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._records = system.records
        self._clock = system.clock
        # Without a lease: after a crash the next dispatcher requests the same export without waiting.
        settings = msgspec.structs.replace(system.settings, idempotency_lease_seconds=0.0)
        self._exports = Exports(dataclasses.replace(system, settings=settings))

    async def take(self, event: OutboxEvent) -> int:
        """Store the answers of the callbacks that wait for this event; returns how many are new."""
        if event.event not in FINAL_EVENTS | _EXPORTED:
            return 0
        answered = 0
        for row in await callbacks_of(self._records, event.tenant, event.job_id):
            try:
                answered += await self._take(row, event)
            except msgspec.MsgspecError as error:
                log.error("callback cannot be decoded", tenant=row.tenant, callback=row.id, error=str(error))
        return answered

    async def attach(self, job: Job, entry: StepFunctionsNotify) -> None:
        """Have a state machine wait for a job that exists already. If its run has finished, the answer is stored at
        once. Attaching a token again changes nothing."""
        assert self._system.step_functions is not None
        row = attached_document(job, entry, self._system.step_functions, self._system.settings, self._clock.now())
        crashpoint("callback.attach.before")
        await self._records.documents.create_documents([row])
        crashpoint("callback.attach.after")
        # Read after that: the dispatcher answers a run that finishes from now on.
        run = await self._records.jobs.run(job.job_id, job.run.run_id)
        if run is not None and run.state in ENDED and (event := await self._final_event(job)) is not None:
            await self.take(event)

    async def _final_event(self, job: Job) -> OutboxEvent | None:
        """The event with which the run of the job finished."""
        final: OutboxEvent | None = None
        cursor: str | None = None
        while True:
            page = await self._records.outbox.events(job.tenant, job.job_id, cursor, _EVENTS)
            for event in page.items:
                if event.event in FINAL_EVENTS and event.run_id == job.run.run_id and event.id is not None:
                    final = OutboxEvent(
                        event.id, job.tenant, job.job_id, event.run_id, event.event, event.at, event.data
                    )
            if (cursor := page.next_cursor) is None:
                return final

    async def _take(self, row: Document, event: OutboxEvent) -> bool:
        for _ in range(_TRIES):
            changed = await self._changed(row, event)
            if changed is None:
                return False
            crashpoint("callback.answer.before")
            written = await self._records.documents.replace_document(changed)
            crashpoint("callback.answer.after")
            if written is not None:
                return callback_of(written).answer is not None
            # The callback monitor has written it meanwhile.
            current = await self._records.documents.document(CALLBACK, row.tenant, row.id)
            if current is None:
                return False
            row = current
        raise EngineFailed("A callback could not be answered: too many concurrent writes.")

    async def _changed(self, row: Document, event: OutboxEvent) -> Document | None:
        """The document as this event changes it; None if it does not."""
        callback = callback_of(row)
        if callback.answer is not None or callback.status is CallbackStatus.TIMED_OUT:
            return None
        if event.event in _EXPORTED:
            if callback.export_id is None or callback.export_id != event.data.get("export_id"):
                return None
            return self._answered(row, callback, await self._with_export(row.tenant, callback, event), event)
        if callback.run_id != event.run_id or callback.export_id is not None:
            return None
        job = await self._records.jobs.job(row.tenant, callback.job_id)
        summary = await self._summary(job, callback, event)
        if event.event in _ERRORS:
            cause = msgspec.json.encode(summary).decode()
            answer = CallbackAnswer(self._clock.now(), event.notice_id, error=_ERRORS[event.event], cause=cause)
            return self._failed(row, callback, answer)
        if callback.export is None or job is None:
            return self._answered(row, callback, summary, event)
        return await self._exporting(row, callback, job, summary, event)

    async def _summary(self, job: Job | None, callback: Callback, event: OutboxEvent) -> dict[str, Any]:
        run = await self._records.jobs.run(callback.job_id, callback.run_id)
        return {
            "job_id": callback.job_id,
            "run_id": callback.run_id,
            "name": None if job is None else job.name,
            "event": event.event,
            "event_id": event.notice_id,
            "at": iso_text(event.at),
            "reason": event.data.get("reason"),
            "reason_code": event.data.get("reason_code"),
            "total": None if run is None else run.total,
            "invalid": None if run is None else run.invalid,
            "counts": event.data.get("counts"),
            "job": event.data.get("job"),
            "export": None,
            "export_url": None,
        }

    async def _exporting(
        self, row: Document, callback: Callback, job: Job, summary: dict[str, Any], event: OutboxEvent
    ) -> Document | None:
        """Request the export; a repeated request gets the same one."""
        try:
            spec = ExportSpec(ExportFormat(callback.export or ""))
            asked = await self._exports.create(job, spec, IdempotentRequest("callback", row.id, event.notice_id))
        except IdempotencyInFlight:
            raise
        except (BadInput, Conflict, NotFound, ValueError) as error:
            code = error.code if isinstance(error, ConveyorError) else "invalid_field"
            failed = {"id": None, "format": callback.export, "error": {"code": code, "message": str(error)}}
            return self._answered(row, callback, {**summary, "export": failed}, event)
        output = msgspec.json.encode(summary).decode()
        waiting = msgspec.structs.replace(callback, export_id=asked.subject, output=output)
        return with_callback(row, waiting, row.due_at)

    async def _with_export(self, tenant: TenantId, callback: Callback, event: OutboxEvent) -> dict[str, Any]:
        summary: dict[str, Any] = msgspec.json.decode(callback.output or "{}")
        shown: dict[str, Any] = {"id": callback.export_id, "format": callback.export, "error": event.data.get("error")}
        try:
            found_export = await self._exports.find(tenant, callback.export_id or "")
        except NotFound:
            return {**summary, "export": shown}
        if found_export.export.state is ExportState.READY:
            export = await export_json(self._system.blobs, found_export.row, found_export.export, self._clock.now())
            shown["part_count"] = len(export["parts"])
            public_url = self._system.settings.public_url
            shown["parts"] = [
                {"name": part["name"], "size": part["size"], "sha256": part["sha256"]}
                | {"url": public_link(public_url, part["url"])}
                for part in export["parts"][:_PARTS]
            ]
            shown["expires_at"] = export["expires_at"]
            summary["export_url"] = shown["parts"][0]["url"] if shown["parts"] else None
        return {**summary, "export": shown}

    def _answered(self, row: Document, callback: Callback, summary: dict[str, Any], event: OutboxEvent) -> Document:
        # The answer names the event of the finished run, also if an export came after it.
        event_id = summary.get("event_id", event.notice_id)
        answer = CallbackAnswer(self._clock.now(), event_id, output=msgspec.json.encode(summary).decode())
        done = msgspec.structs.replace(callback, status=CallbackStatus.COMPLETED, answer=answer, tries=0)
        return with_callback(row, done, self._clock.now())

    def _failed(self, row: Document, callback: Callback, answer: CallbackAnswer) -> Document:
        done = msgspec.structs.replace(callback, status=CallbackStatus.FAILED, answer=answer, tries=0)
        return with_callback(row, done, self._clock.now())
