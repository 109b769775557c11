"""What the job page shows of errors, hosts and time: it agrees with its tiles, and a group can be rerun."""

import re
import socket
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.browsing import Open, button, confirm, heading, usable
from tests.dashboard.world import World

pytestmark = pytest.mark.timeout(120)


def link(page: Page, navigation: str, name: str) -> Any:
    return page.get_by_role("navigation", name=navigation).get_by_role("link", name=name)


def test_errors_and_hosts_say_why_and_are_rerun(here: World, visit: Open) -> None:
    """Of a job whose workers collect what happened, and of a small one; both agree with their tiles."""
    port = here.site.url.rsplit(":", 1)[1]
    other = f"http://localhost:{port}"
    pages = [f"{(here.site.url, other)[number % 2]}/page/{number}" for number in range(600)]
    broken = [f"{other}/fails/{number}" for number in range(30)] + [f"{here.site.url}/gone/1"]
    options = {"attempts": 2, "backoff": {"base": 0.05}, "breaker": {"enabled": False}, "concurrency": 16}
    jobs = [here.submit(name="Two hosts", tasks=tasks, **options) for tasks in ([*pages, *broken], broken)]
    for job, note in zip(jobs, ("Failed tasks of each error are exact.", "All counts are exact."), strict=True):
        here.ended(job)
        here.wait(lambda job=job: here.ask("GET", f"/v1/jobs/{job}/errors")["retried"])
        page = visit(f"#/jobs/{job}")
        expect(page.locator(".tile.failed b")).to_have_text("31")
        groups = page.get_by_role("table", name="Errors by host")
        busy = groups.get_by_role("row").filter(has_text="http_503")
        expect(busy).to_contain_text("localhost")
        expect(busy.get_by_role("cell").nth(2)).to_have_text("30")
        expect(busy.get_by_role("cell").nth(3)).to_have_text("30")
        expect(page.get_by_text(note)).to_be_visible()
        usable(page)
        link(page, "Parts of the job", "Hosts").click()
        hosts = page.get_by_role("table", name="Hosts")
        row = hosts.get_by_role("row").filter(has_text="localhost")
        expect(row).to_contain_text("http_503 60")
        expect(row).not_to_contain_text("others")
        expect(row).to_contain_text("closed")
        usable(page)
    row.get_by_role("button", name="Rerun failed tasks of localhost").click()
    confirm(page, "Rerun")
    here.wait(lambda: here.ask("GET", f"/v1/jobs/{jobs[1]}")["run"]["number"] == 2)
    here.ended(jobs[1])
    assert here.ask("GET", f"/v1/jobs/{jobs[1]}")["run"]["total"] == 30
    page = visit(f"#/jobs/{jobs[1]}")
    expect(page.get_by_role("heading", name="By host · run 2")).to_be_visible()
    page.get_by_role("table", name="Errors by host").get_by_role("button", name="Rerun").click()
    confirm(page, "Rerun")
    here.wait(lambda: here.ask("GET", f"/v1/jobs/{jobs[1]}")["run"]["number"] == 3)


