"""The pictures of the documentation: every page, with something to see on it."""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, expect

from tests.dashboard.world import World

PAGES = (
    "jobs",
    "job",
    "task",
    "new-job",
    "dead-letters",
    "schedules",
    "webhooks",
    "fleet",
    "sign-in",
    "dark",
    "phone",
)
_WIDTH = 1200
_POLITE = {"attempts": 2, "backoff": {"base": 0.1}, "breaker": {"enabled": False}}


def make_pictures(here: World, visit: Callable[..., Page], folder: Path) -> None:
    """Fill the server, and look at it."""
    main = _fill(here)
    page = visit("#/jobs", viewport=ViewportSize(width=_WIDTH, height=640))

    def take(name: str, path: str, height: int, shown: str, on: Page = page, width: int = _WIDTH) -> None:
        on.set_viewport_size(ViewportSize(width=width, height=height))
        on.goto(f"{here.url}/{path}")
        expect(on.get_by_text(shown).first).to_be_visible()
        on.wait_for_timeout(1500)
        on.screenshot(path=folder / f"{name}.png")

    take("jobs", "#/jobs", 560, "Product pages")
    take("fleet", "#/fleet", 700, "stock.example")
    page.goto(f"{here.url}/#/jobs/{main}")
    expect(page.locator(".tile").first).to_contain_text("7", timeout=60_000)
    take("job", f"#/jobs/{main}", 1160, "http_503")
    take("dead-letters", "#/dead-letters", 330, "not a URL")
    take("schedules", "#/schedules", 330, "Every night")
    hook = here.ask("GET", "/v1/webhooks")["items"][0]["id"]
    take("webhooks", f"#/webhooks/{hook}", 560, "delivered")
    failed = here.ask("GET", f"/v1/jobs/{main}/results?status=failed&error_code=http_503&limit=1")["items"][0]
    take("task", f"#/jobs/{main}/tasks/{failed['task_id']}", 900, "task.retried")
    page.set_viewport_size(ViewportSize(width=_WIDTH, height=640))
    page.goto(f"{here.url}/#/new")
    data = page.evaluate_handle(
        "() => { const d = new DataTransfer(); d.items.add(new File(['x'.repeat(4e6)], 'products.csv.gz')); return d }"
    )
    page.dispatch_event(".drop", "drop", {"dataTransfer": data})
    page.screenshot(path=folder / "new-job.png")
    dark = visit("#/jobs", color_scheme="dark")
    take("dark", f"#/jobs/{here.large}", 1000, "100,000 pages", dark)
    phone = visit("#/jobs")
    take("phone", f"#/jobs/{main}", 740, "Product pages", phone, 360)
    stranger = visit("", errors=True, signed_in=False)
    take("sign-in", "", 520, "Sign in to Conveyor", stranger)


def _fill(here: World) -> str:
    site = here.site.url
    here.site.willing = True
    here.ask("POST", "/v1/webhooks", {"url": f"{site}/hooks/conveyor", "description": "Orders service"})
    for name, cron in (("Every night", "0 3 * * *"), ("Price check", "*/15 8-18 * * 1-5")):
        job = {"name": name, "tasks": [f"{site}/page"]}
        here.ask("POST", "/v1/schedules", {"cron": cron, "timezone": "Europe/Berlin", "name": name, "job": job})
    here.ended(here.submit(name="Price check", tasks=[f"{site}/page/{number}" for number in range(900)], **_POLITE))
    here.ended(here.upload("not a URL\n", name="Supplier list", on_invalid="reject"))
    here.submit(name="Stock levels", tasks=["http://127.0.0.2:1/stock"] * 40, upstream="stock.example")
    here.napping("Thumbnails")
    kinds = ["fails", "gone", *["slow"] * 26]
    urls = [f"{site}/{kinds[number % 28]}/{20 + number * 37 % 160}/{number}" for number in range(1200)]
    return here.submit(name="Product pages", tasks=urls, concurrency=6, **_POLITE)
