"""The page of limits. Each number comes from the code, with the effect of reaching it."""

from typing import NamedTuple

from conveyor.accept import option_limits as limits
from conveyor.accept import schedules
from conveyor.api import connection_limit, protocol, request_bodies
from conveyor.api import dependencies as parts
from conveyor.cli.formatting import size as exact_size
from conveyor.egress import target_guard as targets
from conveyor.engines import s3
from conveyor.engines.dynamodb import lifetimes
from conveyor.engines.sqs import polls, queues
from conveyor.export import exports
from conveyor.jobs import event_names as notices
from conveyor.lists import inputs
from conveyor.model import Options
from conveyor.process import outcomes, retry
from conveyor.process.executors.download import export_api_executor as export_download
from conveyor.process.executors.download import transfer
from conveyor.read import status as progress
from conveyor.read import verification
from conveyor.settings import PREFIX, Settings

_DAY = 86_400


class Limit(NamedTuple):
    """A limit: its subject, its value, the setting or option that changes it, and the effect of reaching it."""

    what: str
    value: str
    moved_by: str
    then: str


def _set(field: str) -> str:
    assert field in Settings.__struct_fields__, field
    return f"`{PREFIX}{field.upper()}`"


def size(number: float) -> str:
    return exact_size(int(number)).replace(".0 ", " ")


def _count(value: float) -> str:
    return f"{value:,.12g}"


