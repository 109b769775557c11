"""`conveyor demo`: fetch thousands of pages of a small site on this machine."""

import shutil
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

# Failing pages are retried too. With a short backoff the retries finish when the quick pages do.
_SPEC = {"name": "demo", "concurrency": 256, "attempts": 3, "backoff": {"base": 0.3, "cap": 2.0}}


def demo(
    pages: Annotated[int, typer.Option("--pages", min=1, help="Number of pages to fetch.")] = 10_000,
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="Directory for the list and the archive.")] = Path(
        "demo-data"
    ),
    as_json: AsJson = False,
) -> None:
    """Fetch 10,000 pages of a small built-in site.

    Some pages are slow, flaky, redirecting or failing, as on real sites.
    """
    from conveyor.cli.local_run import RunPlan, run_here
    from conveyor.cli.run_directory import default_data, remove_data

    data.mkdir(parents=True, exist_ok=True)
    out = data / "results.zip"
    run_data = default_data(out)
    if run_data.exists():
        remove_data(run_data)
    settings = Settings.load(data=run_data, allow_private_targets=True)
    with _site() as site:
        urls = _write_list(data / "urls.txt", site, pages)
        _say(f"Fetching {pages:,} pages of the demo site at {site}, listed in {urls}", as_json)
        plan = RunPlan([str(urls)], _SPEC, out, settings, resume=False, temporary=True, title="demo")
        code = run_here(plan, as_json)
    if code not in {0, EXIT_TASKS_FAILED}:
        raise typer.Exit(code)
    _say(
        "\nTwo pages in a hundred are missing or broken and fail by design. manifest.jsonl in the archive says why.",
        as_json,
    )
    _say(f"To run your own list, one URL per line: {_command()} run my-urls.txt -o results.zip", as_json)


def _command() -> str:
    """The command as the user called it: often it is not on the PATH."""
    called = sys.argv[0]
    return "conveyor" if Path(called).name != "conveyor" or shutil.which("conveyor") == called else called


def _say(line: str, as_json: bool) -> None:
    if not as_json:
        print(line, flush=True)


@contextmanager
def _site() -> Iterator[str]:
    """Run the site in a process of its own. It exits when its standard input closes, so it never outlives us."""
    # A session of its own: Ctrl-C must not reach the site, which stays up while the workers stop.
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
