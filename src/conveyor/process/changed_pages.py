"""Only what changed: requests that say which page a task has, and what becomes of a page that is still the same.

A run that compares (`compares`) looks at the earlier outcome of each task before the request. The condition of a task
holds the validators of its stored page, which the request sends to the URL that gave it, and the digest of the page:
most servers answer 304 to the first, and one that ignores them sends the same bytes. In both cases the task succeeds,
is unchanged, and refers to the body that is stored, and to what was extracted from it."""

from collections.abc import Iterable

import msgspec

from conveyor.model import Job, JobKind, Outcome, ResultDetail, Task
from conveyor.states import TaskStatus

# Characters of a validator. A longer one is not sent.
_MAX_VALIDATOR = 1000
# Headers that say how the body of a response travelled: a 304 has none.
_OF_THE_BODY = ("content-", "transfer-encoding")
# The status of a response without a body, because the one that the client has is current.
NOT_MODIFIED = 304

_detail = msgspec.json.Decoder(ResultDetail)


class Condition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request asks: send the page unless it is this one."""

    # The URL that gave the page, after all redirects. Validators are sent to it alone.
    url: str | None
    etag: str | None = None
    last_modified: str | None = None
    # Of the body; empty if it is not stored.
    sha256: str = ""


class EarlierPage(msgspec.Struct, frozen=True, gc=False):
    """The outcome that a task had before the run. `extracts_again`: the job has another function since then.
    `is_copied`: it is of another job, so that its body has to be copied."""

    task: Task
    condition: Condition
    extracts_again: bool = False
    is_copied: bool = False


def compares(job: Job) -> bool:
    """Whether the run compares pages with those of earlier outcomes."""
    lineage = job.run.lineage
    return job.kind is JobKind.FETCH and (has_base(job) if lineage is None else lineage.changed_only)


def has_base(job: Job) -> bool:
    """Whether the run compares with another job: the first one may."""
    return job.run.lineage is None and job.options.changed_from is not None


def earlier_page(job: Job, task: Task, *, extracts_again: bool, is_copied: bool = False) -> EarlierPage | None:
    """What to compare a page with; None if the outcome lacks something that an unchanged task of the run needs."""
    options, detail = job.options, task.detail
    needs_body = options.extract is None or options.keep_bodies or extracts_again
    if task.status is not TaskStatus.SUCCEEDED or (needs_body and detail.body is None):
        return None
    fields = {name.lower(): value for name, value in detail.headers or ()}
    sha256 = "" if detail.body is None else detail.body.sha256
    condition = Condition(detail.final_url, _validator(fields, "etag"), _validator(fields, "last-modified"), sha256)
    return EarlierPage(task, condition, extracts_again, is_copied)


def reuse_page(job: Job, outcome: Outcome, earlier: EarlierPage) -> None:
    """Give an unchanged outcome what is stored of the page. A page that is copied follows (page_copies.py)."""
    detail = earlier.task.detail
    outcome.keeps_extracted = job.options.extract is not None and not earlier.extracts_again
    if not earlier.is_copied:
        outcome.kept = detail.body
        outcome.extracted_ref = detail.extracted if outcome.keeps_extracted else None
    if outcome.http_status == NOT_MODIFIED:
        _complete_head(outcome, detail)


def _complete_head(outcome: Outcome, earlier: ResultDetail) -> None:
    """A 304 says what has changed in the head of the stored response (RFC 9111, 4.3.4)."""
    answered = outcome.headers
    if outcome.detail is not None:
        detail = _detail.decode(outcome.detail)
        answered, outcome.final_url = detail.headers, detail.final_url
    outcome.headers = _merged(earlier.headers or (), answered or ())
    outcome.content_type = earlier.content_type
    outcome.detail = None


def _merged(stored: Iterable[tuple[str, str]], answered: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    news = [(name, value) for name, value in answered if not name.lower().startswith(_OF_THE_BODY)]
    names = {name.lower() for name, _ in news}
    return [*((name, value) for name, value in stored if name.lower() not in names), *news]


def _validator(fields: dict[str, str], name: str) -> str | None:
    value = fields.get(name, "")
    return value if 0 < len(value) <= _MAX_VALIDATOR and value.isascii() and value.isprintable() else None