def _time(seconds: float) -> str:
    for unit, name in ((_DAY, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit and seconds % unit == 0:
            number = int(seconds // unit)
            return f"{number:,} {name}{'s' if number > 1 else ''}"
    return f"{seconds:g} s"


def requests() -> list[Limit]:
    default = Settings()
    return [
        Limit(
            "Request body",
            size(default.max_request_bytes),
            _set("max_request_bytes"),
            "413 `body_too_large`, as soon as the limit is passed. Upload the list instead.",
        ),
        Limit(
            "Tasks in one request",
            _count(default.max_inline_tasks),
            _set("max_inline_tasks"),
            "413 `too_many_tasks`. Upload the list.",
        ),
        Limit(
            "Tasks of a job that the request itself writes",
            _count(default.sync_task_limit),
            _set("sync_task_limit"),
            "Above it, the response is 202 and the list is ingested.",
        ),
        Limit(
            "A stored list that the request itself reads; decompressed, 16 times as much",
            size(default.sync_list_bytes),
            _set("sync_list_bytes"),
            "Above it, the response is 202 and the list is ingested.",
        ),
        Limit(
            "A list, stored and decompressed",
            size(default.max_list_bytes),
            _set("max_list_bytes"),
            "The upload is refused, or the ingest fails with a reason; resume or delete the job.",
        ),
        Limit(
            "One task's input, or one line",
            size(inputs.MAX_INPUT_BYTES),
            "",
            "The task is invalid: it is rejected or skipped. A much longer line fails the list.",
        ),
        Limit("Depth of a task's JSON", _count(inputs.MAX_DEPTH), "", "The task is invalid."),
        Limit("A URL", f"{_count(targets.MAX_URL_LENGTH)} characters", "", "The task is invalid."),
        Limit(
            "Headers of a task or job",
            f"{inputs.MAX_HEADERS}, {size(inputs.MAX_HEADER_BYTES)}",
            "",
            "400 `invalid_field`, or the task is invalid.",
        ),
        Limit("Name of a job", f"{limits.MAX_NAME} characters", "", "400 `invalid_field`."),
        Limit("`id` and `tag` of a task", f"{_count(inputs.MAX_LABEL)} characters", "", "The task is invalid."),
        Limit("Items of a page", _count(parts.MAX_LIMIT), "", "400 `invalid_field`. Use the cursor for more."),
        Limit(
            "Head of a request",
            f"{size(protocol.MAX_HEAD_BYTES)}, {protocol.MAX_HEADERS} headers",
            "",
            "431 `head_too_large`; the server closes the connection.",
        ),
        Limit(
            "Task rows that `?verify=true` counts",
            _count(verification.MAX_VERIFIED_ROWS),
            "",
            "403 `forbidden`, unless the key is an administrator's.",
        ),
        Limit(
            "Slowness of a request body",
            f"{request_bodies.LAG_SECONDS:g} s behind {size(request_bodies.MIN_RATE)}/s; "
            f"{_time(request_bodies.TOTAL_SECONDS)} as JSON, {request_bodies.KEYLESS_SECONDS:g} s without a key",
            "",
            "400 `bad_input`; the server closes the connection.",
        ),
        Limit(
            "Open client connections, in one process",
            _count(default.max_connections),
            _set("max_connections"),
            f"503 `overloaded` with Retry-After, except for health checks; {connection_limit.SPARE} above it the "
            "server closes connections.",
        ),
        Limit(
            "Requests with a key and a body at once, in one process",
            f"{_count(default.max_requests)}, {size(default.max_requests_bytes)}",
            f"{_set('max_requests')}, {_set('max_requests_bytes')}",
            "503 `overloaded` with Retry-After.",
        ),
        Limit(
            "Replay of an Idempotency-Key",
            _time(default.idempotency_seconds),
            _set("idempotency_seconds"),
            "Later, the same key creates a new job.",
        ),
        Limit(
            "An upload that no job uses",
            _time(default.upload_seconds),
            _set("upload_seconds"),
            "It is purged; its link answers 403.",
        ),
    ]


def work() -> list[Limit]:
    default = Settings()
    options = Options()
    return [
        Limit("Tasks of a job", "no limit", "", "Memory use does not grow with them."),
        Limit(
            "Unfinished tasks of one tenant",
            _count(default.tenant_queued_tasks),
            _set("tenant_queued_tasks"),
            "429 `quota_exceeded` with Retry-After; nothing is created.",
        ),
        Limit(
            "Unfinished tasks of all tenants",
            _count(default.max_queued_tasks),
            _set("max_queued_tasks"),
            "503 `overloaded` with Retry-After; nothing is created.",
        ),
        Limit(
            "Unfinished jobs of one tenant, of all tenants",
            f"{_count(default.tenant_jobs)}, {_count(default.max_jobs)}",
            f"{_set('tenant_jobs')}, {_set('max_jobs')}",
            "429, or 503, as above.",
        ),
        Limit(
            "Lists that wait for ingest, of one tenant, of all tenants",
            f"{size(default.tenant_staged_bytes)}, {size(default.max_staged_bytes)}",
            f"{_set('tenant_staged_bytes')}, {_set('max_staged_bytes')}",
            "429, or 503, as above.",
        ),
        Limit(
            "Tasks of a run at once",
            f"{options.concurrency}, at most {_count(limits.RANGES['concurrency'][1])}",
            "`concurrency`",
            "The others wait in the queue.",
        ),
        Limit(
            "Tasks at once in one worker loop",
            _count(default.worker_concurrency),
            _set("worker_concurrency"),
            "The others wait in the queue; tenants and runs take turns.",
        ),
        Limit(
            "Attempts of a task",
            f"{options.attempts}, at most {_count(limits.RANGES['attempts'][1])}",
            "`attempts`",
            "The task fails with the last error. `rerun` starts it again.",
        ),
        Limit(
            "Retry-After that is respected",
            _time(retry.MAX_RETRY_AFTER),
            "",
            "The retry starts after this time, even if the target asked for more.",
        ),
        Limit(
            "Duration of an attempt",
            f"{options.timeout:g} s, at most {_time(limits.RANGES['timeout'][1])}",
            "`timeout`",
            "The attempt fails with `timeout` and is retried.",
        ),
        Limit(
            "Body of a fetch",
            f"{size(options.max_body_bytes)}, at most {size(limits.RANGES['max_body_bytes'][1])}",
            "`max_body_bytes`",
            "The task fails with `body_too_large`; the rest is not read. Use kind `download`.",
        ),
        Limit(
            "A downloaded file",
            f"{size(options.download.max_bytes)}, at most {size(limits.RANGES['download.max_bytes'][1])}",
            "`download.max_bytes`",
            "The task fails with `body_too_large`.",
        ),
        Limit(
            "Redirects",
            f"{options.max_redirects}, at most {_count(limits.RANGES['max_redirects'][1])}",
            "`max_redirects`",
            "The task fails with `too_many_redirects`.",
        ),
        Limit(
            "Times that a download starts over in one attempt",
            _count(transfer._MAX_RESTARTS),
            "",
            "The attempt fails with `range_failed` and is retried.",
        ),
        Limit(
            "An answer of an export API",
            size(export_download._MAX_RESPONSE),
            "",
            "The task fails with `bad_answer`.",
        ),
        Limit(
            "Time until an export of an export API is ready",
            f"{_time(86_400)}, at most {_time(limits.RANGES['export.poll.timeout'][1])}",
            "`export.poll.timeout`",
            "The task fails with `export_timeout`.",
        ),
        Limit(
            "Lost starts of a chunk, then of a task",
            _count(default.max_lost_starts),
            _set("max_lost_starts"),
            "The task fails with `worker_lost` and is dead-lettered; the other tasks of its chunk continue.",
        ),
        Limit(
            "An open job without a batch",
            _time(options.idle_timeout),
            "`idle_timeout`",
            "It is closed; its reason says so.",
        ),
        Limit(
            "A job's rows and bodies",
            f"{options.retention_days:g} days, at most {limits.RANGES['retention_days'][1]:g}",
            "`retention_days`",
            "They expire that long after the end of the latest run, and are purged soon after. An unfinished job "
            "does not expire.",
        ),
        Limit(
            "A job's rows on DynamoDB",
            _time(lifetimes._LONGEST_USE),
            "",
            "They go by themselves that long after they were written, whatever the state of the job.",
        ),
        Limit(
            "Headers that are kept of a response",
            size(outcomes._MAX_HEADERS),
            "",
            f"Of a task whose details exceed {size(outcomes._MAX_DETAIL)}, headers that do not fit are left out.",
        ),
        Limit(
            "An unfinished run",
            "none",
            f"`max_lifetime`, {_set('max_lifetime_seconds')}",
            "The run fails with the code `max_lifetime`.",
        ),
    ]


def around() -> list[Limit]:
    default = Settings()
    waits = [float(text) for text in default.webhook_retries.split()]
    return [
        Limit(
            "Exports of a job",
            _count(exports._MAX_PER_JOB),
            "",
            "409 `limit_reached`. Delete one, or wait until one expires.",
        ),
        Limit(
            "Parts of an export", _count(exports.MAX_PARTS), "`part_bytes`", "The export fails; its `error` says so."
        ),
        Limit("An export", _time(default.export_seconds), _set("export_seconds"), "It is purged; create it again."),
        Limit("Runs listed with a job", _count(progress.MAX_RUNS), "", "Older runs are available by their id."),
        Limit("Entries of `notify`", _count(notices.MAX_NOTIFY), "", "400 `invalid_field`."),
        Limit(
            "Webhook endpoints of one tenant",
            _count(default.max_webhooks),
            _set("max_webhooks"),
            "409 `limit_reached`.",
        ),
        Limit(
            "Attempts of a webhook delivery",
            f"{len(waits) + 1} over {sum(waits) / _DAY:.1f} days",
            _set("webhook_retries"),
            "The delivery is `failed`; `redeliver` sends it again until it is purged.",
        ),
        Limit(
            "Response time of a receiver",
            _time(default.webhook_timeout),
            _set("webhook_timeout"),
            "The delivery is retried.",
        ),
        Limit(
            "Open event streams of one tenant, in one process",
            _count(default.max_streams),
            _set("max_streams"),
            "429 `too_many_streams`.",
        ),
        Limit("Schedules of one tenant", _count(default.max_schedules), _set("max_schedules"), "409 `limit_reached`."),
        Limit(
            "Job template of a schedule",
            size(schedules.MAX_TEMPLATE),
            "",
            "400 `invalid_field`. Use an upload or a URL as its source.",
        ),
        Limit(
            "A list uploaded directly to S3",
            size(s3.MAX_IN_ONE_PUT),
            "",
            "A larger list goes through the API.",
        ),
        Limit(
            "A message in flight on SQS",
            _time(polls.LONGEST_HOLD),
            "",
            "SQS redelivers it to another worker; a download resumes from its pieces.",
        ),
        Limit(
            "Receives of a message on SQS",
            _count(queues.MAX_RECEIVES),
            "",
            "SQS dead-letters it; the sweeper requeues the tasks from their rows.",
        ),
        Limit(
            "Runs with an SQS queue of their own",
            _count(default.run_queue_limit),
            _set("run_queue_limit"),
            "Further runs share one queue, in message groups.",
        ),
    ]


def _table(rows: list[Limit]) -> str:
    lines = [f"| {row.what} | {row.value} | {row.moved_by} | {row.then} |" for row in rows]
    return "\n".join(["| limit | value | set by | effect |", "|---|---|---|---|", *lines])


def requests_part() -> str:
    return _table(requests())


def work_part() -> str:
    return _table(work())


def around_part() -> str:
    return _table(around())
