"""Every page of the dashboard in every state that it can be in, on a real server: for pictures, and for checks of all
pages. A view is where to go, and what is there once it is shown."""

from collections.abc import Callable
from typing import Any, NamedTuple

from playwright.sync_api import Page, expect

from tests.dashboard.world import World

_QUICK = {"attempts": 2, "backoff": {"base": 0.1}, "breaker": {"enabled": False}}


class View(NamedTuple):
    """One page in one state."""

    name: str
    path: str
    # A text on it, once it is complete.
    shown: str
    # What the user does there, before the look.
    act: Callable[[Page], None] | None = None
    # Of its picture.
    height: int = 800
    signed_in: bool = True

    def open(self, page: Page, url: str) -> None:
        page.goto(f"{url}/{self.path}")
        if self.act is not None:
            self.act(page)
        # The same text may be in a tab that is not shown.
        expect(page.get_by_text(self.shown).locator("visible=true").first).to_be_visible()


def views(here: World) -> list[View]:
    """Fill the server, and return all that is to be seen there. Running jobs run for some minutes."""
    site = here.site.url
    fed = _Made(here)
    here.site.willing = True
    hook = here.ask("POST", "/v1/webhooks", {"url": f"{site}/hooks/orders", "description": "Orders service"})["id"]
    nightly = _schedules(here)
    reruns = fed.job("Product pages", ["page", "page", "fails", "page", "gone", "page", "page", "page"] * 25, **_QUICK)
    few = fed.job("Price check", ["page"] * 199 + ["gone"], **_QUICK)
    skipped = here.upload(f"{site}/page/1\nnot a URL\nftp://old.example/list\n", name="Supplier list")
    letters = fed.job("Orders", ["fails"] * 3 + ["page"] * 9, on_exhausted="dead_letter", **_QUICK)
    rejected = here.upload("not a URL\n", name="Rejected list", on_invalid="reject")
    for job in (reruns, few, skipped, letters, rejected):
        here.ended(job)
    here.site.mended = True
    again = here.ask("POST", f"/v1/jobs/{reruns}/rerun", {"select": "failed"})
    assert again["run"]["number"] == 2
    here.ended(reruns)
    here.site.mended = False
    here.ask("POST", f"/v1/jobs/{few}/exports", {"format": "csv"})
    failing = here.ask("POST", "/v1/webhooks", {"url": f"{site}/hooks/stock", "description": "Stock service"})["id"]
    cancelled = fed.job("Old pages", ["slow/2000"] * 50, concurrency=2)
    here.ask("POST", f"/v1/jobs/{cancelled}/cancel")
    here.ended(cancelled)
    opened = here.submit(name="Feed", mode="open")
    downloads = here.submit(
        name="Product videos", kind="download", tasks=[f"{site}/trickle/{100_000 * rate}" for rate in range(1, 5)]
    )
    extracted = fed.job("Headlines", ["page"] * 3, extract="words")
    here.ended(extracted)
    waiting = here.submit(name="Stock levels", tasks=["http://127.0.0.2:1/stock"] * 40, upstream="api.example.com")
    running = fed.job("Thumbnails", ["slow/400"] * 3000, concurrency=4)
    paused = fed.job("Reviews", ["slow/400"] * 300, concurrency=4)
    here.wait(lambda: here.ask("GET", f"/v1/jobs/{paused}")["counts"]["succeeded"])
    here.ask("POST", f"/v1/jobs/{paused}/pause")
    here.wait(lambda: (here.ask("GET", f"/v1/jobs/{waiting}")["waiting"] or {}).get("code") == "breaker")
    failed = here.ask("GET", f"/v1/jobs/{letters}/results?status=failed&limit=1")["items"][0]["task_id"]
    here.wait(lambda: (here.ask("GET", f"/v1/jobs/{downloads}")["transfers"] or {}).get("rate"))
    slow = fed.job("Reports", ["slow/900000", "slow/900001", "page"], timeout=900, concurrency=3)
    steady = fed.job("Prices", ["page"] * 6, changed_from=few)
    here.ended(steady)
    here.wait(lambda: [task for task in here.ask("GET", f"/v1/jobs/{slow}/results")["items"] if "running" in task])
    busy = here.ask("GET", f"/v1/jobs/{slow}/results")["items"][0]["task_id"]
    words = here.ask("GET", f"/v1/jobs/{extracted}/results")["items"][0]["task_id"]
    good = here.ask("GET", f"/v1/jobs/{few}/results?status=succeeded&limit=1")["items"][0]["task_id"]
    return [
        View("sign-in", "", "Sign in to Conveyor", height=520, signed_in=False),
        View("jobs", "#/jobs", "open · waiting for tasks", height=860),
        View("jobs-selected", "#/jobs", "2 selected", _select("Select Price check", "Select Orders"), height=560),
        View("palette", "#/jobs", "Product pages", _palette, height=560),
        View("new-job", "#/new", "Read as text", _list_typed, height=1000),
        View("job-failures", f"#/jobs/{letters}", "completed with failures", height=1500),
        View("job-few-failures", f"#/jobs/{few}", "completed with failures", height=520),
        View("job-unchanged", f"#/jobs/{steady}", "of the succeeded", height=1300),
        View("job-selected", f"#/jobs/{letters}", "2 selected", _select("Select task 0", "Select task 1"), height=1500),
        View("job-running", f"#/jobs/{running}", "Throughput", height=1200),
        View("job-waiting", f"#/jobs/{waiting}", "next probe in", height=520),
        View("job-open", f"#/jobs/{opened}", "open · waiting for tasks", height=520),
        View("job-downloading", f"#/jobs/{downloads}", "Downloading", height=900),
        View("job-paused", f"#/jobs/{paused}", "paused", height=520),
        View("job-skipped-lines", f"#/jobs/{skipped}", "2 of 3 lines skipped", height=1500),
        View("job-rejected", f"#/jobs/{rejected}", "failed", height=520),
        View("job-cancelled", f"#/jobs/{cancelled}", "cancelled", height=520),
        View("job-hosts", f"#/jobs/{letters}?tab=hosts", "127.0.0.1", height=600),
        View("job-runs", f"#/jobs/{reruns}?tab=runs&change=fixed", "Run 2", height=1000),
        View("job-exports", f"#/jobs/{few}?tab=exports", "csv", height=520),
        View("job-options", f"#/jobs/{running}?tab=options", "Retried HTTP statuses", height=1500),
        View("job-events", f"#/jobs/{letters}?tab=events", "run.completed", height=800),
        View("job-rerun", f"#/jobs/{letters}", "Tasks, by their latest result", _press("Rerun…"), height=800),
        View("job-duplicate", f"#/jobs/{letters}", "Duplicate this job?", _press("Duplicate…"), height=800),
        View("task-failed", f"#/jobs/{letters}/tasks/{failed}", "http_503", height=1000),
        View("job-in-progress", f"#/jobs/{slow}", "in progress", height=1100),
        View("task-running", f"#/jobs/{slow}/tasks/{busy}", "in progress", height=700),
        View("task-succeeded", f"#/jobs/{few}/tasks/{good}", "200", height=1000),
        View("task-extracted", f"#/jobs/{extracted}/tasks/{words}", "Extracted", height=900),
        View("dead-letters", "#/dead-letters", "Starts a rerun of the task.", height=560),
        View("redrive", "#/dead-letters", "in one new run of each job", _press("Redrive all"), height=560),
        View("schedules", "#/schedules", "Every night", height=480),
        View("new-schedule", "#/schedules", "Minute, hour, day", _press("New schedule"), height=1000),
        View("schedule", f"#/schedules/{nightly}", "Every night", height=800),
        View("webhooks", "#/webhooks", "failing", height=480),
        View("webhook", f"#/webhooks/{hook}", "delivered", height=800),
        View("webhook-failing", f"#/webhooks/{failing}", "failing", height=800),
        View("fleet", "#/fleet", "api.example.com", height=1000),
        View("keys-locked", "#/keys", "administrator", height=480),
        View("keys", "#/keys", "Revoke", _as_admin(here.admin_key), height=560),
    ]


