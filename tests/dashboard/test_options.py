"""The options of a job on its page: shown, changed while it runs, refused at their fields; and a job duplicated."""

import json
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Page, expect

from conveyor.accept.option_changes import LIVE
from conveyor.accept.option_limits import RANGES
from conveyor.model import FailureThreshold, Options, Outage
from tests.dashboard.browsing import Open, button, confirm
from tests.dashboard.world import World

pytestmark = pytest.mark.timeout(120)

MODULE = "import('/dashboard/parts/option-fields.js')"
# The defaults of options that are none, once they are given.
GIVEN = {"outage": Outage(), "failure_threshold": FailureThreshold()}


def patient(here: World, **options: Any) -> str:
    """A job that is still running when it is looked at."""
    tasks = [{"number": number, "seconds": 0.2} for number in range(2000)]
    return here.submit(kind="python", handler="naps", tasks=tasks, concurrency=2, **options)


def stored(here: World, job: str) -> dict[str, Any]:
    options: dict[str, Any] = here.ask("GET", f"/v1/jobs/{job}")["options"]
    return options


def save(page: Page) -> None:
    button(page, "Save changes").click()


def test_fields_have_the_defaults_and_limits_of_the_server(here: World, visit: Open) -> None:
    """Every option that can change has its fields, and no other has."""
    fields = visit("#/jobs").evaluate(f"{MODULE}.then((module) => module.FIELDS)")
    assert {field["name"].split(".")[0] for field in fields} == LIVE
    for field in fields:
        outer, _, inner = field["name"].partition(".")
        if field["name"] in RANGES:
            assert (field["min"], field["max"]) == RANGES[field["name"]], field["name"]
        else:
            assert "min" not in field, field["name"]
        value: Any = getattr(Options(), outer)
        if inner:
            value = None if value is None else getattr(value, inner)
        assert field.get("standard") == json.loads(msgspec.json.encode(value)), field["name"]
        inside = getattr(GIVEN[outer], inner) if outer in GIVEN else None
        assert field.get("inside") == inside, field["name"]
    numbers = {name for name in RANGES if name.split(".")[0] in LIVE}
    assert {field["name"] for field in fields if field["type"] in ("whole", "number")} == numbers


def test_options_are_changed_while_the_job_runs(here: World, visit: Open) -> None:
    job = patient(here, name="Options", outage={}, priority=3)
    # A refusal is an error in the console.
    page = visit(f"#/jobs/{job}?tab=options", errors=True)
    expect(page.get_by_label("Priority")).to_have_value("3")
    expect(page.get_by_label("Delay in an outage")).to_have_value("900")
    expect(button(page, "Save changes")).to_be_disabled()
    page.get_by_label("Attempts", exact=True).fill("7")
    page.get_by_label("Longest backoff").fill("20")
    page.get_by_label("Stop at failed tasks").fill("50")
    page.get_by_label("Retried error codes").fill("timeout, connect_failed")
    # What is typed stays while the job goes on, and is refused at its field.
    expect(page.locator(".tile.succeeded b")).not_to_have_text("0")
    page.get_by_label("Upstream").fill("two words")
    save(page)
    expect(page.get_by_label("Upstream")).to_be_focused()
    expect(page.get_by_label("Upstream")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".field-problem")).to_contain_text("`upstream` must be a name")
    assert stored(here, job).get("attempts") is None
    page.get_by_label("Upstream").fill("")
    page.get_by_label("Attempts before an outage").fill("")
    page.get_by_label("Delay in an outage").fill("")
    save(page)
    expect(page.locator(".toast")).to_contain_text("The options are changed")
    expect(page.locator(".field-problem")).to_have_count(0)
    changed = stored(here, job)
    assert (changed["attempts"], changed["priority"], "outage" in changed) == (7, 3, False)
    assert changed["backoff"] == {"base": 1.0, "rate": 2.0, "cap": 20.0, "jitter": True}
    assert changed["failure_threshold"] == {"failed": 50, "ratio": None, "after": 100}
    assert changed["retry_errors"] == ["timeout", "connect_failed"]
    # The browser refuses what is out of range, and nothing is sent.
    page.get_by_label("Concurrency", exact=True).fill("0")
    save(page)
    assert page.get_by_label("Concurrency", exact=True).evaluate("(field) => field.validity.rangeUnderflow")
    button(page, "Undo").click()
    expect(page.get_by_label("Concurrency", exact=True)).to_have_value("2")
    # Another client changes them, and the page follows.
    here.ask("PATCH", f"/v1/jobs/{job}", {"timeout": 12})
    expect(page.get_by_label("Timeout", exact=True)).to_have_value("12")
    here.ask("POST", f"/v1/jobs/{job}/cancel")
    expect(page.get_by_text("The job has finished: only its retention can change.")).to_be_visible()
    expect(page.get_by_label("Attempts", exact=True)).to_be_disabled()
    page.get_by_label("Retention").fill("3")
    with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        save(page)
    expect(button(page, "Save changes")).to_be_disabled()
    assert stored(here, job)["retention_days"] == 3


def test_a_job_is_duplicated_with_its_secrets(here: World, visit: Open) -> None:
    secret = "Bearer of the job"
    job = here.submit(name="Stock", tasks=[f"{here.site.url}/page"], headers={"Authorization": secret}, attempts=2)
    here.ended(job)
    page = visit(f"#/jobs/{job}?tab=options")
    expect(page.get_by_label("Headers")).to_have_value("Authorization: [hidden]")
    button(page, "Duplicate…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Attempts")).to_have_value("2")
    dialog.get_by_label("Name").fill("Stock again")
    dialog.get_by_label("Concurrency").fill("3")
    seen = len(here.site.authorized)
    confirm(page, "Duplicate")
    expect(page.get_by_role("heading", name="Stock again", exact=True)).to_be_visible()
    copy = page.url.rpartition("/")[2]
    assert copy != job
    here.ended(copy)
    assert here.site.authorized[seen:] == [secret]
    assert stored(here, copy) == {**stored(here, job), "concurrency": 3}
    assert secret not in page.content()
