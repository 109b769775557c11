"""Options of a job that is there: those that a rerun overrides, and those that are changed while it runs. Whatever is
given is checked as at submit, together with what stays."""

from collections.abc import Collection, Mapping
from typing import Any, get_type_hints

import msgspec

from conveyor.accept.option_limits import check_limits
from conveyor.accept.spec import JobSpec, decode_body
from conveyor.clock import Clock
from conveyor.errors import Conflict, InvalidField, JobEnded, NotFound, UnknownField
from conveyor.faults import crashpoint
from conveyor.jobs.deadlines import follow_deadline
from conveyor.model import Job, Options, OutboxEvent
from conveyor.states import ENDED
from conveyor.system import System

_ALL = frozenset(Options.__struct_fields__)
# What was decided when the job was accepted, or had its effect by the end of its first run.
RERUN = _ALL - {"retention_days", "on_invalid", "idle_timeout"}
# What a worker that is under way can follow.
LIVE = RERUN - {"handler", "export", "chunk_size"} | {"idle_timeout"}

# What may be sent, for the page that describes it.
_TYPES = get_type_hints(Options)
Changes = msgspec.defstruct(
    "Changes",
    [(field, _TYPES[field] | msgspec.UnsetType, msgspec.UNSET) for field in Options.__struct_fields__ if field in LIVE],
    frozen=True,
)

_SHOWN = 100
# Somebody else may change the options between our reading and our writing; not for ever.
_TRIES = 5


def overridden(job: Job, given: Mapping[str, Any], allowed: Collection[str]) -> Options:
    """The job's options with some of them replaced, each whole. Raises UnknownField and InvalidField."""
    for field in given:
        if field not in _ALL:
            raise UnknownField(f"There is no option `{field[:_SHOWN]}`.", field=field[:_SHOWN])
        if field not in allowed:
            raise InvalidField(f"`{field}` can not be changed any more.", field=field)
    stays = msgspec.to_builtins(job.options)
    spec = decode_body(msgspec.json.encode({**stays, **given, "kind": job.kind}), JobSpec)
    check_limits(spec)
    return spec.options()


async def change_options(system: System, job: Job, given: Mapping[str, Any], allowed: Collection[str] = LIVE) -> Job:
    """Replace some options of a job that has not ended; workers follow within a second. What others change meanwhile
    stays. Returns the job as it is then."""
    for _ in range(_TRIES):
        if allowed is LIVE and job.state in ENDED:
            raise JobEnded("The job has ended: give other options to a rerun of it.", state=job.state)
        options = overridden(job, given, allowed)
        if options == job.options:
            return job
        crashpoint("options.change.before")
        changed = await system.records.jobs.change_options(
            job.job_id, job.version, options, _notice(system.clock, job, given)
        )
        crashpoint("options.change.after")
        found = await system.records.jobs.job(job.tenant, job.job_id)
        if found is None:
            raise NotFound
        if changed:
            await follow_deadline(system.records, found)
            return found
        job = found
    raise Conflict("The job's options were changed by others again and again; send this once more.")


def _notice(clock: Clock, job: Job, given: Mapping[str, Any]) -> OutboxEvent:
    """Which options were changed, and not to what: headers and gateways carry secrets."""
    return OutboxEvent(
        notice_id=clock.new_id("evt"),
        tenant=job.tenant,
        job_id=job.job_id,
        run_id=job.run.run_id,
        event="job.changed",
        at=clock.now(),
        data={"changed": sorted(given)},
    )
