"""What was extracted, in exports: columns of csv and Parquet, a row for each object; whole in jsonl and manifests."""

import csv
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conveyor.client import AsyncClient
from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.api import Api, serving
from tests.support.places import quick_place
from tests.support.product_site import ProductSite
from tests.support.working import ended

COUNT = 5


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    with quick_place() as place:
        settings = Settings.load(
            {},
            data=place / "data",
            app="tests.support.parsers_app:parsers",
            fetchers=0,
            handler_processes=1,
            allow_private_targets=True,
        )
        async with open_system(settings) as system, serving(system) as api, Embedded(system).running():
            yield api


async def exported(api: Api, job_id: str, path: Path) -> bytes:
    async with AsyncClient(api.url, api.key) as client:
        job = await client.job(job_id)
        await job.export(path)
    return path.read_bytes()


async def ran(api: Api, site: ProductSite, extract: str) -> str:
    tasks = [{"url": site.url(number), "id": f"p{number}", "data": {"shelf": number}} for number in range(COUNT)]
    job_id: str = (await api.submit({"tasks": tasks, "extract": extract, "attempts": 1})).json["id"]
    await ended(api, job_id)
    return job_id


async def test_objects_are_rows_and_their_fields_are_columns(api: Api, tmp_path: Path) -> None:
    async with ProductSite() as site:
        job_id = await ran(api, site, "fussy")
        table = pq.read_table(io.BytesIO(await exported(api, job_id, tmp_path / "all.parquet")))
        rows: list[dict[str, Any]] = table.to_pylist()
        assert [row["title"] for row in rows] == ["Product 0", "Product 1", "Product 2", None, "Product 4"]
        assert [row["price"] for row in rows] == [0, 100, 200, None, 400]
        assert [row["error_code"] for row in rows] == [None, None, None, "extract_failed", None]
        # Names that the results have are told apart.
        assert (rows[1]["extracted.url"], rows[1]["extracted.status"], rows[1]["extracted.id"]) == (
            site.url(1),
            200,
            "p1",
        )
        assert (rows[1]["status"], rows[1]["shelf"]) == ("succeeded", 1)
        text = (await exported(api, job_id, tmp_path / "all.csv")).decode()
        by_title = list(csv.DictReader(io.StringIO(text)))
        assert [(row["title"], row["price"], row["shelf"]) for row in by_title][:2] == [
            ("Product 0", "0", "0"),
            ("Product 1", "100", "1"),
        ]
        lines = [json.loads(line) for line in (await exported(api, job_id, tmp_path / "all.jsonl")).splitlines()]
        assert [line["extracted"] and line["extracted"]["price"] for line in lines] == [0, 100, 200, None, 400]
        with zipfile.ZipFile(io.BytesIO(await exported(api, job_id, tmp_path / "all.zip"))) as archive:
            manifest = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert [line["extracted"] and line["extracted"]["title"] for line in manifest][3:] == [None, "Product 4"]


async def test_a_list_of_objects_is_several_rows(api: Api, tmp_path: Path) -> None:
    async with ProductSite() as site:
        job_id = await ran(api, site, "offers")
    rows = pq.read_table(io.BytesIO(await exported(api, job_id, tmp_path / "all.parquet"))).to_pylist()
    # A page without an offer is a row without one: no task is missing.
    assert [(row["index"], row["offer"]) for row in rows] == [
        (0, None),
        (1, "offer 0"),
        (2, "offer 0"),
        (2, "offer 1"),
        (3, None),
        (4, "offer 0"),
    ]
    text = (await exported(api, job_id, tmp_path / "all.csv")).decode()
    assert [(row["index"], row["offer"]) for row in csv.DictReader(io.StringIO(text))][2:4] == [
        ("2", "offer 0"),
        ("2", "offer 1"),
    ]
    lines = [json.loads(line) for line in (await exported(api, job_id, tmp_path / "all.jsonl")).splitlines()]
    assert [len(line["extracted"]) for line in lines] == [0, 1, 2, 0, 1]
