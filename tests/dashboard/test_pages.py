"""The dashboard in a real browser: every button, by mouse and by keyboard; hostile texts; a server that restarts; a job
of 100,000 tasks; a phone; the dark. Whatever a page does, its console has no error and its policy nothing to report."""

import json
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import ViewportSize, expect

from tests.dashboard.browsing import WIDE, Open, button, confirm, heading, usable
from tests.dashboard.world import CODES, HOSTILE, LARGE, World
from tests.support.up_process import environment

PHONE = ViewportSize(width=360, height=740)

pytestmark = pytest.mark.timeout(120)


class TestJobs:
    def test_jobs_move_and_can_be_found(self, here: World, visit: Open) -> None:
        page = visit("#/jobs")
        expect(page.get_by_text("100,000 pages")).to_be_visible()
        job = here.napping("moves by itself")
        row = page.get_by_role("listitem").filter(has_text="moves by itself")
        expect(row).to_contain_text("running")
        bar = row.get_by_role("progressbar")
        expect(bar).not_to_have_attribute("aria-valuenow", "0")
        expect(page.locator(".standing")).to_have_text("Live")
        here.ask("POST", f"/v1/jobs/{job}/cancel")
        expect(row).to_contain_text("cancelled")
        page.get_by_role("searchbox").fill("MOVES")
        expect(page.get_by_role("listitem")).to_have_count(1)
        page.get_by_role("combobox", name="State").select_option("failed")
        expect(page.get_by_text("No job matches")).to_be_visible()
        assert "state=failed" in page.url
        assert "text=MOVES" in page.url
        page.go_back()
        expect(page.get_by_role("listitem")).to_have_count(1)
        expect(page.get_by_role("combobox", name="State")).to_have_value("")
        page.reload()
        expect(page.get_by_role("searchbox")).to_have_value("MOVES")
        expect(page.get_by_role("listitem")).to_have_count(1)
        row.get_by_role("link").click()
        expect(heading(page, "moves by itself")).to_be_focused()
        button(page, "Delete").click()
        confirm(page, "Cancel")
        assert here.state(job) == "cancelled"
        button(page, "Delete").click()
        confirm(page, "Delete")
        expect(heading(page, "Jobs")).to_be_visible()
        expect(row).to_have_count(0)

    def test_pause_resume_cancel(self, here: World, visit: Open) -> None:
        job = here.napping("pausing")
        page = visit(f"#/jobs/{job}")
        button(page, "Pause").click()
        said = page.locator(".toast").filter(has_text="The job is paused.")
        said.get_by_role("button", name="Dismiss").click()
        expect(said).to_have_count(0)
        expect(page.locator(".notice").filter(has_text="The job is paused. Resume it")).to_be_visible()
        assert here.state(job) == "paused"
        button(page, "Resume").click()
        expect(button(page, "Pause")).to_be_visible()
        assert here.state(job) == "running"
        expect(page.locator(".tile.succeeded b")).not_to_have_text("0")
        button(page, "Cancel").click()
        confirm(page, "Cancel job")
        expect(button(page, "Delete")).to_be_visible()
        expect(button(page, "Cancel")).to_have_count(0)
        assert here.state(job) == "cancelled"

    def test_errors_filter_tasks_and_what_failed_is_run_again(self, here: World, visit: Open) -> None:
        urls = [f"{here.site.url}/{'fails' if number % 4 == 0 else 'page'}/{number}" for number in range(80)]
        job = here.submit(name="Catalogue pages", tasks=urls, attempts=1, breaker={"enabled": False})
        here.ended(job)
        page = visit(f"#/jobs/{job}")
        table = page.get_by_role("table", name="Tasks")
        page.get_by_role("button", name="http_503").click()
        expect(heading(page, "Tasks")).to_be_focused()
        expect(table.get_by_role("row")).to_have_count(21)
        expect(table.get_by_text("http_503")).to_have_count(20)
        page.get_by_role("button", name="Remove the filter").click()
        expect(table.get_by_role("row")).to_have_count(26)
        button(page, "Next").click()
        expect(page.get_by_text("Page 2")).to_be_visible()
        button(page, "Previous").click()
        expect(page.get_by_text("Page 1")).to_be_visible()
        page.get_by_role("searchbox").fill("page/79")
        expect(table.get_by_role("row")).to_have_count(2)
        page.get_by_role("searchbox").fill("")
        page.get_by_role("combobox", name="Status").select_option("succeeded")
        expect(table.get_by_text("failed")).to_have_count(0)
        page.get_by_role("combobox", name="Status").select_option("")
        expect(page.get_by_role("img", name=re.compile("80 of 80 tasks finished"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("Latency: p50"))).to_be_visible()
        button(page, "Rerun failed").click()
        confirm(page, "Rerun failed")
        page.get_by_role("navigation", name="Parts of the job").get_by_role("link", name="Runs").click()
        runs = page.get_by_role("table", name="Runs")
        expect(runs.get_by_text("failed of the previous run")).to_be_visible()
        expect(runs.get_by_text("completed")).to_have_count(2)
        runs.get_by_role("link", name="Run 1").click()
        expect(page.get_by_role("heading", name="Throughput · run 1")).to_be_visible()
        expect(page.locator(".tile.failed b")).to_have_text("20")
        page.get_by_role("link", name="Run 2").click()
        expect(page.get_by_role("heading", name="Throughput · run 2")).to_be_visible()
        expect(page.locator(".tile", has_text="Finished")).to_contain_text("of 20")
        expect(table.get_by_role("row")).to_have_count(21)
        page.go_back()
        expect(page.get_by_role("heading", name="Throughput · run 1")).to_be_visible()
        page.get_by_role("link", name="All runs").click()
        expect(page.locator(".tile", has_text="Finished")).to_contain_text("of 80")
        button(page, "Export").click()
        page.get_by_role("combobox", name="Format").select_option("jsonl")
        confirm(page, "Export")
        exports = page.get_by_role("table", name="Exports")
        with page.expect_download() as download:
            exports.get_by_role("link").click()
        assert Path(download.value.path()).read_text().count("\n") == 80, "every task, not only those of the rerun"
        expect(page.locator(".tile", has_text="Succeeded")).to_contain_text("60")
        with page.expect_download() as download:
            page.get_by_role("link", name="Download all as zip").click()
        assert Path(download.value.path()).read_bytes().startswith(b"PK")
        exports.get_by_role("button", name="Delete the jsonl export").click()
        expect(exports.get_by_role("row")).to_have_count(0)

    def test_many_jobs_are_deleted_at_once(self, here: World, visit: Open) -> None:
        jobs = [here.submit(name=f"Many {number}", kind="python", handler="double", tasks=[1]) for number in range(3)]
        for job in jobs:
            here.ended(job)
        page = visit("#/jobs?text=many")
        expect(page.get_by_role("listitem")).to_have_count(3)
        for number in range(2):
            page.get_by_role("checkbox", name=f"Select Many {number}").check()
        chosen = page.get_by_role("group", name="Selected jobs")
        expect(chosen).to_contain_text("2 selected")
        chosen.get_by_role("button", name="Delete").click()
        confirm(page, "Delete")
        expect(page.get_by_text("2 jobs deleted.")).to_be_visible()
        expect(page.get_by_role("listitem")).to_have_count(1)
        expect(chosen).to_be_hidden()

    def test_chosen_tasks_are_rerun(self, here: World, visit: Open) -> None:
        job = here.submit(name="Chosen", tasks=[f"{here.site.url}/page/{n}" for n in range(4)])
        here.ended(job)
        page = visit(f"#/jobs/{job}?sort=-%23")
        table = page.get_by_role("table", name="Tasks")
        expect(table.get_by_role("row").nth(1)).to_contain_text("page/3")
        page.get_by_role("button", name="#", exact=True).click()
        expect(table.get_by_role("row").nth(1)).to_contain_text("page/0")
        for index in (1, 2):
            page.get_by_role("checkbox", name=f"Select task {index}").check()
        button(page, "Rerun selected").click()
        confirm(page, "Rerun")
        here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["run"]["total"] == 2)
        here.ended(job)
        button(page, "Rerun…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Host").fill("127.0.0.1")
        expect(dialog.get_by_label("Those that match:")).to_be_checked()
        confirm(page, "Rerun")
        here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["run"]["total"] == 4)

    def test_runs_are_compared_and_failed_tasks_walked(self, here: World, visit: Open) -> None:
        urls = [f"{here.site.url}/{'fails' if n in (2, 5) else 'page'}/{n}" for n in range(8)]
        job = here.submit(name="Compared", tasks=urls, attempts=1, breaker={"enabled": False})
        here.ended(job)
        here.ask("POST", f"/v1/jobs/{job}/rerun", {"select": "all"})
        here.ended(job)
        page = visit(f"#/jobs/{job}?tab=runs", permissions=["clipboard-read", "clipboard-write"])
        page.get_by_role("combobox", name="Change").select_option("still_failed")
        found = page.get_by_role("table", name="Comparison")
        expect(found.get_by_role("row")).to_have_count(3)
        found.get_by_role("link").first.click()
        expect(heading(page, "Task 2")).to_be_visible()
        button(page, "Next failed").click()
        expect(heading(page, "Task 5")).to_be_visible()
        button(page, "Next failed").click()
        expect(page.get_by_text("No failed task after this one.")).to_be_visible()
        button(page, "Previous failed").click()
        expect(heading(page, "Task 2")).to_be_visible()
        button(page, "Copy as curl").click()
        expect(page.get_by_text("Copied.")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == f"curl '{urls[2]}'"
        script = """async () => {
            const { curlOf } = await import("/dashboard/parts/copy.js");
            const headers = { "X-Key": "[hidden]", authorization: "[hidden]" };
            const input = { method: "POST", headers: { Authorization: "[hidden]" }, body: "it's" };
            return curlOf(input, "http://a.b/", { headers, gateway: { proxy: "[hidden]" } });
        }"""
        expected = (
            """curl --proxy "$PROXY" -X 'POST' -H "X-Key: $X_KEY" -H "Authorization: $AUTHORIZATION" """
            """--data-raw 'it'\\''s' 'http://a.b/'"""
        )
        assert page.evaluate(script) == expected
        button(page, "Rerun task").click()
        confirm(page, "Rerun")
        expect(heading(page, "Compared")).to_be_visible()
        here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["run"]["number"] == 3)

    def test_a_palette_leads_to_pages_and_jobs(self, here: World, visit: Open) -> None:
        page = visit("#/jobs")
        expect(page.get_by_role("listitem").first).to_be_visible()
        page.keyboard.press("/")
        expect(page.get_by_role("searchbox")).to_be_focused()
        page.keyboard.press("Control+k")
        palette = page.get_by_role("dialog", name="Commands")
        palette.get_by_role("combobox").fill("100,000")
        expect(palette.get_by_role("option")).to_have_count(1)
        page.keyboard.press("Enter")
        expect(heading(page, "100,000 pages")).to_be_visible()
        page.keyboard.press("?")
        palette.get_by_role("combobox").fill("flee")
        expect(palette.get_by_role("option").first).to_contain_text("Fleet")
        page.keyboard.press("Enter")
        expect(heading(page, "Fleet")).to_be_visible()

    def test_many_tabs_work_at_once(self, here: World, visit: Open) -> None:
        first = visit("#/jobs", viewport=WIDE)
        tabs = [first, *(first.context.new_page() for _ in range(7))]
        for tab in tabs[1:]:
            tab.goto(f"{here.url}/#/jobs")
            expect(tab.get_by_role("listitem").first).to_be_visible()
        standings = [tab.locator(".standing").inner_text() for tab in tabs]
        assert standings.count("Live") <= 3
        here.submit(name="in all tabs", kind="python", handler="double", tasks=[1])
        for tab in tabs:
            expect(tab.get_by_text("in all tabs").first).to_be_visible()

    def test_labels_say_how_it_stands(self, here: World, visit: Open) -> None:
        site = here.site.url
        spec: dict[str, Any] = {"attempts": 1, "breaker": {"enabled": False}}
        some = here.submit(
            name="Some failed", tasks=[f"{site}/fails/1", *[f"{site}/page/{n}" for n in range(19)]], **spec
        )
        many = here.submit(name="Many failed", tasks=[f"{site}/fails/1", f"{site}/page/1"], **spec)
        skipped = here.upload(f"{site}/page/1\nnonsense\nnonsense\n", name="Skipped")
        waiting = here.submit(name="Waiting", mode="open")
        for job in (some, many, skipped):
            here.ended(job)
        for job, text, look in (
            (some, "completed with failures", "held"),
            (many, "completed with failures", "bad"),
            (skipped, "completed", "good"),
            (waiting, "open · waiting for tasks", "idle"),
        ):
            page = visit(f"#/jobs/{job}")
            expect(page.locator(".title .pill")).to_have_text(text)
            expect(page.locator(".title .pill")).to_have_class(f"pill {look}")
        page.goto(f"{here.url}/#/jobs/{skipped}")
        expect(page.locator(".notice")).to_contain_text("2 of 3 lines skipped")
        page.get_by_role("link", name="Options").click()
        page.locator(".notice").get_by_role("link", name="Invalid lines").click()
        expect(page.get_by_role("table", name="Invalid lines")).to_be_visible()
        page.goto(f"{here.url}/#/jobs")
        row = page.get_by_role("listitem").filter(has_text="Many failed")
        expect(row.locator(".pill")).to_have_text("completed with failures")
        expect(page.get_by_role("listitem").filter(has_text="Skipped")).to_contain_text("2 skipped")
        here.ask("POST", f"/v1/jobs/{waiting}/cancel")

    def test_a_cancelled_count_is_shown(self, here: World, visit: Open) -> None:
        job = here.napping("to be cancelled", 400)
        here.ask("POST", f"/v1/jobs/{job}/cancel")
        # The sweeper cancels what has not started.
        here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["counts"]["cancelled"])
        page = visit(f"#/jobs/{job}")
        expect(page.locator(".tile", has_text="Cancelled")).to_be_visible()
        # A task that was never attempted took no time.
        page.goto(f"{here.url}/#/jobs/{job}?status=cancelled")
        row = page.get_by_role("table", name="Tasks").get_by_role("row").nth(1)
        expect(row.locator("td[data-title=Attempts]")).to_have_text("0")
        expect(row.locator("td[data-title=Duration]")).to_have_text("\u2013")

    def test_an_open_job_waits_for_tasks_until_it_is_closed(self, here: World, visit: Open) -> None:
        job = here.submit(name="Feed of orders", mode="open")
        here.ask("POST", f"/v1/jobs/{job}/tasks", {"tasks": [f"{here.site.url}/page/1", "nonsense"]})
        here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["counts"]["succeeded"])
        page = visit("#/fleet")
        lane = page.get_by_role("table", name="Lanes").get_by_role("row").filter(has_text="Feed of orders")
        expect(lane).to_contain_text("open · waiting for tasks")
        page.goto(f"{here.url}/#/jobs/{job}")
        expect(page.locator(".notice")).to_have_text(
            ["The job waits for more tasks.", "1 of 2 lines skipped: Invalid lines in the overview."]
        )
        button(page, "Close").click()
        confirm(page, "Close job")
        expect(page.locator(".title .pill")).to_have_text("completed")
        expect(button(page, "Close")).to_have_count(0)

    def test_a_task_tells_its_story(self, here: World, visit: Open) -> None:
        spec = {"attempts": 2, "backoff": {"base": 0}, "breaker": {"enabled": False}}
        job = here.submit(name="stories", tasks=[f"{here.site.url}/fails/1"], **spec)
        here.ended(job)
        page = visit(f"#/jobs/{job}")
        page.get_by_role("table", name="Tasks").get_by_role("link").click()
        expect(heading(page, "Task 0")).to_be_focused()
        story = page.locator(".trail")
        expect(story.get_by_text("task.retried")).to_be_visible()
        expect(story.get_by_text("task.failed")).to_be_visible()
        attempts = page.locator(".attempts li")
        expect(attempts).to_have_count(2)
        expect(attempts.first).to_contain_text("http_503")
        expect(attempts.first).to_contain_text("backoff")
        expect(page.get_by_label("Body")).to_contain_text("Page /fails/1")
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        assert b"Page /fails/1" in Path(download.value.path()).read_bytes()


