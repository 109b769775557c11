"""How the SDK is typed for those who use it. Nothing here runs: mypy reads it, and would complain of an `ignore` that
is not needed any more."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import assert_type

from conveyor import AsyncClient, Client, Context, ConveyorError, Event, Job, Progress, Result, errors, task
from conveyor.client import JobOptions


def plain(client: Client) -> None:
    job = client.submit(["https://example.com"], name="pages", concurrency=5, backoff={"base": 1.0})
    client.submit({"n": number} for number in range(3))
    client.submit(Path("urls.txt"), format="csv", kind="download", download={"max_bytes": 10})
    client.submit("urls.txt", gateway={"url": "https://gateway.example.com/?u={url}"}, rate_per_host=None)
    assert_type(job, Job)
    assert_type(job.wait(timeout=1, progress=True).ok, bool)
    for result in job.results(status="failed", http_status=404):
        assert_type(result, Result)
    for told in job.stream():
        assert_type(told, Event | Progress)
    assert_type(job.export("out.zip", bodies="none", tag="x"), list[Path])
    assert_type(job.export_to("s3://bucket/prefix/", format="parquet").urls, list[str])
    assert_type(job.export_files("results", names="{id}{ext}").state, str)
    job.rerun(failed=True, attempts=2).change(timeout=5)
    assert_type(job.duplicate(name="copy", attempts=2), Job)

    client.submit(["u"], concurrency="many")  # type: ignore[arg-type]
    client.submit(["u"], colour="red")  # type: ignore[call-arg]
    client.submit(["u"], backoff={"bass": 1})  # type: ignore[typeddict-unknown-key]
    client.submit(["u"], kind="fetsch")  # type: ignore[arg-type]
    client.submit(7)  # type: ignore[arg-type]
    job.results(status="gone")  # type: ignore[arg-type]
    job.export("out.zip", format="tar")  # type: ignore[arg-type]


async def awaited(client: AsyncClient, urls: AsyncIterator[str]) -> None:
    options: JobOptions = {"attempts": 2, "headers": {"Accept": "text/html"}}
    job = await client.submit(urls, **options)
    async for result in job.results():
        assert_type(result.error.code if result.error else None, str | None)
    assert_type(await job.body("task"), bytes)
    try:
        await job.cancel()
    except errors.JobEnded as error:
        assert_type(error.code, str)
    except ConveyorError as error:
        assert_type(error.status, int)


@task("length")
def length(text: str, context: Context) -> int:
    return len(text)


assert_type(length("text", Context("j", "r", 0, 1, lambda *_: None)), int)