def test_charts_have_tips_ticks_and_a_time_range(here: World, visit: Open) -> None:
    page = visit(f"#/jobs/{here.large}")
    # The coordinator knows nothing of this job, as after a restart.
    time = here.ask("GET", f"/v1/jobs/{here.large}")["task_time"]
    p50 = f"p50 {1000 * time['p50']:.0f} ms"
    expect(page.locator(".tile", has_text="Throughput")).to_contain_text(p50)
    expect(page.get_by_role("img", name=re.compile(f"Latency: {p50}"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile(r"Latency: p50 \d+ ms, p95 \d+ ms"))).to_be_visible()
    chart = page.get_by_role("group", name="Throughput over time")
    picture = chart.get_by_role("img", name=re.compile("100,000 of 100,000 tasks finished"))
    expect(picture).to_have_attribute("aria-label", re.compile("1,250 of them failed, 1,250 attempts retried"))
    tip = chart.locator(".tip")
    expect(tip).to_be_hidden()
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text("100,000 of 100,000 finished")
    expect(tip).to_contain_text("1,250 failed")
    expect(tip).to_contain_text(re.compile(r"retries 0\.\d/s"))
    assert all(text.endswith(("00", "30")) for text in chart.locator(".axis text").all_text_contents())
    whole = len(chart.locator("rect.speed").all())
    page.get_by_role("combobox", name="Time range").select_option("last 15 minutes")
    assert "range=15" in page.url
    expect(chart.locator("rect.speed")).not_to_have_count(whole)
    page.reload()
    expect(page.get_by_role("combobox", name="Time range")).to_have_value("15")
    usable(page)
    link(page, "Parts of the job", "Hosts").click()
    expect(page.get_by_role("table", name="Hosts").get_by_role("row").nth(1)).to_contain_text("101,250")


def test_attempts_are_drawn_with_their_times(here: World, visit: Open) -> None:
    options = {"attempts": 3, "backoff": {"base": 0.05}, "breaker": {"enabled": False}}
    job = here.submit(name="Attempts", tasks=[f"{here.site.url}/fails/1", f"{here.site.url}/slow/1200"], **options)
    here.ended(job)
    tasks = {task["index"]: task["task_id"] for task in here.ask("GET", f"/v1/jobs/{job}/results")["items"]}
    page = visit(f"#/jobs/{job}/tasks/{tasks[0]}")
    lines = page.locator(".attempt-line")
    expect(lines).to_have_count(3)
    expect(lines.first).to_contain_text(re.compile(r"connect and first byte .+ · read .+ · backoff .+ · worker_"))
    expect(lines.nth(1)).to_contain_text(re.compile(r"wait .+ · connect and first byte"))
    expect(lines.nth(2)).not_to_contain_text("backoff")
    usable(page)
    page = visit(f"#/jobs/{job}/tasks/{tasks[1]}")
    expect(page.locator(".attempt-line")).to_contain_text(
        re.compile(r"connect and first byte 1\.\d s · read .+ · worker_")
    )
    usable(page)


def test_what_is_attempted_looks_so(here: World, visit: Open) -> None:
    """Single fetches too, if they are slow; and which worker has them."""
    job = here.submit(name="Slow pages", tasks=[f"{here.site.url}/slow/{n}" for n in (9001, 9002, 9003)], concurrency=2)
    listed = f"/v1/jobs/{job}/results"
    here.wait(lambda: len([task for task in here.ask("GET", listed)["items"] if "running" in task]) == 2)
    page = visit(f"#/jobs/{job}")
    rows = page.get_by_role("table", name="Tasks").get_by_role("row")
    busy = rows.filter(has_text="in progress")
    expect(busy).to_have_count(2)
    expect(rows.filter(has_text="pending")).to_have_count(1)
    expect(page.locator(".tile", has_text="In progress").locator("b")).to_have_text("2")
    usable(page)
    busy.first.get_by_role("link").click()
    expect(page.locator(".attempts")).to_contain_text(re.compile("Attempt 1in progressworker_"))
    usable(page)
    expect(page.locator(".attempt-line")).to_contain_text("worker_", timeout=20_000)
    here.ended(job)
    assert not [task for task in here.ask("GET", listed)["items"] if "running" in task]


def test_an_attempt_that_ended_while_connecting_says_so(here: World, visit: Open) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        job = here.submit(
            tasks=[f"http://127.0.0.1:{closed.getsockname()[1]}/"], attempts=1, breaker={"enabled": False}
        )
        here.ended(job)
    [task] = here.ask("GET", f"/v1/jobs/{job}/results")["items"]
    page = visit(f"#/jobs/{job}/tasks/{task['task_id']}")
    expect(page.locator(".attempt-line")).to_contain_text(re.compile("^connect .+ · worker_"))


def test_downloads_say_how_far_they_are(here: World, visit: Open) -> None:
    """The job as a whole, and each task; what runs looks running."""
    files = [f"{here.site.url}/trickle/1000000", f"{here.site.url}/trickle/2000000"]
    job = here.submit(kind="download", name="Films", tasks=[*files, f"{here.site.url}/page/1"])
    here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["counts"]["succeeded"])
    here.wait(lambda: (here.ask("GET", f"/v1/jobs/{job}")["transfers"] or {}).get("rate"))
    page = visit(f"#/jobs/{job}")
    tile = page.locator(".tile").filter(has_text="Downloading")
    expect(tile.locator("b")).to_have_text(re.compile(r"[\d.]+%"))
    expect(tile).to_contain_text(re.compile(r"[\d.]+ \w+ of 858 MiB · [\d.]+ MiB/s · .+ left"))
    rows = page.get_by_role("table", name="Tasks").get_by_role("row").filter(has_text="in progress")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text(re.compile(r"[\d.]+ \w+ of 286 MiB · .+% · .+/s · .+ left"))
    usable(page)
    rows.first.get_by_role("link").click()
    expect(page.locator(".title-text")).to_contain_text("in progress")
    expect(page.get_by_role("link", name="Films")).to_be_visible()
    usable(page)
    here.ask("POST", f"/v1/jobs/{job}/cancel")
    here.ended(job)
    page = visit(f"#/jobs/{job}")
    expect(page.locator(".tile").first).to_be_visible()
    expect(tile).to_have_count(0)