class TestNewJob:
    def test_a_list_is_dropped(self, here: World, visit: Open) -> None:
        page = visit("#/new")
        lines = "\\n".join(f"{here.site.url}/page/{number}" for number in range(30))
        data = page.evaluate_handle(
            f"() => {{ const d = new DataTransfer(); d.items.add(new File(['{lines}'], 'dropped.txt')); return d }}"
        )
        page.dispatch_event(".drop", "drop", {"dataTransfer": data})
        expect(page.get_by_text("dropped.txt")).to_be_visible()
        button(page, "Submit").click()
        expect(heading(page, "dropped.txt")).to_be_visible()
        expect(page.locator(".title .pill")).to_have_text("completed")
        expect(page.locator(".tile.succeeded b")).to_have_text("30")

    def test_a_file_is_chosen_or_a_list_typed(self, here: World, visit: Open, tmp_path: Path) -> None:
        numbers = tmp_path / "numbers.jsonl"
        # More than one piece of the hash.
        line = {"seconds": 0.2, "pad": "x" * 1000}
        numbers.write_text("".join(json.dumps({"number": number, **line}) + "\n" for number in range(5_000)))
        page = visit("#/new")
        page.locator("input[type=file]").set_input_files(numbers)
        page.get_by_role("combobox", name="Kind").select_option("python")
        expect(page.get_by_text("Live workers have")).to_contain_text("naps")
        page.get_by_label("Function").fill("naps")
        page.get_by_role("textbox", name="Name").fill("numbers of mine")
        button(page, "Submit").click()
        expect(heading(page, "numbers of mine")).to_be_visible()
        button(page, "Cancel").click()
        confirm(page, "Cancel job")
        page.goto(f"{here.url}/#/new")
        button(page, "Submit").click()
        expect(page.get_by_role("alert")).to_contain_text("The list is empty")
        page.get_by_role("textbox", name="Or type it").fill(f"{here.site.url}/page/1\nnonsense\n")
        expect(page.get_by_text("Read as text: 1 task, 1 invalid line")).to_be_visible()
        expect(page.get_by_text("Line 2:")).to_be_visible()
        page.get_by_text("More options").click()
        page.get_by_label("Retention").fill("3")
        # Leaving loses nothing.
        page.goto(f"{here.url}/#/fleet")
        expect(heading(page, "Fleet")).to_be_visible()
        page.goto(f"{here.url}/#/new")
        expect(page.get_by_role("textbox", name="Or type it")).to_have_value(re.compile("nonsense"))
        expect(page.get_by_text("Line 2:")).to_be_visible()
        # A file, too.
        chosen = tmp_path / "chosen.txt"
        chosen.write_text(f"{here.site.url}/page/1\n")
        page.locator("input[type=file]").set_input_files(chosen)
        expect(page.get_by_text("Read as text: 1 task")).to_be_visible()
        page.get_by_text("More options").click()
        page.get_by_label("Extract").fill("words")
        page.get_by_role("link", name="Fleet").click()
        expect(heading(page, "Fleet")).to_be_visible()
        page.go_back()
        expect(page.get_by_text("chosen.txt")).to_be_visible()
        button(page, "Submit").click()
        expect(page.locator(".title .pill")).to_have_text("completed")
        job = page.url.rpartition("/")[2]
        assert here.ask("GET", f"/v1/jobs/{job}")["options"]["extract"] == "words"
        assert here.ask("GET", f"/v1/jobs/{job}/results")["items"][0]["extracted"]["first"] == "Page"
        page.goto(f"{here.url}/#/new")
        expect(page.get_by_text("Drop a list here")).to_be_visible()
        page.get_by_role("textbox", name="Or type it").fill(f"{here.site.url}/page/1\nnonsense\n")
        page.get_by_text("More options").click()
        page.get_by_label("Invalid lines").select_option("reject")
        button(page, "Submit").click()
        expect(page.locator(".notice.bad")).to_contain_text("The list has 1 invalid line")
        page.goto(f"{here.url}/#/new")
        page.get_by_role("textbox", name="Or type it").fill(f"{here.site.url}/page/1\nnonsense\n")
        button(page, "Submit").click()
        lines = page.get_by_role("table", name="Invalid lines")
        expect(lines.get_by_role("row").last).to_contain_text("nonsense")
        sizes = [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000]
        script = """async (sizes) => {
            const { Sha256 } = await import("/dashboard/sha256.js");
            const half = (size) => new Uint8Array(size).fill(7);
            return sizes.map((size) => new Sha256().update(half(size)).update(half(size)).hex());
        }"""
        assert page.evaluate(script, sizes) == [sha256(b"\7" * (2 * size)).hexdigest() for size in sizes]


