"""`conveyor demo`: thousands of pages of a small site on this machine, fetched before your eyes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from conveyor.cli import EXIT_TASKS_FAILED
from conveyor.cli.shared_options import AsJson
from conveyor.settings import Settings

# Failing pages are tried again too: short waits, so that the demo ends with its quick pages.
_SPEC = {"name": "demo", "concurrency": 256, "attempts": 3, "backoff": {"base": 0.3, "cap": 2.0}}


def demo(
    pages: Annotated[int, typer.Option("--pages", min=1, help="How many pages to fetch.")] = 10_000,
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="Directory for the list and the archive.")] = Path(
        "demo-data"
    ),
    as_json: AsJson = False,
) -> None:
    """Run 10,000 URLs against a small built-in site: quick, slow, flaky, redirecting and failing pages."""
    from conveyor.cli.local_run import RunPlan, run_here
    from conveyor.cli.run_directory import default_data, remove_data

    data.mkdir(parents=True, exist_ok=True)
    out = data / "results.zip"
    kept = default_data(out)
    if kept.exists():
        remove_data(kept)
    settings = Settings.load(data=kept, allow_private_targets=True)
    with _site() as site:
        urls = _write_list(data / "urls.txt", site, pages)
        _say(f"{pages:,} pages of the demo site at {site}, listed in {urls}", as_json)
        plan = RunPlan([str(urls)], _SPEC, out, settings, resume=False, temporary=True, title="demo")
        code = run_here(plan, as_json)
    if code not in {0, EXIT_TASKS_FAILED}:
        raise typer.Exit(code)
    _say(
        "\nMissing and broken pages fail by design: two in a hundred. manifest.jsonl in the archive says why.", as_json
    )
    _say(f"Your own list, one URL a line: {_command()} run my-urls.txt -o results.zip", as_json)


def _command() -> str:
    """As it was called: often it is not on the path."""
    return sys.argv[0] if Path(sys.argv[0]).name == "conveyor" else "conveyor"


def _say(line: str, as_json: bool) -> None:
    if not as_json:
        print(line, flush=True)


@contextmanager
def _site() -> Iterator[str]:
    """The site in a process of its own, as targets are. It ends with its standard input, whatever becomes of us."""
    # A session of its own: Ctrl-C is for us, and the site stays up while workers give back what they hold.
    with subprocess.Popen(
        [sys.executable, "-m", "conveyor.demo.site"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def _write_list(path: Path, site: str, count: int) -> Path:
    from conveyor.demo.page_list import pages

    with path.open("w") as file:
        file.writelines(url + "\n" for url in pages(site, count))
    return path
