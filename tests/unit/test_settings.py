"""Settings: every field from the environment, and one clear line for what can not be."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.errors import InvalidSetting
from conveyor.settings import PREFIX, Settings, blob_directory, public_link

# What each field becomes when it is set so. A new field needs a line here.
GIVEN: dict[str, tuple[str, Any]] = {
    "data": ("/srv/conveyor", Path("/srv/conveyor")),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "allowed_hosts": ("jobs.example.com", "jobs.example.com"),
    "trusted_proxies": ("10.0.0.0/8 ::1", "10.0.0.0/8 ::1"),
    "public_url": ("https://jobs.example.com/x", "https://jobs.example.com/x"),
    "keep_alive_seconds": ("20", 20.0),
    "drain_seconds": ("110", 110.0),
    "unhealthy_seconds": ("60", 60.0),
    "url": ("https://jobs.example.com", "https://jobs.example.com"),
    "api_key": ("cv_1_secret", "cv_1_secret"),
    "app": ("shop.tasks:app", "shop.tasks:app"),
    "records": ("postgres://db/jobs", "postgres://db/jobs"),
    "tasks": ("dynamodb://eu-central-1/conveyor", "dynamodb://eu-central-1/conveyor"),
    "other_tasks": ("dynamodb://x/y embedded", "dynamodb://x/y embedded"),
    "queue": ("sqs://eu-central-1/conveyor", "sqs://eu-central-1/conveyor"),
    "coordinator": ("redis://cache/0", "redis://cache/0"),
    "blobs": ("s3://bucket/conveyor", "s3://bucket/conveyor"),
    "workers": ("3", 3),
    "fetchers": ("4", 4),
    "worker_concurrency": ("512", 512),
    "allow_private_targets": ("true", True),
    "gateway": ("http://proxy:3128", "http://proxy:3128"),
    "ca_bundle": ("/etc/ssl/corporate.pem", Path("/etc/ssl/corporate.pem")),
    "allow_insecure": ("true", True),
    "max_request_bytes": ("2048", 2048),
    "max_inline_tasks": ("10", 10),
    "sync_task_limit": ("5", 5),
    "sync_list_bytes": ("0", 0),
    "max_lifetime_seconds": ("86400", 86_400.0),
    "task_shard_count": ("16", 16),
    "force_task_shards": ("true", True),
    "max_list_bytes": ("1000", 1000),
    "ingest_range_bytes": ("100", 100),
    "source_buckets": ("acme=s3://bucket *=s3://other", "acme=s3://bucket *=s3://other"),
    "export_buckets": ("acme=s3://bucket/acme/ *=gs://other", "acme=s3://bucket/acme/ *=gs://other"),
    "ingesters": ("4", 4),
    "upload_seconds": ("60", 60.0),
    "idempotency_seconds": ("30", 30.0),
    "idempotency_lease_seconds": ("2.5", 2.5),
    "signing_key": ("s" * 32, "s" * 32),
    "run_queue_limit": ("0", 0),
    "lease_seconds": ("1.5", 1.5),
    "max_lost_starts": ("7", 7),
    "flush_seconds": ("0", 0.0),
    "progress_seconds": ("5", 5.0),
    "progress_share": ("0.5", 0.5),
    "stuck_after": ("60", 60.0),
    "monitor_seconds": ("5", 5.0),
    "deadline_tries": ("1", 1),
    "recovery_ratio": ("2", 2),
    "breaker_ratio": ("0.5", 0.5),
    "breaker_least": ("5", 5),
    "breaker_window": ("10", 10.0),
    "breaker_seconds": ("2", 2.0),
    "breaker_longest": ("60", 60.0),
    "body_budget_bytes": ("2097152", 2097152),
    "worker_held_bytes": ("2097152", 2097152),
    "fleet_concurrency": ("100", 100),
    "min_workers": ("1", 1),
    "max_queued_tasks": ("1000", 1000),
    "tenant_queued_tasks": ("100", 100),
    "max_jobs": ("20", 20),
    "tenant_jobs": ("10", 10),
    "max_staged_bytes": ("2000", 2000),
    "tenant_staged_bytes": ("1000", 1000),
    "max_connections": ("16", 16),
    "max_requests": ("8", 8),
    "max_requests_bytes": ("2097152", 2097152),
    "download_piece_bytes": ("65536", 65536),
    "exporters": ("2", 2),
    "export_seconds": ("3600", 3600.0),
    "export_piece_bytes": ("1048576", 1048576),
    "export_retries": ("0", 0),
    "export_retry_base": ("1", 1.0),
    "export_retry_rate": ("1.5", 1.5),
    "export_retry_cap": ("30", 30.0),
    "handler_processes": ("0", 0),
    "handler_threads": ("1", 1),
    "handler_calls": ("1000", 1000),
    "handler_mib": ("256", 256),
    "webhook_timeout": ("1.5", 1.5),
    "webhook_retries": ("1 2.5", "1 2.5"),
    "webhook_concurrency": ("2", 2),
    "webhook_slots": ("16", 16),
    "webhook_log_seconds": ("3600", 3600.0),
    "webhook_overlap_seconds": ("60", 60.0),
    "max_webhooks": ("3", 3),
    "failure_notice_seconds": ("5", 5.0),
    "max_streams": ("4", 4),
    "max_schedules": ("6", 6),
    "schedule_catch_up": ("7", 7),
    "schedule_grace_seconds": ("8", 8.0),
    "schedule_fetch_seconds": ("9", 9.0),
    "sign_in_link_seconds": ("60", 60.0),
    "failed_keys_per_minute": ("20", 20),
    "session_seconds": ("3600", 3600.0),
    "previous_signing_key": ("p" * 32, "p" * 32),
    "step_functions": ("stepfunctions://eu-central-1", "stepfunctions://eu-central-1"),
    "event_targets": (
        "*=arn:aws:events:eu-central-1:123456789012:event-bus/jobs",
        "*=arn:aws:events:eu-central-1:123456789012:event-bus/jobs",
    ),
    "callback_heartbeat_seconds": ("60", 60.0),
    "callback_stuck_after": ("120", 120.0),
    "callback_log_seconds": ("3600", 3600.0),
    "intake": ("again jobs", "again jobs"),
    "intake_tenant": ("acme", "acme"),
    "intake_batch_size": ("10", 10),
    "intake_concurrency": ("2", 2),
    "intake_priority_ratio": ("8", 8),
    "intake_delay_seconds": ("600", 600.0),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "metrics_token": ("t" * 32, "t" * 32),
    "metrics_port": ("9100", 9100),
    "metrics_host": ("::1", "::1"),
    "sample_seconds": ("5", 5.0),
    "cloudwatch_namespace": ("Conveyor", "Conveyor"),
    "otlp_endpoint": ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
    "trace_ratio": ("0.5", 0.5),
    "crash_at": ("tasks.finish.after:2", "tasks.finish.after:2"),
}
NUMBERS = [field.name for field in msgspec.structs.fields(Settings) if field.type in (int, float)]


def test_every_field_is_listed_here() -> None:
    assert set(GIVEN) == set(Settings.__struct_fields__)


@pytest.mark.parametrize("field", GIVEN)
def test_each_is_read_from_its_variable(field: str) -> None:
    text, value = GIVEN[field]
    settings = Settings.load({PREFIX + field.upper(): text})
    assert getattr(settings, field) == value
    others = {name: default for name, default in _asdict(Settings()).items() if name != field}
    assert {name: each for name, each in _asdict(settings).items() if name != field} == others


def test_all_at_once() -> None:
    settings = Settings.load({PREFIX + field.upper(): text for field, (text, _) in GIVEN.items()})
    assert _asdict(settings) == {field: value for field, (_, value) in GIVEN.items()}


def test_none_set_is_all_defaults() -> None:
    assert Settings.load({}) == Settings()
    assert Settings.load({"PATH": "/bin", "CONVEYOR_UNKNOWN": "1", "PORT": "99"}) == Settings()


def test_the_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVEYOR_PORT", "4242")
    assert Settings.load().port == 4242


def test_an_empty_variable_counts_as_not_set() -> None:
    assert Settings.load({"CONVEYOR_PORT": "", "CONVEYOR_API_KEY": ""}) == Settings()


def test_an_override_wins_and_none_does_not() -> None:
    environ = {"CONVEYOR_PORT": "1", "CONVEYOR_HOST": "a"}
    settings = Settings.load(environ, port=2, host=None)
    assert (settings.port, settings.host) == (2, "a")


@pytest.mark.parametrize("text", ["true", "1", "True", "TRUE"])
def test_words_for_yes(text: str) -> None:
    assert Settings.load({"CONVEYOR_ALLOW_PRIVATE_TARGETS": text}).allow_private_targets


@pytest.mark.parametrize("text", ["false", "0", "False"])
def test_words_for_no(text: str) -> None:
    assert not Settings.load({"CONVEYOR_ALLOW_PRIVATE_TARGETS": text}).allow_private_targets


def refused(field: str, text: str) -> str:
    with pytest.raises(InvalidSetting) as caught:
        Settings.load({PREFIX + field.upper(): text})
    message = str(caught.value)
    assert "\n" not in message
    assert PREFIX + field.upper() in message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "the cause would be shown too"
    return message


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("text", ["many", "1e", "0x10", "1,5", "--1"])
def test_what_is_not_a_number_is_named(field: str, text: str) -> None:
    assert "Expected" in refused(field, text)


@pytest.mark.parametrize("text", ["maybe", "2", "yes"])
def test_what_is_neither_yes_nor_no_is_named(text: str) -> None:
    refused("allow_private_targets", text)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("workers", "0"),
        ("workers", "-1"),
        ("worker_concurrency", "0"),
        ("max_inline_tasks", "0"),
        ("max_request_bytes", "10"),
        ("port", "-1"),
        ("port", "65536"),
        ("lease_seconds", "0"),
        ("lease_seconds", "-3"),
        ("flush_seconds", "-0.1"),
        ("signing_key", "s" * 31),
        ("webhook_retries", "5 soon"),
        ("webhook_retries", "5 -1"),
        ("webhook_retries", "nan"),
        ("webhook_concurrency", "0"),
    ],
)
def test_what_is_out_of_range_is_named(field: str, text: str) -> None:
    refused(field, text)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("lease_seconds", "nan"),
        ("lease_seconds", "inf"),
        ("flush_seconds", "inf"),
        ("max_lost_starts", "0"),
        ("log_level", "loud"),
    ],
)
def test_what_makes_no_sense_is_named(field: str, text: str) -> None:
    refused(field, text)


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


def test_every_field_has_a_comment() -> None:
    """It is the description in `conveyor doctor` and in SPEC §9."""
    lines = Path(__file__).parents[2].joinpath("src/conveyor/settings.py").read_text().splitlines()
    for field in Settings.__struct_fields__:
        at = next(number for number, line in enumerate(lines) if line.startswith(f"    {field}: "))
        assert lines[at - 1].strip().startswith("# "), field
        assert lines[at - 1].strip().endswith("."), field


def _asdict(settings: Settings) -> dict[str, Any]:
    return msgspec.structs.asdict(settings)


@pytest.mark.parametrize("url", ["jobs.example.com", "ftp://jobs.example.com", "https://", "https://a.example/?x=1"])
def test_a_public_url_is_one_that_paths_can_follow(url: str) -> None:
    with pytest.raises(InvalidSetting, match="CONVEYOR_PUBLIC_URL"):
        Settings.load({}, public_url=url)


def test_a_public_link_is_absolute_where_the_url_is_known() -> None:
    assert public_link(None, "/v1/jobs/x") == "/v1/jobs/x"
    assert public_link("https://a.example/jobs/", "/v1/jobs/x") == "https://a.example/jobs/v1/jobs/x"
    assert public_link("https://a.example", "https://bucket.example/x") == "https://bucket.example/x"


def test_blobs_are_in_a_directory_unless_a_store_has_them() -> None:
    assert blob_directory(Settings(data=Path("/srv/data"))) == Path("/srv/data/blobs")
    assert blob_directory(Settings.load({}, blobs="file:///srv/my%20blobs")) == Path("/srv/my blobs")
    assert blob_directory(Settings.load({}, blobs="s3://bucket")) is None


@pytest.mark.parametrize("url", ["file:", "file:blobs", "file://blobs", "file:///", "file:///x?y", "file://host/x"])
def test_a_directory_of_blobs_is_absolute(url: str) -> None:
    with pytest.raises(InvalidSetting, match="CONVEYOR_BLOBS must name an absolute directory"):
        Settings.load({}, blobs=url)