class TestOperations:
    def test_dead_letters_are_sent_back(self, here: World, visit: Open) -> None:
        job = here.upload("nonsense\n", name="unreadable", on_invalid="reject")
        here.ended(job)
        page = visit("#/dead-letters")
        letters = page.get_by_role("table", name="Dead letters")
        expect(letters.get_by_text(job)).to_be_visible()
        expect(button(page, "Redrive")).to_be_disabled()
        button(page, "Select all").click()
        expect(letters.get_by_role("checkbox").first).to_be_checked()
        button(page, "Select none").click()
        letters.get_by_role("row").filter(has_text=job).get_by_role("checkbox").check()
        expect(letters.get_by_role("row").filter(has_text=job)).to_contain_text("Resumes the ingest of the job.")
        button(page, "Redrive 1").click()
        expect(page.get_by_role("dialog")).to_contain_text("1 dead letter: the message goes back to its queue")
        confirm(page, "Redrive")
        expect(page.get_by_role("status").get_by_text("1 redriven.")).to_be_visible()
        expect(page.get_by_text("1 dead letter went back to the queue.")).to_be_visible()

    def test_dead_lettered_tasks_are_redriven_by_error(self, here: World, visit: Open) -> None:
        spec = {"tasks": [f"{here.site.url}/gone"], "retry_statuses": [404], "attempts": 1}
        job = here.submit(**spec, on_exhausted="dead_letter")
        here.ended(job)
        page = visit("#/dead-letters")
        letters = page.get_by_role("table", name="Dead letters")
        expect(letters.get_by_role("row").filter(has_text=job).get_by_text("http_404")).to_be_visible()
        page.get_by_label("Error code").fill("http_500")
        page.get_by_label("Error code").press("Enter")
        expect(page.get_by_text("No dead letter matches")).to_be_visible()
        page.get_by_label("Error code").fill("http_404")
        page.get_by_label("Error code").press("Enter")
        expect(letters.get_by_role("link", name="task 0")).to_be_visible()
        assert "error=http_404" in page.url
        button(page, "Redrive all that match").click()
        expect(page.get_by_role("dialog")).to_contain_text("their failed tasks are rerun, in one new run of each job")
        confirm(page, "Redrive")
        expect(page.get_by_role("status").get_by_text("1 redriven.").first).to_be_visible()
        # What came of it: the page is still gone.
        expect(page.locator(".outcome")).to_contain_text("0 succeeded, 1 failed of 1")
        expect(page.locator(".outcome")).to_contain_text("completed with failures")
        assert here.ask("GET", f"/v1/jobs/{job}")["run"]["number"] == 2

    def test_schedules_are_paused_and_deleted(self, here: World, visit: Open) -> None:
        for name in ("Every night", "Hourly"):
            spec = {"cron": "0 3 * * *", "name": name, "job": {"tasks": [f"{here.site.url}/page"]}}
            here.ask("POST", "/v1/schedules", spec)
        page = visit("#/schedules")
        row = page.get_by_role("row").filter(has_text="Every night")
        button(page, "Pause Every night").click()
        expect(row).to_contain_text("paused")
        button(page, "Resume Every night").click()
        expect(row).to_contain_text("active")
        button(page, "Delete Every night").click()
        confirm(page, "Delete")
        expect(row).to_have_count(0)
        assert [each["name"] for each in here.ask("GET", "/v1/schedules")["items"]] == ["Hourly"]

    def test_a_schedule_is_made_edited_and_run_now(self, here: World, visit: Open) -> None:
        page = visit("#/schedules")
        button(page, "New schedule").click()
        page.get_by_label("Name").fill("By hand")
        page.get_by_label("Cron").fill("0 6 * * MON-FRI")
        page.get_by_label("Time zone").fill("Europe/Berlin")
        page.get_by_role("dialog").get_by_role("button", name="Create").click()
        expect(page.get_by_role("dialog")).to_contain_text("Give the URL of a list, or type its lines.")
        page.get_by_label("one URL per line").fill(f"{here.site.url}/page")
        page.get_by_label("Attempts").fill("2")
        page.get_by_label("Only what changed").check()
        confirm(page, "Create")
        [made] = [each for each in here.ask("GET", "/v1/schedules")["items"] if each["name"] == "By hand"]
        assert made["changed_only"]
        assert made["job"] == {"attempts": 2, "tasks": [f"{here.site.url}/page"]}
        row = page.get_by_role("row").filter(has_text="By hand")
        expect(row).to_contain_text("At 06:00 on Monday through Friday")
        button(page, "Edit By hand").click()
        page.get_by_label("Cron").fill("*/5 * * * *")
        expect(page.get_by_label("Only what changed")).to_be_checked()
        page.get_by_label("Only what changed").uncheck()
        confirm(page, "Save")
        assert not here.ask("GET", f"/v1/schedules/{made['id']}")["changed_only"]
        expect(row).to_contain_text("Every fifth minute of every hour")
        row.get_by_role("link", name="By hand").click()
        expect(page.get_by_text("No fires yet")).to_be_visible()
        button(page, "Run now By hand").click()
        fires = page.get_by_role("table", name="Fires")
        expect(fires.get_by_role("link", name="job_")).to_be_visible()
        expect(fires).to_contain_text("completed")
        expect(fires.get_by_role("progressbar")).to_have_attribute("aria-valuetext", "100% finished, 0 failed")
        button(page, "Delete By hand").click()
        confirm(page, "Delete")
        expect(page.get_by_role("heading", name="Schedules")).to_be_visible()

    def test_a_schedule_fires_at_the_times_of_its_zone(self, here: World, visit: Open) -> None:
        job = {"tasks": [f"{here.site.url}/page", "nonsense"]}
        spec = {"cron": "0 3 * * *", "timezone": "Asia/Tokyo", "name": "Far away", "paused": False, "job": job}
        made = here.ask("POST", "/v1/schedules", spec)
        page = visit(f"#/schedules/{made['id']}")
        facts = page.locator(".facts")
        expect(facts).to_contain_text("Next fires, Asia/Tokyo")
        expect(facts.locator(".line", has_text=", 03:00 · in")).to_have_count(5)
        expect(facts).to_contain_text("one job for all of them")
        expect(facts).to_contain_text("1, skipped by each fire")
        here.ask("DELETE", f"/v1/schedules/{made['id']}")

    def test_the_job_of_a_schedule_is_edited_and_keeps_its_secrets(self, here: World, visit: Open) -> None:
        job = {"tasks": [f"{here.site.url}/page"], "attempts": 2, "headers": {"Authorization": "Bearer canary"}}
        made = here.ask("POST", "/v1/schedules", {"cron": "0 3 * * *", "name": "Secretive", "job": job})
        page = visit(f"#/schedules/{made['id']}")
        button(page, "Edit Secretive").click()
        expect(page.get_by_label("Attempts")).to_have_value("2")
        page.get_by_label("Attempts").fill("7")
        confirm(page, "Save")
        expect(page.get_by_text('"attempts": 7')).to_be_visible()
        expect(page.get_by_text("canary")).to_have_count(0)
        button(page, "Run now Secretive").click()
        expect(page.get_by_role("table", name="Fires")).to_contain_text("completed")
        assert here.site.authorized.pop() == "Bearer canary"
        here.ask("DELETE", f"/v1/schedules/{made['id']}")

    def test_the_list_of_a_schedule_is_edited_unless_it_has_secrets(self, here: World, visit: Open) -> None:
        url = f"{here.site.url}/list.txt"
        for name, source in (("Plain", {"url": url}), ("Hidden", {"url": f"{url}?token=canary"})):
            here.ask("POST", "/v1/schedules", {"cron": "0 3 * * *", "name": name, "job": {"source": source}})
        page = visit("#/schedules")
        button(page, "Edit Hidden").click()
        expect(page.get_by_label("Attempts")).to_be_visible()
        expect(page.get_by_label("List")).to_have_count(0)
        button(page, "Cancel").click()
        button(page, "Edit Plain").click()
        page.get_by_label("List").fill(f"{here.site.url}/other.txt")
        confirm(page, "Save")
        page.get_by_role("link", name="Plain").click()
        expect(page.get_by_text("other.txt")).to_be_visible()
        for each in here.ask("GET", "/v1/schedules")["items"]:
            here.ask("DELETE", f"/v1/schedules/{each['id']}")

    def test_an_endpoint_is_made_tested_and_removed(self, here: World, visit: Open) -> None:
        here.site.willing = False
        page = visit("#/webhooks")
        button(page, "New endpoint").click()
        page.get_by_label("URL").fill(f"{here.site.url}/tested")
        page.get_by_label("Events").fill("run.completed")
        page.get_by_role("dialog").get_by_role("button", name="Create").click()
        expect(page.get_by_role("dialog")).to_contain_text("whsec_")
        button(page, "Close").click()
        row = page.get_by_role("table", name="Endpoints").get_by_role("row").filter(has_text="/tested")
        button(page, f"Test {here.site.url}/tested").click()
        sent = page.get_by_role("table", name="Deliveries").get_by_role("row").last
        expect(sent).to_contain_text("500")
        expect(row).to_contain_text("failing")
        # It is retried for hours: until then it is pending, and yet no success.
        expect(page.locator(".tile").filter(has_text="Success rate").locator("b")).to_have_text("0%")
        button(page, "Show the payload and response of webhook.test").click()
        expect(page.get_by_role("dialog")).to_contain_text("webhook_id")
        button(page, "Close").click()
        here.site.willing = True
        button(page, "Redeliver webhook.test").click()
        expect(sent).to_contain_text("delivered")
        expect(row).to_contain_text("ready")
        expect(page.get_by_text("100%")).to_be_visible()
        button(page, f"Delete {here.site.url}/tested").click()
        confirm(page, "Delete")
        expect(row).to_have_count(0)
        here.site.willing = False
        here.site.told.clear()

    def test_keys_are_for_administrators(self, here: World, visit: Open) -> None:
        page = visit("#/keys", errors=True)
        page.get_by_label("Administrator's key").fill("cv_nonsense")
        button(page, "Continue").click()
        expect(page.get_by_role("alert")).to_contain_text("invalid, expired or revoked")
        page.get_by_label("Administrator's key").fill(here.admin_key)
        button(page, "Continue").click()
        button(page, "New key").click()
        page.get_by_label("Tenant", exact=True).last.fill("newcomer")
        page.get_by_label("Name").last.fill("their first")
        page.get_by_role("dialog").get_by_role("button", name="Create").click()
        expect(page.get_by_role("dialog")).to_contain_text("cv_")
        button(page, "Close").click()
        row = page.get_by_role("table", name="Keys").get_by_role("row").filter(has_text="newcomer")
        tenants = page.get_by_role("table", name="Tenants").get_by_role("row")
        expect(row).to_contain_text("active")
        expect(tenants.filter(has_text="newcomer")).to_be_visible()
        assert tenants.filter(has_text="newcomer").get_by_role("cell").all_inner_texts()[1:3] == ["1", "1"]
        button(page, "Revoke their first").click()
        confirm(page, "Revoke")
        expect(row).to_contain_text("revoked")
        expect(tenants.filter(has_text="newcomer").get_by_role("cell").nth(1)).to_have_text("0")
        button(page, "Show keys of newcomer").click()
        expect(page.get_by_role("table", name="Keys").get_by_role("row")).to_have_count(2)
        button(page, "Leave").click()
        expect(page.get_by_label("Administrator's key")).to_be_visible()

    def test_webhooks_are_sent_again(self, here: World, visit: Open) -> None:
        hook = here.ask("POST", "/v1/webhooks", {"url": f"{here.site.url}/hook", "events": ["job.accepted"]})
        try:
            here.submit(name="told", tasks=[f"{here.site.url}/page"])
            here.wait(lambda: here.site.told)
            page = visit("#/webhooks")
            page.get_by_role("link", name=f"{here.site.url}/hook").click()
            row = page.get_by_role("table", name="Deliveries").get_by_role("row").last
            expect(row).to_contain_text("500")
            here.site.willing = True
            button(page, "Redeliver job.accepted").click()
            expect(row).to_contain_text("delivered")
            assert len(set(here.site.told)) == 1 < len(here.site.told)
        finally:
            here.ask("DELETE", f"/v1/webhooks/{hook['id']}")

    def test_the_fleet_shows_what_holds_work_back(self, here: World, visit: Open) -> None:
        job = here.submit(name="Nobody answers", tasks=["http://127.0.0.2:1/"] * 20, concurrency=4)
        napping = here.napping("Thumbnails")
        page = visit("#/fleet")
        breakers = page.get_by_role("table", name="Breakers")
        expect(breakers.get_by_text("open", exact=True)).to_be_visible()
        lanes = page.get_by_role("table", name="Lanes")
        expect(lanes.get_by_role("row").filter(has_text="Nobody answers")).to_contain_text("circuit open")
        expect(breakers.get_by_text("connect_failed")).to_be_visible()
        button(page, "Reset http://127.0.0.2:1").click()
        confirm(page, "Reset")
        expect(page.get_by_text("Tasks that waited start now.")).to_be_visible()
        expect(lanes.get_by_role("row").filter(has_text="Thumbnails")).to_contain_text("4 of 4")
        expect(page.locator(".tile").filter(has_text="Workers")).to_contain_text("1")
        page.goto(f"{here.url}/#/jobs")
        expect(page.get_by_role("listitem").filter(has_text="Thumbnails")).to_contain_text("left")
        for each in (job, napping):
            here.ask("POST", f"/v1/jobs/{each}/cancel")


