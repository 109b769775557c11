"""Schedules: create a job at each time of a cron expression. Each schedule is a document, due when it next fires. This
module creates, shows, changes and removes schedules; `scheduler` fires them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from conveyor.accept.cron import check_cron, cron_text, next_fires
from conveyor.accept.option_limits import MAX_NAME, check_body_budget, check_insecure, check_limits
from conveyor.accept.remote_sources import check_url
from conveyor.accept.spec import JobSpec, decode_body
from conveyor.accept.subscriptions import check_notify, refuse_tokens
from conveyor.accept.task_seeds import check_tasks
from conveyor.clock import iso_text
from conveyor.engines.newer_rows import read_row, readable_rows
from conveyor.engines.records import Document
from conveyor.errors import BadCursor, Conflict, InvalidField, LimitReached, NotFound, UnknownField
from conveyor.faults import crashpoint
from conveyor.jobs.fire_ids import fire_job_id
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest
from conveyor.jobs.secrets import shown_job
from conveyor.model import Compression, JobId, JobKind, ListFormat, Mode, Page, TenantId
from conveyor.system import System

SCHEDULE = "schedule"
CREATED = 201
# A document holds it; a longer list is uploaded, or read from a URL.
MAX_TEMPLATE = 256 * 1024
NEXT_FIRES = 5
# Fires that a schedule shows.
SHOWN_FIRES = 20
# The document of a schedule refers to its upload, which is kept while it does. Documents of earlier versions lack the
# reference: their uploads are kept for this long, and the document is rewritten at half of it.
KEEP_UPLOAD_SECONDS = 14 * 86_400.0

_ID = re.compile(r"schedule_[0-9a-z]{26}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NULL = msgspec.Raw(b"null")
_TRIES = 5
# How often a schedule is looked at, at least, in seconds.
LOOK_SECONDS = 6 * 3600.0
# Fires of so many seconds are not repeated after the clock was set back.
NOT_REPEATED_SECONDS = 3 * 3600.0


class Missed(StrEnum):
    """What to do with missed fires: make up for the last one, for none, or for each."""

    COALESCE = "coalesce"
    SKIP = "skip"
    ALL = "all"


class ListSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A list that is read at each fire: an upload, or a URL, of a bucket or a web server."""

    upload_id: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    format: ListFormat | None = None
    compression: Compression | None = None
    url_column: str | None = None


class ScheduleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule to create. `job` is a body of POST /v1/jobs, whose `source` may be a `url` too."""

    cron: str
    job: msgspec.Raw
    timezone: str = "UTC"
    name: str | None = None
    missed: Missed = Missed.COALESCE
    paused: bool = False
    # Each job compares its pages with those of the job of the last fire that has finished.
    changed_only: bool = False


class ScheduleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields to change. A missing field stays as it is."""

    cron: str | msgspec.UnsetType = msgspec.UNSET
    job: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # Fields of `job` to replace, each as a whole; null removes one. Secrets in the others stay, unseen.
    job_changes: dict[str, msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    timezone: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType | None = msgspec.UNSET
    missed: Missed | msgspec.UnsetType = msgspec.UNSET
    paused: bool | msgspec.UnsetType = msgspec.UNSET
    changed_only: bool | msgspec.UnsetType = msgspec.UNSET


class Fire(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fire: its scheduled time, when it was made, and its job or error."""

    at: float
    made_at: float
    job_id: JobId | None = None
    error: str | None = None
    # Missed fires that it makes up for, beside its own.
    coalesced: int = 0


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a schedule's document, as JSON."""

    cron: str
    timezone: str
    job: msgspec.Raw
    created_at: float
    name: str | None = None
    missed: Missed = Missed.COALESCE
    paused: bool = False
    # The next time to fire.
    next_fire: float | None = None
    # The fire in progress, the scheduler that makes it, and how often it was started.
    firing: float | None = None
    coalesced: int = 0
    # Whether a user asked for it: the times of the cron expression stay as they are.
    is_manual: bool = False
    holder: str | None = None
    tries: int = 0
    # When to extend the time for which its upload is kept.
    keep_at: float | None = None
    fires: Sequence[Fire] = ()
    fired: int = 0
    # How often the clock was set back past its fires, and before which time they were made already.
    repeats: int = 0
    made_until: float | None = None
    # Whether its jobs compare, and when to extend the time for which the job to compare with is kept.
    changed_only: bool = False
    keep_base_at: float | None = None
    # Invalid tasks of `job`, which each fire skips.
    invalid_tasks: int = 0


class Template(msgspec.Struct, frozen=True):
    """The job that a fire creates."""

    spec: JobSpec
    source: ListSource | None
    # Of its tasks; known once they were checked.
    invalid_tasks: int = 0


_schedule = msgspec.json.Decoder(Schedule)


def schedule_of(row: Document) -> Schedule:
    """The schedule in a document. Raises NewerRow if a newer version wrote it."""
    return read_row(row.body, _schedule.decode)


def _readable(row: Document) -> Document:
    schedule_of(row)
    return row


def with_schedule(row: Document, schedule: Schedule, now: float, due_at: float | None = None) -> Document:
    """The document to write; due when the schedule is, or at `due_at`."""
    at = due_at if due_at is not None else due(schedule, now)
    return msgspec.structs.replace(row, body=msgspec.json.encode(schedule), due_at=at)


def due(schedule: Schedule, now: float) -> float | None:
    """When it next has to fire, or its upload or the job to compare with has to be kept; or to be looked at, because
    the clock may have been set back."""
    times = [schedule.keep_at, schedule.keep_base_at, None if schedule.paused else schedule.next_fire]
    first = min((at for at in times if at is not None), default=None)
    return None if first is None else min(first, now + LOOK_SECONDS)


def set_right(schedule: Schedule, now: float) -> Schedule:
    """The schedule as it goes on. If its next fire was set by a clock that was ahead, it fires from now on, and the
    times that come again are told from those before. As with Debian's cron, up to three hours are not repeated."""
    waits_until = schedule.next_fire
    if waits_until is None or waits_until <= now + NOT_REPEATED_SECONDS:
        return schedule
    skipped = _first(schedule.cron, schedule.timezone, now + NOT_REPEATED_SECONDS)
    if skipped is None or skipped >= waits_until:
        return schedule
    return msgspec.structs.replace(
        schedule,
        next_fire=_first(schedule.cron, schedule.timezone, now),
        repeats=schedule.repeats + 1,
        made_until=max(waits_until, schedule.made_until or 0.0),
    )


def template_of(raw: bytes) -> Template:
    """Decode the job of a schedule. Raises BadInput, whose field begins with `job`."""
    with _inside("job"):
        fields = decode_body(raw, dict[str, msgspec.Raw])
        raw_source = fields.pop("source", None)
        spec = decode_body(msgspec.json.encode(fields), JobSpec)
    with _inside("job.source"):
        is_missing = raw_source is None or raw_source == _NULL
        source = None if is_missing else decode_body(bytes(raw_source or b""), ListSource)
    return Template(spec, source)


def upload_of(template: Template) -> str | None:
    """The upload that each fire reads."""
    return None if template.source is None else template.source.upload_id


class Schedules:
    """Creates, shows, changes and removes schedules."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._records = system.records
        self._clock = system.clock
        self._settings = system.settings
        self._idempotency = Idempotency(system.settings, system.clock, system.records)

    async def create(self, tenant: TenantId, spec: ScheduleSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Check the schedule and store it. It fires from now on."""
        schedule_id = self._clock.new_id("schedule")
        return await self._idempotency.once(tenant, request, schedule_id, partial(self._create, tenant, spec))

    async def _create(self, tenant: TenantId, spec: ScheduleSpec, claim: Claim) -> Accepted:
        _check_name(spec.name)
        check_cron(spec.cron, spec.timezone)
        template = await self._checked(tenant, bytes(spec.job))
        _check_changed_only(template, spec.changed_only)
        await self._check_number(tenant)
        now = self._clock.now()
        schedule = Schedule(
            cron=spec.cron,
            timezone=spec.timezone,
            job=spec.job,
            created_at=now,
            name=spec.name,
            missed=spec.missed,
            paused=spec.paused,
            next_fire=_first(spec.cron, spec.timezone, now),
            keep_at=await self.keep_upload(template),
            changed_only=spec.changed_only,
            invalid_tasks=template.invalid_tasks,
        )
        empty = Document(SCHEDULE, tenant, claim.subject, b"", upload_id=upload_of(template))
        document = with_schedule(empty, schedule, now)
        answer = claim.answer(CREATED, msgspec.json.encode(schedule_json(document, now)))
        crashpoint("schedule.create.before")
        existing = await self._records.documents.create_documents([document], None, answer.row)
        crashpoint("schedule.create.after")
        return answer.unless_lost(existing)

    async def find(self, tenant: TenantId, schedule_id: str) -> Document:
        """The tenant's schedule. Raises NotFound for an unknown one, a removed one and one of another tenant."""
        row = (
            await self._records.documents.document(SCHEDULE, tenant, schedule_id)
            if _ID.fullmatch(schedule_id)
            else None
        )
        if row is None:
            raise NotFound
        return row

    async def page(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Document]:
        """Schedules, oldest first, without those that a newer version wrote."""
        if cursor is not None and not _ID.fullmatch(cursor):
            raise BadCursor
        rows = await self._records.documents.documents(SCHEDULE, tenant, cursor, limit)
        return Page(readable_rows(rows.items, _readable), rows.next_cursor)

    async def change(self, tenant: TenantId, schedule_id: str, change: ScheduleChange) -> Document:
        """Change a schedule. After a pause, or with other times, it fires from now on: fires in between do not count as
        missed."""
        fields = {field: value for field, value in msgspec.structs.asdict(change).items() if value is not msgspec.UNSET}
        _check_name(fields.get("name"))
        keep: dict[str, Any] = {}
        reads: dict[str, Any] = {}
        job_changes = fields.pop("job_changes", None)
        stored = None
        if job_changes is not None:
            if "job" in fields:
                raise InvalidField("Give `job` or `job_changes`, not both.", field="job_changes")
            stored = schedule_of(await self.find(tenant, schedule_id)).job
            fields["job"] = _changed_job(stored, job_changes)
        if "job" in fields:
            await self.find(tenant, schedule_id)
            template = await self._checked(tenant, bytes(fields["job"]))
            keep = {"keep_at": await self.keep_upload(template), "invalid_tasks": template.invalid_tasks}
            reads = {"upload_id": upload_of(template)}

        def changed(row: Document) -> Document:
            before, now = schedule_of(row), self._clock.now()
            if stored is not None and before.job != stored:
                raise _contended()
            after = msgspec.structs.replace(before, **fields, **keep)
            check_cron(after.cron, after.timezone)
            _check_changed_only(template_of(bytes(after.job)), after.changed_only)
            # The scheduler finds out whether there is a job to keep.
            after = msgspec.structs.replace(after, keep_base_at=now if after.changed_only else None)
            if not {"cron", "timezone", "paused"}.isdisjoint(fields):
                first = _first(after.cron, after.timezone, now)
                after = msgspec.structs.replace(after, next_fire=first)
            # A fire in progress is completed, whatever changes.
            firing_until = row.due_at if after.firing is not None else None
            return with_schedule(msgspec.structs.replace(row, **reads), after, now, firing_until)

        return await self._rewrite(tenant, schedule_id, changed)

    async def run_now(self, tenant: TenantId, schedule_id: str) -> Fire:
        """Have a scheduler fire it now, beside its times, also while it is paused. Raises Conflict if a fire is in
        progress."""
        now = self._clock.now()

        def fired(row: Document) -> Document:
            schedule = schedule_of(row)
            if schedule.firing is not None:
                raise Conflict("The schedule is firing already. Try again when that fire has made its job.")
            return with_schedule(row, msgspec.structs.replace(schedule, firing=now, is_manual=True), now, now)

        await self._rewrite(tenant, schedule_id, fired)
        return Fire(now, now, fire_job_id(tenant, schedule_id, now))

    async def _rewrite(self, tenant: TenantId, schedule_id: str, change: Callable[[Document], Document]) -> Document:
        """Change a schedule on its version, and retry on concurrent changes."""
        for _ in range(_TRIES):
            row = change(await self.find(tenant, schedule_id))
            crashpoint("schedule.change.before")
            written = await self._records.documents.replace_document(row)
            crashpoint("schedule.change.after")
            if written is not None:
                return written
        raise _contended()

    async def remove(self, tenant: TenantId, schedule_id: str) -> None:
        """Remove a schedule. The jobs that it made stay; its upload is removed, unless something else refers to it."""
        for _ in range(_TRIES):
            row = await self.find(tenant, schedule_id)
            crashpoint("schedule.remove.before")
            if await self._records.documents.remove_document(row):
                crashpoint("schedule.remove.after")
                return
        raise _contended()

    async def keep_upload(self, template: Template) -> float | None:
        """Keep the upload that the schedule reads until its document refers to it; returns when to do that again."""
        upload_id = upload_of(template)
        if upload_id is None:
            return None
        now = self._clock.now()
        await self._records.access.keep_upload(upload_id, now + KEEP_UPLOAD_SECONDS)
        return now + KEEP_UPLOAD_SECONDS / 2

    async def _checked(self, tenant: TenantId, raw: bytes) -> Template:
        if len(raw) > MAX_TEMPLATE:
            raise InvalidField(
                f"`job` must be at most {MAX_TEMPLATE} bytes; name a longer list as its `source`.", field="job"
            )
        template = template_of(raw)
        with _inside("job"):
            invalid = await self._check_template(tenant, template)
        return msgspec.structs.replace(template, invalid_tasks=invalid)

    async def _check_template(self, tenant: TenantId, template: Template) -> int:
        """Returns the number of its tasks that are invalid."""
        spec, source = template.spec, template.source
        check_limits(spec)
        check_body_budget(spec, self._settings)
        check_insecure(spec, self._settings)
        refuse_tokens(spec.notify)
        if spec.changed_from is not None:
            raise InvalidField("Set `changed_only` of the schedule instead.", field="changed_from")
        if spec.replaces is not None:
            raise InvalidField("A schedule cannot replace a job.", field="replaces")
        await check_notify(self._system, tenant, spec.notify)
        if spec.mode is Mode.OPEN:
            raise InvalidField("A schedule cannot make an open job.", field="mode")
        if source is None:
            max_tasks = self._settings.max_inline_tasks
            return len(check_tasks(spec.kind, spec.tasks, max_tasks, spec.on_invalid).invalid)
        if spec.tasks:
            raise InvalidField("Give `tasks` or `source`, not both.", field="source")
        if (source.upload_id is None) == (source.url is None):
            raise InvalidField("`source` must have `upload_id` or `url`, and not both.", field="source")
        if source.url is not None:
            check_url(self._system, tenant, source.url, source.headers)
        else:
            await self._check_upload(tenant, source.upload_id or "")
        return 0

    async def _check_upload(self, tenant: TenantId, upload_id: str) -> None:
        upload = await self._records.access.upload(upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound("The upload was not found, or has expired.")

    async def _check_number(self, tenant: TenantId) -> None:
        limit = self._settings.max_schedules
        if len((await self._records.documents.documents(SCHEDULE, tenant, None, limit + 1)).items) >= limit:
            raise LimitReached(f"The tenant has {limit} schedules already, the maximum.", limit=limit)


def schedule_json(row: Document, now: float) -> dict[str, Any]:
    """A schedule as the API shows it, without secrets."""
    schedule = schedule_of(row)
    coming = [] if schedule.paused else next_fires(schedule.cron, schedule.timezone, now, NEXT_FIRES)
    return {
        "id": row.id,
        "name": schedule.name,
        "cron": schedule.cron,
        "cron_text": cron_text(schedule.cron),
        "timezone": schedule.timezone,
        "missed": schedule.missed,
        "paused": schedule.paused,
        "changed_only": schedule.changed_only,
        "created_at": iso_text(schedule.created_at),
        "next_fires": [iso_text(at) for at in coming],
        "fired": schedule.fired,
        "fires": [
            {
                "at": iso_text(fire.at),
                "made_at": iso_text(fire.made_at),
                "job_id": fire.job_id,
                "error": fire.error,
                "coalesced": fire.coalesced,
            }
            for fire in schedule.fires
        ],
        "invalid_lines": schedule.invalid_tasks,
        "job": shown_job(msgspec.json.decode(schedule.job)),
    }


def _changed_job(stored: msgspec.Raw, changes: Mapping[str, msgspec.Raw]) -> msgspec.Raw:
    fields = {**msgspec.json.decode(stored, type=dict[str, msgspec.Raw]), **changes}
    return msgspec.Raw(msgspec.json.encode({name: value for name, value in fields.items() if value != _NULL}))


def _first(cron: str, zone: str, after: float) -> float | None:
    return next(iter(next_fires(cron, zone, after, 1)), None)


def _check_changed_only(template: Template, changed_only: bool) -> None:
    if changed_only and template.spec.kind is not JobKind.FETCH:
        raise InvalidField("`changed_only` is for jobs of kind fetch.", field="changed_only")


def _check_name(name: str | None) -> None:
    if name is not None and (len(name) > MAX_NAME or _CONTROL.search(name)):
        raise InvalidField(f"`name` must be at most {MAX_NAME} characters, without control characters.", field="name")


@contextmanager
def _inside(part: str) -> Iterator[None]:
    """Prefix the field of an error with the part of the body that it is in."""
    try:
        yield
    except (InvalidField, UnknownField) as error:
        field = ".".join(filter(None, [part, error.details.get("field", "")]))
        raise type(error)(f"In `{part}`: {error.message}", **{**error.details, "field": field}) from None


def _contended() -> Conflict:
    return Conflict("Other requests changed the schedule at the same time. Try again.")