def test_what_was_extracted_is_shown(here: World, visit: Open) -> None:
    job = here.submit(tasks=[f"{here.site.url}/page/1", f"{here.site.url}/hostile"], extract="words")
    here.ended(job)
    tasks = {task["index"]: task["task_id"] for task in here.ask("GET", f"/v1/jobs/{job}/results")["items"]}
    page = visit(f"#/jobs/{job}/tasks/{tasks[0]}")
    expect(page.get_by_label("Extracted")).to_contain_text('"first": "Page"')
    usable(page)
    page = visit(f"#/jobs/{job}/tasks/{tasks[1]}")
    expect(page.get_by_label("Extracted")).to_contain_text("<script>")
    plain = here.submit(tasks=[f"{here.site.url}/page/1"])
    here.ended(plain)
    [task] = here.ask("GET", f"/v1/jobs/{plain}/results")["items"]
    page = visit(f"#/jobs/{plain}/tasks/{task['task_id']}")
    expect(page.get_by_label("Body")).to_be_visible()
    expect(page.get_by_role("heading", name="Extracted")).to_have_count(0)


def test_stored_bodies_are_extracted_again(here: World, visit: Open) -> None:
    """By another function, and without a request."""
    job = here.submit(tasks=[f"{here.site.url}/page/1"], extract="words")
    here.ended(job)
    page = visit(f"#/jobs/{job}")
    button(page, "Rerun…").click()
    expect(page.get_by_label("Function")).to_have_value("words")
    page.get_by_label("Function").fill("letters")
    page.get_by_label("Extract again").check()
    confirm(page, "Rerun")
    here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["run"]["number"] == 2)
    here.ended(job)
    lineage = here.ask("GET", f"/v1/jobs/{job}")["run"]["lineage"]
    assert (lineage["extract_only"], lineage["options"]) == (True, {"extract": "letters"})
    [task] = here.ask("GET", f"/v1/jobs/{job}/results")["items"]
    assert list(task["extracted"]) == ["letters"]
    plain = here.submit(tasks=[f"{here.site.url}/page/1"])
    here.ended(plain)
    page = visit(f"#/jobs/{plain}")
    button(page, "Rerun…").click()
    expect(page.get_by_label("Only what changed")).to_be_visible()
    expect(page.get_by_label("Extract again")).to_have_count(0)
    page.keyboard.press("Escape")


def test_tables_are_sorted_by_their_columns(here: World, visit: Open) -> None:
    """Those of errors by host and of dead letters, whose rows can be selected in any order."""
    options = {"attempts": 1, "on_exhausted": "dead_letter", "breaker": {"enabled": False}}
    pages = [f"{here.site.url}/{kind}/{number}" for number, kind in enumerate(["fails", "gone", "gone", "fails"])]
    job = here.submit(name="Sorted", tasks=[*pages, f"{here.site.url}/fails/4"], **options)
    here.ended(job)
    page = visit(f"#/jobs/{job}")
    groups = page.get_by_role("table", name="Errors by host")
    failed = groups.locator("tbody td:nth-child(3)")
    groups.get_by_role("button", name="Failed").click()
    expect(failed).to_have_text(["2", "3"])
    groups.get_by_role("button", name="Failed").click()
    expect(failed).to_have_text(["3", "2"])
    expect(groups.get_by_role("columnheader", name="Failed")).to_have_attribute("aria-sort", "descending")
    usable(page)
    page = visit(f"#/dead-letters?job={job}")
    letters = page.get_by_role("table", name="Dead letters")
    kinds = letters.locator("tbody td:nth-child(3)")
    letters.get_by_role("button", name="Type").click()
    expect(kinds).to_have_text(["task 0", "task 3", "task 4"])
    letters.get_by_role("checkbox").last.check()
    letters.get_by_role("button", name="Type").click()
    expect(kinds).to_have_text(["task 4", "task 3", "task 0"])
    with page.expect_response("**/v1/dead-letters*"):
        pass
    expect(letters.get_by_role("checkbox").first).to_be_checked()
    expect(letters.get_by_role("checkbox").last).not_to_be_checked()
    usable(page)