class TestDefence:
    def test_nothing_hostile_runs(self, here: World, visit: Open) -> None:
        tasks = [{"url": f"{here.site.url}/hostile?q={HOSTILE.replace(' ', '%20')}", "tag": HOSTILE[:100]}]
        jobs = [
            here.submit(name=HOSTILE, tasks=tasks),
            here.submit(name=HOSTILE, kind="python", handler="raises", attempts=1, tasks=[HOSTILE]),
        ]
        here.ask("POST", "/v1/schedules", {"cron": "0 3 * * *", "name": HOSTILE, "job": {"tasks": tasks}})
        hook = {"url": "http://127.0.0.1:1/", "description": HOSTILE}
        made = here.ask("POST", "/v1/webhooks", hook)
        page = visit("#/jobs")
        expect(page.get_by_role("listitem").filter(has_text=HOSTILE)).to_have_count(2)
        for job in jobs:
            here.ended(job)
            page.goto(f"{here.url}/#/jobs/{job}")
            # Both have the same name: it must not be the other's page that is clicked.
            expect(page.get_by_text(job).first).to_be_visible()
            expect(heading(page, HOSTILE)).to_be_visible()
            page.get_by_role("table", name="Tasks").get_by_role("link").click()
            expect(page.get_by_label("Input", exact=True)).to_contain_text("window.hacked")
        page.go_back()
        page.goto(f"{here.url}/#/jobs/{jobs[0]}")
        expect(page.get_by_text(jobs[0]).first).to_be_visible()
        page.get_by_role("table", name="Tasks").get_by_role("link").click()
        expect(page.get_by_label("Body")).to_have_text(HOSTILE)
        expect(page.get_by_text("<script>window.hacked = 1</script>").first).to_be_visible()
        page.goto(f"{here.url}/#/schedules")
        expect(page.get_by_role("row").filter(has_text=HOSTILE)).to_be_visible()
        page.goto(f"{here.url}/#/webhooks/{made['id']}")
        expect(page.get_by_text(HOSTILE).first).to_be_visible()
        assert page.evaluate("document.querySelectorAll('script').length") == 1

    def test_another_origin_changes_nothing(self, here: World, visit: Open) -> None:
        job = here.napping("not yours")
        page = visit("#/jobs", errors=True)
        # The same host, another port: the cookie goes along, and still.
        page.goto(f"{here.site.url}/page")
        script = """async ([url, mode, headers]) => {
            try { return (await fetch(url, {method: 'POST', mode, credentials: 'include', headers})).type }
            catch (error) { return 'refused' }
        }"""
        cancel = f"{here.url}/v1/jobs/{job}/cancel"
        statuses: list[int] = []
        page.on("response", lambda answer: statuses.append(answer.status))
        assert page.evaluate(script, [cancel, "no-cors", {}]) == "opaque"
        assert statuses == [403]
        page.evaluate("window.reported = []")
        assert here.state(job) == "running"
        here.ask("POST", f"/v1/jobs/{job}/cancel")

    def test_signing_in_again_loses_nothing(self, here: World, visit: Open, tmp_path: Path) -> None:
        """Signing out does: what was typed belongs to who typed it."""
        chosen = tmp_path / "mine.txt"
        chosen.write_text(f"{here.site.url}/page/1\n")

        def sign_in() -> None:
            page.get_by_label("API key").fill(here.up.key)
            page.keyboard.press("Enter")

        page = visit("#/new", errors=True, signed_in=False)
        sign_in()
        expect(heading(page, "New job")).to_be_visible()
        page.get_by_role("textbox", name="Name").fill("Typed before")
        page.locator("input[type=file]").set_input_files(chosen)
        expect(page.get_by_text("Read as text: 1 task")).to_be_visible()
        page.context.clear_cookies()
        button(page, "Submit").click()
        expect(heading(page, "Sign in to Conveyor")).to_be_visible()
        sign_in()
        expect(page.get_by_text("mine.txt")).to_be_visible()
        expect(page.get_by_role("textbox", name="Name")).to_have_value("Typed before")
        button(page, "Sign out").click()
        expect(heading(page, "Sign in to Conveyor")).to_be_visible()
        sign_in()
        expect(heading(page, "Jobs")).to_be_visible()
        page.goto(f"{here.url}/#/new")
        expect(page.get_by_text("Drop a list here")).to_be_visible()
        expect(page.get_by_role("textbox", name="Name")).to_have_value("")

    def test_who_is_not_signed_in_is_asked_to(self, here: World, visit: Open) -> None:
        page = visit(f"#/jobs/{here.large}", errors=True, signed_in=False)
        expect(heading(page, "Sign in to Conveyor")).to_be_visible()
        page.get_by_label("API key").fill("cv_nonsense")
        button(page, "Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown, expired")
        page.get_by_label("API key").fill(here.up.key)
        page.keyboard.press("Enter")
        expect(heading(page, "100,000 pages")).to_be_visible()
        button(page, "Sign out").click()
        expect(heading(page, "Sign in to Conveyor")).to_be_visible()
        assert page.context.cookies() == []
        command = [
            Path(sys.executable).with_name("conveyor"),
            "dashboard",
            "--url",
            here.url,
            "--data",
            str(here.up.data),
        ]
        page.goto(subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout.strip())
        expect(heading(page, "Jobs")).to_be_visible()


