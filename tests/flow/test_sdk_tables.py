"""DataFrames of the SDK against a real server: a table in, its columns and the results out."""

from pathlib import Path

import pyarrow as pa
import pytest

from conveyor import AsyncClient, Client
from conveyor.settings import Settings
from tests.flow.test_sdk import blocking
from tests.support.api import Api
from tests.support.working import working

TABLE = pa.table({"link": [f"http://example.com/{number}" for number in range(30)], "n": list(range(30))})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=tmp_path / "data")


async def test_a_table_goes_in_and_comes_out(server: Api) -> None:
    def use(client: Client) -> None:
        job = client.submit(TABLE, url="link", attempts=1)
        job.wait(timeout=60)
        table = job.to_arrow(bodies="binary")
        assert table["n"].to_pylist() == list(range(30))
        assert table["url"].to_pylist() == TABLE["link"].to_pylist()
        assert str(table.schema.field("n").type) == "int64"
        assert table.num_rows == job.total
        assert job.to_arrow(status="failed").num_rows == job.failed

    async with working(server.system):
        await blocking(server, use)
        async with AsyncClient(server.url, server.key) as client:
            job = await client.submit(TABLE.slice(0, 3), url="link")
            await job.wait(timeout=60)
            assert (await job.to_arrow())["n"].to_pylist() == [0, 1, 2]
