"""SPEC.md describes how each engine stores things: after a bit of everything, all that is in a store is described."""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.engines.postgres.url import parse_url
from conveyor.settings import Settings
from conveyor.system import System
from tests.servers import dynamodb, postgres, redis
from tests.stacks.test_flows import ended
from tests.support.api import Api, staged
from tests.support.target_site import Site

pytestmark = pytest.mark.timeout(300)

SPEC = (Path(__file__).parents[2] / "SPEC.md").read_text()
_EXPORTS = "exports/<tenant>/<job_id>/<export_id>"
_WORD = re.compile(r"[A-Za-z_]\w*")


def section(number: str) -> str:
    """A section of SPEC.md, such as 5.8."""
    start = SPEC.index(f"\n### {number} ")
    return SPEC[start : SPEC.index("\n##", start + 1)]


def row_of(table: str, *sections: str) -> str | None:
    """The row of a table in the first of these sections that has one."""
    for number in sections:
        for line in section(number).splitlines():
            if line.startswith(f"| `{table}`"):
                return line
    return None


@pytest.fixture(params=["embedded", "aws", "postgres"])
def stack(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def settings(settings: Settings) -> Settings:
    """Ingested and sharded runs, at a bearable number of tasks."""
    return msgspec.structs.replace(settings, sync_list_bytes=0, sync_task_limit=5, ingest_range_bytes=2000)


async def a_bit_of_everything(api: Api, site: Site) -> None:
    """Every way to make rows, messages and objects."""
    tasks = [site.url("/ok?size=100"), {"url": site.url("/ok?size=3000"), "tag": "t"}, site.url("/status/503")]
    quick = {"attempts": 2, "backoff": {"base": 0.01}, "on_exhausted": "dead_letter", "deadline": 3600}
    endpoint = (await api.post("/v1/webhooks", {"url": site.url("/ok"), "events": None})).json["id"]
    notify = [{"type": "webhook", "endpoint_id": endpoint}]
    small = (await api.submit({"tasks": tasks, **quick, "notify": notify}, headers={"idempotency-key": "k"})).json["id"]
    await ended(api, small)
    assert (await api.post("/v1/dead-letters/redrive", {"all": True})).json["redriven"] == 1
    lines = [site.url(f"/ok?size={n}") for n in range(200)]
    lines[7] = "nonsense"
    large = await api.submit({"source": {"upload_id": await staged(api, "\n".join(lines).encode())}})
    open_job = (await api.submit({"mode": "open"})).json["id"]
    await api.post(f"/v1/jobs/{open_job}/tasks", {"tasks": tasks[:1], "last_batch": True})
    fetched = {"upload_id": await staged(api, lines[0].encode())}
    await api.post("/v1/schedules", {"cron": "0 0 1 1 *", "job": {"source": fetched}})
    for job_id in (small, large.json["id"], open_job):
        job = await ended(api, job_id)
        assert job["state"] == "completed", job
    download = await api.submit({"kind": "download", "tasks": [site.url("/ok?size=5000")]})
    await ended(api, download.json["id"])
    for job_id in (small, large.json["id"]):
        export = (await api.post(f"/v1/jobs/{job_id}/exports", {"format": "jsonl"})).json["id"]
        while (await api.get(f"/v1/exports/{export}")).json["state"] not in {"ready", "failed"}:  # noqa: ASYNC110  (a client polls)
            await asyncio.sleep(0.05)
    await api.request("DELETE", f"/v1/jobs/{open_job}")


async def test_whatever_is_stored_is_described(
    api: Api, site: Site, system: System, settings: Settings, stack: str, tmp_path: Path
) -> None:
    await a_bit_of_everything(api, site)
    found = {key async for key in _blob_keys(system)}
    assert {key for key in found if not any(re.fullmatch(pattern, key) for pattern in _blob_patterns())} == set()
    if stack == "postgres":
        assert await _undescribed_columns(tmp_path / "data") == []
    if stack == "aws":
        assert await _undescribed_attributes(tmp_path / "data") == []
    if stack != "embedded":
        assert _undescribed_keys(f"{{{tmp_path.name}:") == []


async def _blob_keys(system: System) -> Any:
    async for info in system.blobs.listing(""):
        yield info.key


def _blob_patterns() -> list[str]:
    """The keys of §5.2 as expressions: an ellipsis after a slash repeats the key before it."""
    rows = [line.split(" | ")[0] for line in section("5.2").splitlines() if line.startswith("| `")]
    patterns = []
    for row in rows:
        for key in re.findall(r"`([^`]+)`", row):
            whole = key.replace("exports/…", _EXPORTS).replace("…<part>", f"{_EXPORTS}/<part>")
            patterns.append(re.sub(r"<[^>]+>", "[^/]+", re.escape(whole).replace("…", ".+")))
    return patterns


async def _undescribed_columns(place: Path) -> list[tuple[str, str]]:
    """Tables and columns in the schema that neither §5.8 nor, for the records, §5.1 has."""
    # Views show the columns of tables.
    query = (
        "SELECT table_name, column_name FROM information_schema.columns JOIN information_schema.tables "
        "USING (table_schema, table_name) WHERE table_schema = $1 AND table_type = 'BASE TABLE'"
    )
    async with postgres.connect_to(place) as connection:
        columns = await connection.fetch(query, parse_url(postgres.url_of(place)).schema)
    assert len(columns) > 50
    missing = []
    for table, column in columns:
        own = re.fullmatch(r"(tasks|ends|events)_\d+", table)
        row = row_of(own[1] if own else table, "5.8", "5.1") or ""
        also = f"`{table}.{column}`" in section("5.8")
        if not also and column not in _WORD.findall(row):
            missing.append((table, column))
    return missing


async def _undescribed_attributes(place: Path) -> list[tuple[str, str, str]]:
    """Attributes of items that §5.9 and the rows of §5.1 that it refers to do not have."""
    prefix = dynamodb.url_for(place).split("/")[3].partition("?")[0]
    words = set(_WORD.findall(section("5.9"))) | set(_WORD.findall(section("5.1")))
    missing = set()
    for table in ("records", "tasks"):
        for item in await _scan(f"{prefix}-{table}"):
            partition = item["pk"]["S"].split("#")[0]
            if f"`{partition}#" not in section("5.9"):
                missing.add((table, partition, ""))
            for name, value in item.items():
                names = [name, *value["M"]] if "M" in value else [name]
                # By error code and by writer: their prefixes are described.
                plain = [re.sub(r"^(e|p|w):.*", r"\1:", each) for each in names]
                missing |= {(table, partition, each) for each in plain if each not in words and f"`{each}<" not in SPEC}
    return sorted(missing)


async def _scan(table: str) -> list[dict[str, Any]]:
    from aiobotocore.session import get_session

    from tests.servers.aws import REGION, aws

    made = get_session().create_client(
        "dynamodb", region_name=REGION, endpoint_url=aws(), aws_access_key_id="x", aws_secret_access_key="x"
    )
    async with made as client:
        items: list[dict[str, Any]] = []
        start: dict[str, Any] = {}
        while True:
            page = await client.scan(TableName=table, **start)
            items += page["Items"]
            if "LastEvaluatedKey" not in page:
                return items
            start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}


def _undescribed_keys(prefix: str) -> list[str]:
    """Keys in Redis that §5.5 does not have."""
    answer = redis.redis().say("KEYS", f"{prefix}*").decode(errors="replace")
    keys = [line.removeprefix(prefix) for line in answer.split("\r\n") if line.startswith(prefix)]
    assert keys
    described = section("5.5")
    # The kind, and what follows the hash tag.
    parts = {
        (re.split("[:}]", key)[0], re.sub(r"^:(answers|due|seats|changed):.*", r":\1:<", rest))
        for key, rest in ((key, key.rpartition("}")[2]) for key in keys)
    }
    return sorted(
        f"{kind} {rest}"
        for kind, rest in parts
        if not re.search(rf"`{{prefix:{kind}(:<|}})", described)
        or (rest and not re.search(rf"{rest}(?<=<)|{rest}`", described))
    )