class _Made:
    """Makes jobs of pages of the site."""

    def __init__(self, here: World) -> None:
        self._here = here

    def job(self, name: str, kinds: list[str], **options: Any) -> str:
        urls = [f"{self._here.site.url}/{kind}/{number}" for number, kind in enumerate(kinds)]
        return self._here.submit(name=name, tasks=urls, **options)


def _schedules(here: World) -> str:
    """The id of one that has fired."""
    ids = []
    for name, cron in (("Every night", "0 3 * * *"), ("Working hours", "*/15 8-18 * * 1-5")):
        job = {"name": name, "tasks": [f"{here.site.url}/page"]}
        spec = {"cron": cron, "timezone": "Europe/Berlin", "name": name, "job": job}
        ids.append(here.ask("POST", "/v1/schedules", spec)["id"])
    fire = here.ask("POST", f"/v1/schedules/{ids[0]}/run")
    here.wait(lambda: [job for job in here.ask("GET", "/v1/jobs")["items"] if job["id"] == fire["job_id"]])
    here.ask("PATCH", f"/v1/schedules/{ids[1]}", {"paused": True})
    first: str = ids[0]
    return first


def _press(name: str) -> Callable[[Page], None]:
    return lambda page: page.get_by_role("button", name=name, exact=True).click()


def _select(*names: str) -> Callable[[Page], None]:
    def check(page: Page) -> None:
        for name in names:
            page.get_by_role("checkbox", name=name, exact=True).check()
        page.evaluate("scrollTo(0, 0)")

    return check


def _palette(page: Page) -> None:
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.keyboard.press("Control+k")
    page.keyboard.type("pro")


def _list_typed(page: Page) -> None:
    page.get_by_label("Or type it").fill("https://shop.example/1\nshop.example/2\nhttps://shop.example/3")
    page.get_by_text("More options").click()


def _as_admin(key: str) -> Callable[[Page], None]:
    def sign_in(page: Page) -> None:
        page.get_by_label("key").fill(key)
        page.keyboard.press("Enter")

    return sign_in