def test_cancelled_tasks_are_no_throughput(here: World, visit: Open) -> None:
    """All of them are cancelled at once, and the end of a run is shown as it is, however soon one looks."""
    job = here.submit(name="Cut short", tasks=[f"{here.site.url}/slow/{200 + n}" for n in range(2000)], concurrency=2)
    here.wait(lambda: here.ask("GET", f"/v1/jobs/{job}")["counts"]["succeeded"] > 5)
    here.ask("POST", f"/v1/jobs/{job}/cancel")
    page = visit(f"#/jobs/{job}")
    chart = page.get_by_role("img", name=re.compile("2,000 of 2,000 tasks finished"))
    expect(chart).to_be_visible()
    expect(page.locator(".tile", has_text="In progress")).to_have_text("In progress00 pending", timeout=8_000)
    expect(page.locator(".tile", has_text="Finished")).to_contain_text("100%")
    fastest = re.search(r"at most ([\d.]+)/s", chart.get_attribute("aria-label") or "")
    assert fastest is not None
    assert float(fastest[1]) < 50
    script = """import('/dashboard/parts/charts.js').then(({ throughput }) => throughput(
        [[0, 0], [1000, 10], [2000, 20], [2004, 22]].map(([t, worked]) => ({ t, worked, done: worked, failed: 0 }))
        ).map(({ from, to, rate }) => [from, to, Math.round(rate)]))"""
    assert page.evaluate(script) == [[0, 1000, 10], [1000, 2004, 12]], "the end is no interval of its own"


def test_errors_add_up_to_the_failed_tasks_while_a_job_runs(here: World, visit: Open) -> None:
    """The tile is counted at once, each error every few seconds."""
    script = """import('/dashboard/parts/errors.js').then(({ errorsList }) => [0, 50, 73].map((failed) => {
        const list = errorsList(() => {});
        list.show(failed ? [{ code: 'http_503', count: 50 }] : [], failed);
        return [...list.node.children].filter((each) => !each.hidden).map((each) => each.textContent);
    }))"""
    rest = "23 failed tasks with other errors, or not counted by error yet."
    assert visit("#/jobs").evaluate(script) == [["No task has failed.", ""], ["http_50350"], ["http_50350", rest]]


def test_tasks_are_listed_with_the_names_that_the_user_gave_them(here: World, visit: Open) -> None:
    url = f"{here.site.url}/page/1"
    tasks = [{"url": url, "id": "sku-1", "tag": "red"}, {"url": url, "tag": "<b>blue</b>"}, url]
    job = here.submit(name="Named", tasks=tasks)
    here.ended(job)
    page = visit(f"#/jobs/{job}")
    inputs = page.get_by_role("table", name="Tasks").locator("td[data-title=Input]")
    expect(inputs).to_have_text([f"{url}sku-1 · red", f"{url}<b>blue</b>", url])
    usable(page)


def test_low_rates_are_shown_by_minute_and_hour(here: World, visit: Open) -> None:
    script = "import('/dashboard/format.js').then(({ rate }) => [0, 0.0001, 0.05, 0.1, 99.94, 1234].map(rate))"
    shown = visit("#/jobs").evaluate(script)
    assert shown == ["0.0/s", "0.4/h", "3.0/min", "0.1/s", "99.9/s", "1,234/s"]