class TestEverywhere:
    def test_a_large_job_stays_quick_and_small(self, here: World, visit: Open) -> None:
        page = visit(f"#/jobs/{here.large}")
        expect(page.locator(".tile.failed b")).to_have_text("1,250")
        expect(page.get_by_role("button", name=CODES[0])).to_contain_text("417")
        for number in range(2, 8):
            button(page, "Next").click()
            expect(page.get_by_text(f"Page {number}")).to_be_visible()
        page.get_by_role("searchbox").fill("items/99999")
        table = page.get_by_role("table", name="Tasks")
        expect(table.get_by_role("row")).to_have_count(2)
        expect(table).to_contain_text("https://shop.example/items/99999")
        assert page.evaluate("document.querySelectorAll('*').length") < 1500
        longest = page.evaluate(
            """() => new Promise((resolve) => {
                let [longest, last, frames] = [0, performance.now(), 0];
                const frame = (now) => {
                    longest = Math.max(longest, now - last); last = now;
                    (frames += 1) < 60 ? requestAnimationFrame(frame) : resolve(longest);
                };
                requestAnimationFrame(frame);
            })"""
        )
        assert longest < 1000
        page.get_by_role("searchbox").fill(str(LARGE - 1))
        expect(table.get_by_role("row")).to_have_count(2)

    def test_everything_can_be_done_with_keys(self, here: World, visit: Open) -> None:
        job = here.napping("by keys")
        page = visit("#/jobs")
        expect(page.get_by_role("listitem").filter(has_text="by keys")).to_be_visible()
        page.get_by_role("banner").get_by_role("link").first.focus()
        page.keyboard.press("Shift+Tab")
        expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        for _ in range(30):
            if page.evaluate(f"document.activeElement.getAttribute('href') === '#/jobs/{job}'"):
                break
            page.keyboard.press("Tab")
        # A row that changes each second keeps the focus.
        row = page.locator(f"a[href='#/jobs/{job}']")
        expect(row).to_contain_text("left")
        expect(row).to_be_focused()
        page.keyboard.press("Enter")
        expect(heading(page, "by keys")).to_be_focused()
        while page.evaluate("document.activeElement.textContent") != "Cancel":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Cancel this job?")
        # What can not be undone is not one key away.
        expect(dialog.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(button(page, "Cancel")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        here.wait(lambda: here.state(job) == "cancelled")
        expect(page.locator(".title .pill")).to_have_text("cancelled")

    def test_a_phone_shows_all_of_it(self, here: World, visit: Open) -> None:
        job = here.submit(name="x" * 150, tasks=[f"{here.site.url}/{'fails' * 40}"], attempts=1)
        here.ended(job)
        page = visit("#/jobs", viewport=PHONE, has_touch=True)
        for path, title in {
            "jobs": "Jobs",
            "new": "New job",
            "dead-letters": "Dead letters",
            "schedules": "Schedules",
            "webhooks": "Webhooks",
            "fleet": "Fleet",
            f"jobs/{here.large}": "100,000 pages",
        }.items():
            page.goto(f"{here.url}/#/{path}")
            expect(heading(page, title)).to_be_visible()
            usable(page)
        page.goto(f"{here.url}/#/jobs/{job}")
        expect(heading(page, "x" * 150)).to_be_visible()
        usable(page)
        page.get_by_role("table", name="Tasks").get_by_role("link").click()
        expect(heading(page, "Task 0")).to_be_visible()
        usable(page)

    def test_the_dark_is_dark(self, here: World, visit: Open) -> None:
        page = visit(f"#/jobs/{here.large}", color_scheme="dark")
        expect(heading(page, "100,000 pages")).to_be_visible()
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert max(int(each) for each in re.findall(r"\d+", ground)) < 60

    def test_what_is_not_there_is_said(self, here: World, visit: Open) -> None:
        page = visit(f"#/jobs/job_{'0' * 26}", errors=True)
        expect(heading(page, "Not found")).to_be_visible()
        with page.expect_response("**/v1/jobs/*"):
            button(page, "Try again").click()
        expect(heading(page, "Not found")).to_be_visible()
        page.get_by_role("link", name="All jobs").click()
        expect(heading(page, "Jobs")).to_be_visible()
        page.goto(f"{here.url}/#/nonsense")
        expect(heading(page, "Jobs")).to_be_visible()

    def test_where_no_stream_comes_through_it_is_asked(self, here: World, visit: Open) -> None:
        page = visit("#/jobs", errors=True)
        page.context.route("**/v1/stream", lambda route: route.abort())
        page.reload()
        expect(page.locator(".standing")).to_have_text("Polling")
        job = here.submit(name="polled", mode="open")
        row = page.get_by_role("listitem").filter(has_text="polled")
        expect(row).to_be_visible()
        here.ask("DELETE", f"/v1/jobs/{job}")
        expect(row).to_have_count(0)

    def test_jobs_have_pages(self, here: World, visit: Open) -> None:
        jobs = [here.submit(kind="python", handler="double", tasks=[1]) for _ in range(51)]
        page = visit("#/jobs")
        expect(page.get_by_role("listitem")).to_have_count(50)
        expect(page.get_by_text(jobs[0])).to_have_count(0)
        button(page, "Next").click()
        expect(page.get_by_text(jobs[0])).to_be_visible()
        button(page, "Previous").click()
        expect(page.get_by_text(jobs[-1])).to_be_visible()

    # Last: what the coordinator knew is gone then.
    def test_a_restart_is_outlasted(self, here: World, visit: Open) -> None:
        job = here.napping("outlasts")
        page = visit(f"#/jobs/{job}", errors=True)
        done = page.locator(".tile.succeeded b")
        expect(page.locator(".standing")).to_have_text("Live")
        expect(done).not_to_have_text("0")
        here.up.kill()
        expect(page.locator("#offline")).to_be_visible()
        expect(heading(page, "outlasts")).to_be_visible()
        before = done.inner_text()
        here.up.start()
        expect(page.locator("#offline")).to_be_hidden()
        expect(page.locator(".standing")).to_have_text("Live")
        expect(done).not_to_have_text(before)
        button(page, "Cancel").click()
        confirm(page, "Cancel job")
        expect(page.locator(".title .pill")).to_have_text("cancelled")
