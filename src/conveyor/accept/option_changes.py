"""Changed options of an existing job: by a rerun, and while the job runs. The changed options are checked as at submit,
together with the others."""

from collections.abc import Collection, Mapping
from typing import Any, get_type_hints

import msgspec

from conveyor.accept.default_pace import with_default_pace
from conveyor.accept.option_limits import check_body_budget, check_insecure, check_limits
from conveyor.accept.spec import JobSpec, decode_body
from conveyor.clock import Clock
from conveyor.errors import Conflict, InvalidField, JobEnded, NotFound, UnknownField
from conveyor.faults import crashpoint
from conveyor.jobs.deadlines import write_deadline
from conveyor.model import Job, Options, OutboxEvent, expiry_of
from conveyor.settings import Settings
from conveyor.states import ENDED
from conveyor.system import System

ALL = frozenset(Options.__struct_fields__)
# All but those that have their effect when the job is accepted or during its first run.
RERUN = ALL - {"on_invalid", "idle_timeout", "changed_from"}
# Those that workers can apply while they run the job.
LIVE = RERUN - {"handler", "extract", "keep_bodies", "export", "chunk_size"} | {"idle_timeout"}

# Those of a finished job that still have an effect.
FINISHED = frozenset({"retention_days"})

# The fields of a request, for the OpenAPI page.
_TYPES = get_type_hints(Options)
Changes = msgspec.defstruct(
    "Changes",
    [(field, _TYPES[field] | msgspec.UnsetType, msgspec.UNSET) for field in Options.__struct_fields__ if field in LIVE],
    frozen=True,
)

_SHOWN = 100
# Another request may change the options between our read and our write.
_TRIES = 5


def override_options(settings: Settings, job: Job, changes: Mapping[str, Any], allowed: Collection[str]) -> Options:
    """The job's options with some of them replaced. Raises UnknownField and InvalidField."""
    for field in changes:
        if field not in ALL:
            raise UnknownField(f"Unknown option `{field[:_SHOWN]}`.", field=field[:_SHOWN])
        if field not in allowed:
            raise InvalidField(f"`{field}` cannot be changed any more.", field=field)
    current = msgspec.to_builtins(job.options)
    spec = decode_body(msgspec.json.encode({**current, **changes, "kind": job.kind}), JobSpec)
    check_limits(spec)
    if "max_body_bytes" in changes:
        check_body_budget(spec, settings)
    if {"insecure", "gateway"}.intersection(changes):
        check_insecure(spec, settings)
    options = spec.options()
    # A stored job without a pace is fixed, unless somebody asks for the default.
    return with_default_pace(options, job.kind, settings) if "pace" in changes else options


async def change_options(system: System, job: Job, changes: Mapping[str, Any], allowed: Collection[str] = LIVE) -> Job:
    """Replace some options of a job in progress; workers apply them within a second. Of a finished job only its
    retention can change. Other options that are changed at the same time stay. Returns the changed job."""
    for _ in range(_TRIES):
        if allowed is LIVE and job.state in ENDED and not FINISHED.issuperset(changes):
            raise JobEnded(
                "The job has finished: only its `retention_days` can change. Start a rerun with other options.",
                state=job.state,
            )
        options = override_options(system.settings, job, changes, allowed)
        _check_expiry(system.clock, job, options)
        if options == job.options:
            return job
        crashpoint("options.change.before")
        changed = await system.records.jobs.change_options(
            job.job_id, job.version, options, _event(system.clock, job, changes)
        )
        crashpoint("options.change.after")
        reloaded = await system.records.jobs.job(job.tenant, job.job_id)
        if reloaded is None:
            raise NotFound
        job = reloaded
        if changed:
            await write_deadline(system.records, job)
            return job
    raise Conflict("Other requests changed the options of the job at the same time. Try again.")


def _check_expiry(clock: Clock, job: Job, options: Options) -> None:
    """A shorter retention must not remove the job at once: that is what DELETE is for."""
    expires_at = expiry_of(options, job.run.ended_at)
    if expires_at is not None and expires_at <= clock.now():
        raise InvalidField(
            f"`retention_days`: the job finished more than {options.retention_days:g} days ago and would expire at "
            "once. Delete the job instead, or keep it longer.",
            field="retention_days",
        )


def _event(clock: Clock, job: Job, changes: Mapping[str, Any]) -> OutboxEvent:
    """Names the changed options, without their values: headers and gateways carry secrets."""
    return OutboxEvent(
        notice_id=clock.new_id("evt"),
        tenant=job.tenant,
        job_id=job.job_id,
        run_id=job.run.run_id,
        event="job.changed",
        at=clock.now(),
        data={"changed": sorted(changes)},
    )
