"""What users do at a server that is upgraded: jobs of several kinds, and what follows when a job has ended."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from conveyor import Client
from conveyor.client.job import JobHandle
from tests.support.product_site import ProductSite
from tests.upgrade.versions import NEWER_OPTION, NEWER_VALUE

_YEARLY = "0 0 1 1 *"
_EXPORT: dict[str, Any] = {"format": "jsonl", "bodies": "text"}


@dataclass
class Work:
    """What a server has accepted: one job, and how many runs and exports it has."""

    kind: "Kind"
    job_id: str
    runs: int = 1
    exports: int = 0


class Kind:
    """One way to use a server."""

    name = "python"
    # A module of a version that knows it, and what is in it.
    known_by: tuple[str, str] | None = None
    options: ClassVar[dict[str, Any]] = {}
    # Whether something is done when the job has ended.
    followed = False

    def __init__(self, site: ProductSite, tasks: int) -> None:
        self.site = site
        self.tasks = tasks

    def is_known(self, source: Path) -> bool:
        if self.known_by is None:
            return True
        module, text = self.known_by
        return text in (source / "conveyor" / module).read_text()

    def submit(self, client: Client) -> Work:
        return Work(self, client.submit(self.given(), **self.options).id)

    def given(self) -> Sequence[Any]:
        return [self.site.url(n) for n in range(self.tasks)]

    def follow(self, work: Work, job: JobHandle) -> None:
        raise NotImplementedError

    def check(self, client: Client, work: Work) -> None:
        """Wait for a job, and read all of its results, one body, and its exports."""
        job = client.job(work.job_id).wait()
        assert (job.ok, job.total) == (True, self.tasks), (self.name, work, job.data)
        assert [run["number"] for run in job.data["runs"]] == list(range(work.runs, 0, -1)), (self.name, work)
        results = list(job.results())
        assert len({result.task_id for result in results}) == len(results) == self.tasks, (self.name, work)
        assert job.body(random.choice(results)), (self.name, work)
        exports = [export.wait() for export in job.exports()]
        assert [export.data["progress"]["tasks"] for export in exports] == [self.tasks] * work.exports, (
            self.name,
            work,
        )


class Python(Kind):
    options: ClassVar[dict[str, Any]] = {"handler": "upgrade.echo"}

    def given(self) -> Sequence[Any]:
        return [{"n": n, "noise": random.randbytes(2000).hex()} for n in range(self.tasks)]


class Newer(Python):
    """An option that no version but the later one knows."""

    name = "newer"
    known_by = ("model.py", NEWER_VALUE)
    options: ClassVar[dict[str, Any]] = {**Python.options, **NEWER_OPTION}


class Exported(Kind):
    name = "exported"
    followed = True

    def follow(self, work: Work, job: JobHandle) -> None:
        job.start_export(**_EXPORT)
        work.exports += 1


class RunAgain(Kind):
    name = "run again"
    followed = True

    def follow(self, work: Work, job: JobHandle) -> None:
        job.rerun(all=True)
        work.runs += 1


class Scheduled(Kind):
    name = "scheduled"
    known_by = ("api/schedule_routes.py", "def run_schedule")

    def submit(self, client: Client) -> Work:
        spec = {"cron": _YEARLY, "job": {"tasks": self.given()}}
        made = client.request("POST", "/v1/schedules", body=spec)
        fired = client.request("POST", f"/v1/schedules/{made['id']}/run")
        return Work(self, fired["job_id"])


class Pooled(Kind):
    name = "gateway pool"
    known_by = ("model.py", "class PooledGateway")

    def submit(self, client: Client) -> Work:
        pool = [{"url": f"{self.site.url(n)}?{{url}}", "weight": n} for n in (1, 2)]
        return Work(self, client.submit(self.given(), gateway={"pool": pool}).id)


class Extracted(Kind):
    name = "extract"
    followed = True
    known_by = ("model.py", "keep_bodies")
    options: ClassVar[dict[str, Any]] = {"extract": "upgrade.size"}

    def follow(self, work: Work, job: JobHandle) -> None:
        job.rerun(extract_only=True)
        work.runs += 1

    def check(self, client: Client, work: Work) -> None:
        super().check(client, work)
        job = client.job(work.job_id)
        assert job.extracted(next(job.results()))["size"] > 0


class ChangedOnly(Kind):
    name = "only what changed"
    followed = True
    known_by = ("model.py", "changed_only")

    def follow(self, work: Work, job: JobHandle) -> None:
        job.rerun(changed_only=True)
        work.runs += 1


KINDS = (Python, Newer, Exported, RunAgain, Scheduled, Pooled, Extracted, ChangedOnly)