def test_ticks_are_english_and_none_is_rounded_to_zero(here: World, visit: Open) -> None:
    page = visit("#/fleet", locale="de-DE")
    script = """import('/dashboard/parts/axes.js').then(({ timeTicks }) =>
        timeTicks(Date.UTC(2026, 9, 1), Date.UTC(2026, 9, 5), 300).map(({ text }) => text))"""
    assert page.evaluate(script) == ["2 Oct", "4 Oct"]
    script = "import('/dashboard/format.js').then(({ short }) => [0, 0.002, 0.05, 0.5, 20, 1500].map(short))"
    assert page.evaluate(script) == ["0", "0.002", "0.05", "0.5", "20", "1.5k"]


def test_a_host_with_many_errors_names_the_most_frequent(here: World, visit: Open) -> None:
    kinds = [*["status/500"] * 4, *["status/501"] * 3, *["status/502"] * 2, "status/505", "status/404"]
    tasks = [f"{here.site.url}/{kind}/{number}" for number, kind in enumerate(kinds)]
    job = here.submit(name="Many errors", tasks=tasks, attempts=1, breaker={"enabled": False})
    here.ended(job)
    hosts = visit(f"#/jobs/{job}?tab=hosts").get_by_role("table", name="Hosts")
    errors = hosts.locator("td[data-title=Errors] li")
    expect(errors).to_have_text(["http_500 4", "http_501 3", "http_502 2", "others 2"])


def test_tables_are_sorted_on_a_phone(here: World, visit: Open) -> None:
    """Their rows are cards there, without a head over columns."""
    job = here.submit(name="Phone", tasks=[f"{here.site.url}/page/{number}" for number in range(3)])
    here.ended(job)
    page = visit(f"#/jobs/{job}", viewport={"width": 390, "height": 844})
    tasks = page.get_by_role("table", name="Tasks")
    expect(tasks.locator("tbody tr")).to_have_count(3)
    sorter = tasks.get_by_role("button", name="Input")
    sorter.click()
    sorter.click()
    expect(tasks.locator("tbody tr").first).to_contain_text("page/2")
    assert "sort=-Input" in page.url
    # What the cards leave out sorts nothing.
    expect(tasks.get_by_role("button", name="Duration")).to_have_count(0)
    usable(page)


def test_the_failed_task_before_is_found_at_any_distance(here: World, visit: Open) -> None:
    """The large job has a failed task at each multiple of 80."""
    tasks = {task["index"]: task["task_id"] for task in here.ask("GET", f"/v1/jobs/{here.large}/results")["items"]}
    page = visit(f"#/jobs/{here.large}/tasks/{tasks[79]}")
    button(page, "Previous failed").click()
    expect(heading(page, "Task 0")).to_be_visible()
    button(page, "Previous failed").click()
    expect(page.get_by_text("No failed task before this one.")).to_be_visible()
    kinds = ["fails" if number in (3, 4) else "page" for number in range(2500)]
    job = here.submit(tasks=[f"{here.site.url}/{kind}/{n}" for n, kind in enumerate(kinds)], attempts=1, concurrency=50)
    here.ended(job)
    last = here.ask("GET", f"/v1/jobs/{job}/results?cursor=ix:2498")["items"][0]["task_id"]
    page = visit(f"#/jobs/{job}/tasks/{last}")
    for index in (4, 3):
        button(page, "Previous failed").click()
        expect(heading(page, f"Task {index}")).to_be_visible()
    button(page, "Next failed").click()
    expect(heading(page, "Task 4")).to_be_visible()


def test_the_fleet_draws_its_load(here: World, visit: Open) -> None:
    job = here.napping("Load", total=60)
    here.wait(lambda: any(point["waiting"] for point in here.ask("GET", "/v1/load")["minutes"]["items"]))
    here.ended(job)
    page = visit("#/fleet")
    chart = page.get_by_role("group", name="Load over time")
    expect(chart.get_by_role("img", name=re.compile(r"[1-9]\d* tasks finished, at most [1-9]"))).to_be_visible()
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".tip")).to_contain_text("throughput")
    page.get_by_role("combobox", name="Time range").select_option("last week")
    assert "range=10080" in page.url
    expect(chart.get_by_role("img", name=re.compile(r"[1-9]\d* tasks finished"))).to_be_visible()
    usable(page)
