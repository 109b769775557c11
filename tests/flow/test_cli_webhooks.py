"""`conveyor webhooks` and `conveyor schedules`, as a user has them."""

import json

import pytest

from tests.flow.test_cli import Cli, cli, one_line, site, up, wait_for

__all__ = ["cli", "site", "up"]


@pytest.mark.timeout(240)
def test_webhooks(up: Cli, site: str) -> None:
    assert "No webhook endpoints." in up("webhooks").stderr
    made = up("webhooks", "create", f"{site}/quick/hook", "--event", "run.completed", "--description", "ours")
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert secret.startswith("whsec_")
    (shown,) = up.json("webhooks", "list")
    assert shown["id"] in made.stderr
    assert (shown["events"], shown["description"]) == (["run.completed"], "ours")
    assert shown["id"] in up("webhooks").stdout
    failing = up.json("webhooks", "create", f"{site}/broken/1", "--event", "run.completed")["id"]
    counts = {"delivered": 0, "failed": 0, "pending": 0}
    assert json.loads(up("webhooks", "show", shown["id"]).stdout) == {**shown, "deliveries": counts}
    (up.place / "urls.txt").write_text(f"{site}/quick/1\n")
    job_id = up("submit", "urls.txt", "--wait").stdout.split()[0].rstrip(":")
    wait_for(lambda: [each["attempts"] for each in up.json("webhooks", "deliveries", shown["id"])] == [1])
    (sent,) = up.json("webhooks", "deliveries", shown["id"])
    assert (sent["event"], sent["job_id"]) == ("run.completed", job_id)
    assert sent["id"] in up("webhooks", "deliveries", shown["id"]).stdout
    assert up.json("webhooks", "deliveries", shown["id"]) == [sent]
    wait_for(lambda: f"{failing}  failing" in up("webhooks").stdout)
    assert f"{shown['id']}  active" in up("webhooks").stdout
    assert up("webhooks", "delete", failing).returncode == 0
    assert "Redelivering" in up("webhooks", "redeliver", sent["id"]).stdout
    wait_for(lambda: up.json("webhooks", "deliveries", shown["id"])[0]["attempts"] >= 2)
    rotated = up.json("webhooks", "rotate", shown["id"])
    assert rotated["secret"] != secret
    assert up("webhooks", "secret").stdout.startswith("whsec_")
    assert up("webhooks", "disable", shown["id"]).returncode == 0
    assert "disabled" in up("webhooks").stdout
    one_line(up("webhooks", "redeliver", sent["id"]), "conflict")
    assert up("webhooks", "enable", shown["id"]).returncode == 0
    assert up("webhooks", "delete", shown["id"]).returncode == 0
    one_line(up("webhooks", "show", shown["id"]), "not_found")
    assert up("webhooks", "create", "nonsense").returncode == 2


@pytest.mark.timeout(240)
def test_schedules(up: Cli, site: str) -> None:
    assert "No schedules." in up("schedules").stderr
    (up.place / "urls.txt").write_text(f"{site}/quick/1\n{site}/quick/2\n")
    made = up("schedules", "create", "0 6 * * *", "urls.txt", "--timezone", "Europe/Berlin", "--name", "daily")
    assert made.returncode == 0, made.stderr
    schedule_id = made.stdout.split()[0]
    assert made.stdout.count("next") == 5
    from_url = up.json("schedules", "create", "* * * * *", "--from", f"{site}/quick/list", "--paused")
    assert (from_url["paused"], from_url["next_fires"]) == (True, [])
    assert from_url["job"]["source"] == {"url": f"{site}/quick/list"}
    assert [each["id"] for each in up.json("schedules")] == [schedule_id, from_url["id"]]
    # Whatever a job can have, as with submit.
    (up.place / "shop.csv").write_text(f"sku;Link\n7;{site}/quick/1\n")
    one_line(up("schedules", "create", "0 6 * * *", "shop.csv"), "list_unreadable")
    flags = ("--url-column", "link", "--option", "robots=obey", "--on-invalid", "reject", "--download")
    shop = up.json("schedules", "create", "0 6 * * *", "shop.csv", *flags)
    read = {name: value for name, value in shop["job"]["source"].items() if name != "upload_id"}
    assert read == {"format": "csv", "url_column": "link"}
    wanted = {"kind": "download", "robots": "obey", "on_invalid": "reject"}
    assert {name: shop["job"][name] for name in wanted} == wanted
    assert up("schedules", "delete", shop["id"]).returncode == 0
    assert "paused" in up("schedules", "list").stdout
    assert "daily" in up("schedules", "show", schedule_id).stdout
    job_id = up("schedules", "run", schedule_id).stdout.strip()
    wait_for(lambda: [each["state"] for each in up.json("jobs") if each["id"] == job_id] == ["completed"])
    assert f"{job_id}  completed, 2 succeeded\n" in up("schedules", "show", schedule_id).stdout
    assert "is paused" in up("schedules", "pause", schedule_id).stdout
    assert up("schedules", "resume", schedule_id).stdout.count("next") == 5
    assert up("schedules", "delete", schedule_id).returncode == 0
    one_line(up("schedules", "show", schedule_id), "not_found")
    for wrong in (["* * * *", "urls.txt"], ["* * * * *"], ["* * * * *", "missing.txt"]):
        refused = up("schedules", "create", *wrong)
        assert refused.returncode == 2, refused.stdout
