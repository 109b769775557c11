"""Links in events: absolute where CONVEYOR_PUBLIC_URL says how clients reach the API, and none without it."""

import json

from conveyor.model import JobId, OutboxEvent, RunId, TenantId
from conveyor.notify.deliveries import payload_of


def event(name: str, **data: object) -> OutboxEvent:
    return OutboxEvent("evt_1", TenantId("acme"), JobId("job_1"), RunId("run_1"), name, 0.0, data)


def test_without_a_public_url_there_are_none() -> None:
    assert "links" not in json.loads(payload_of(event("run.completed")))["data"]


def test_an_event_links_to_its_job() -> None:
    data = json.loads(payload_of(event("run.completed", counts={}), "https://jobs.example.com/"))["data"]
    assert data["links"] == {"job": "https://jobs.example.com/v1/jobs/job_1"}


def test_the_event_of_an_export_links_to_the_export_too() -> None:
    data = json.loads(payload_of(event("export.ready", export_id="export_1"), "https://jobs.example.com"))["data"]
    assert data["links"]["export"] == "https://jobs.example.com/v1/exports/export_1"
