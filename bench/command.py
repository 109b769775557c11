"""command: `conveyor run` as a user starts it, against the time of its job alone, and against half a second.

The time of the job is the one that the command reports: from the open store to the last recorded outcome. The rest is
what the user waits for besides: the start of the interpreter and of the fetchers, the archive, and the end.
"""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from bench import nginx
from bench.child import ROOT, MeasurementFailed, Setup
from bench.figures import Figure
from bench.meter import Meter

COUNT = 100_000
CONCURRENCY = 64

_TIMEOUT = 600
_START_SECONDS = 0.5


def run(setup: Setup) -> list[Figure]:
    count = setup.count(COUNT)
    with nginx.serving(setup.scratch) as site:
        at = {"url": site.url, "servers": site.servers, "bytecode": str(setup.scratch / "bytecode")}
        # As after an installation: the first start compiles, the others do not.
        setup.bare("bench.command:command", count=1, **at)
        whole = [setup.ours("bench.command:command", count=count, **at) for _ in range(setup.repeat)]
        one = [setup.ours("bench.command:command", count=1, **at) for _ in range(setup.repeat)]
    seconds, jobs = [each["seconds"] for each in whole], [each["job_seconds"] for each in whole]
    starts, limits = [each["seconds"] for each in one], [_START_SECONDS] * len(one)
    name, more = f"conveyor run, {count:,} pages", {"count": count, "disturbed": [each["disturbed"] for each in whole]}
    return [
        Figure("command", name, "s", seconds, "its job alone", jobs, ("at most", 1.15), more),
        Figure("command", "conveyor run, one page", "s", starts, "half a second", limits, ("at most", 1.0)),
    ]


def command(url: str, servers: list[int], count: int, bytecode: str, place: str) -> dict[str, Any]:
    listed, archive = Path(place) / "urls.txt", Path(place) / "out.zip"
    listed.write_text("".join(f"{url}/{number}\n" for number in range(count)))
    program = str(Path(sys.executable).with_name("conveyor"))
    call = [program, "run", str(listed), "-o", str(archive), "--overwrite", "--allow-private-targets"]
    call += ["--concurrency", str(CONCURRENCY), "--json"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = bytecode
    meter, began = Meter(servers), time.perf_counter()
    ended = subprocess.run(call, cwd=ROOT, env=environ, timeout=_TIMEOUT, check=False, capture_output=True)
    seconds = time.perf_counter() - began
    spent = meter.stop()
    if ended.returncode != 0:
        raise MeasurementFailed(f"conveyor run ended with code {ended.returncode}: {ended.stderr.decode()[-500:]}")
    with zipfile.ZipFile(archive) as made:
        damaged, names = made.testzip(), len(made.namelist())
        lines = [json.loads(line)["index"] for line in made.read("manifest.jsonl").splitlines()]
    if damaged is not None or names != count + 1 or lines != list(range(count)):
        raise MeasurementFailed(f"the archive has {names} entries, {len(lines)} lines, and a damaged {damaged}")
    job_seconds = float(json.loads(ended.stdout)["seconds"])
    return {"count": count, "seconds": seconds, "job_seconds": job_seconds, "disturbed": spent["disturbed"]}
