"""`python -m bench.peers`: the same two jobs done by Conveyor and by its peers, each in its fastest documented way.

no-op: tasks that do nothing, from the first submit until the last has run. fetch: pages of 2 KB from a local nginx,
every body kept, 100 requests at once. Workers are started before the clock. The order rotates from round to round, and
the figures are medians. `--record` adds the rows to bench/peers.jsonl, from which docs/explanation/performance.md is
made.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import machine, nginx
from bench.child import ROOT, MeasurementFailed, measure
from bench.meter import Meter, wait_for_quiet
from bench.peers.catalogue import CONCURRENCY, PEERS, Peer
from bench.peers.page import ROWS, write_chart

PROGRAMS = Path(__file__).parent / "programs"
SCRATCH = ROOT / ".cache" / "bench"
_TIMEOUT = 900
_LEAST = 500


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    peers = [peer for peer in PEERS if not options.names or any(name in peer.name for name in options.names)]
    SCRATCH.mkdir(parents=True, exist_ok=True)
    known = machine.line(machine.facts(SCRATCH))
    print(known)
    measured: dict[Peer, list[dict[str, Any]]] = {peer: [] for peer in peers}
    failed = False
    with _servers({need for peer in peers for need in peer.needs}) as servers:
        for turn in range(options.repeat):
            for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
                print(f"{peer.job}: {peer.name} …", file=sys.stderr, flush=True)
                wait_for_quiet(options.quiet)
                try:
                    measured[peer].append(_measure(peer, servers, options))
                except (MeasurementFailed, subprocess.SubprocessError) as error:
                    print(f"{peer.name} could not be measured: {error}", file=sys.stderr)
                    failed = True
    rows = [_row(peer, runs, known, options.python) for peer, runs in measured.items() if runs]
    for row in rows:
        print(f"{row['job']:6}{row['peer']:20}{row['rate']:>10,.0f} /s   {row['rates']}   keeps {row['keeps']}")
    if options.record and not failed:
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_chart()
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="measure only the peers whose name contains this")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has the peers")
    parser.add_argument("--size", type=float, default=1.0, help="scale of every count; 0.1 for a quick look")
    parser.add_argument("--repeat", type=int, default=3, help="number of rounds; figures are medians")
    parser.add_argument("--quiet", type=float, default=30.0, help="longest wait for an idle machine, in seconds")
    parser.add_argument("--record", action="store_true", help="store the rows and draw the chart of the docs")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _servers(needs: set[str]) -> Iterator[dict[str, Any]]:
    """The servers that the chosen peers need: on loopback, and durable where the peer's promise rests on it."""
    from bench.postgres import SETTINGS
    from tests.servers.postgres import Server
    from tests.servers.redis import RedisServer

    if "nginx" in needs and nginx.found() is None:
        raise SystemExit(nginx.INSTALL)
    if shutil.which("aria2c") is None:
        print("aria2 is not measured: apt-get install aria2", file=sys.stderr)
    servers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if "postgres" in needs:
            postgres = stack.enter_context(contextlib.closing(Server(SCRATCH, SETTINGS)))
            servers |= {"postgres": postgres.url, "postgres_pid": postgres.pid}
        if "redis" in needs:
            servers["redis"] = stack.enter_context(contextlib.closing(RedisServer())).url
        if "nginx" in needs:
            place = stack.enter_context(tempfile.TemporaryDirectory(dir=SCRATCH))
            site = stack.enter_context(nginx.serving(Path(place)))
            servers |= {"url": site.url, "nginx_pids": site.servers}
        yield servers


def _measure(peer: Peer, servers: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    count = max(_LEAST, int(peer.count * options.size))
    if peer.program.endswith(".py"):
        return {"count": count, **_run_program(peer, count, servers, options.python)}
    arguments: dict[str, Any] = {"count": count}
    if peer.job == "fetch":
        arguments |= {"url": servers["url"], "servers": servers["nginx_pids"]}
    elif "postgres" in peer.needs:
        arguments |= {"url": servers["postgres"], "pid": servers["postgres_pid"]}
    return measure(peer.program, SCRATCH, **arguments)


def _run_program(peer: Peer, count: int, servers: dict[str, Any], python: str) -> dict[str, Any]:
    """Run a program in the peers' environment. Its last line is what it measured."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place:
        asked = {"count": count, "place": place, "concurrency": CONCURRENCY, **servers}
        marks = Path(place) / "marks"
        marks.touch()
        environ = {"PATH": os.environ["PATH"], "HOME": place, "PYTHONPATH": str(PROGRAMS), "PEERS_MARKS": str(marks)}
        environ["PEERS_REDIS"] = servers.get("redis", "")
        meter = Meter()
        ended = subprocess.run(
            [python, str(PROGRAMS / peer.program), json.dumps(asked)],
            cwd=place,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if ended.returncode != 0:
            raise MeasurementFailed(f"{peer.program} ended with code {ended.returncode}")
        disturbed = meter.stop()["disturbed"]
        if peer.job == "fetch" and (bodies := Path(place) / "bodies").exists():
            _check_bodies(bodies, count)
        return {**json.loads(ended.stdout.splitlines()[-1]), "disturbed": disturbed}


def _check_bodies(bodies: Path, count: int) -> None:
    stored = sum(1 for path in bodies.iterdir() if path.read_bytes() == nginx.page(int(path.name)))
    if stored != count:
        raise MeasurementFailed(f"{stored} of {count} pages were stored as they are")


def _row(peer: Peer, runs: Sequence[dict[str, Any]], known: str, python: str) -> dict[str, Any]:
    rates = [round(run["count"] / run["seconds"]) for run in runs]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "job": peer.job,
        "peer": peer.name,
        "version": _version(peer, python),
        "count": runs[0]["count"],
        "rate": statistics.median(rates),
        "rates": rates,
        "keeps": peer.keeps,
        "way": peer.way,
        "disturbed": round(max(run.get("disturbed", 0.0) for run in runs), 2),
        "machine": known,
    }


def _version(peer: Peer, python: str) -> str:
    if peer.is_ours:
        return importlib.metadata.version("conveyor-jobs")
    if peer.package is not None:
        question = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
        return subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip()
    command = {"curl --parallel": "curl", "aria2": "aria2c"}.get(peer.name)
    if command is None:
        return ""
    first = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.split("\n", 1)[0]
    return next((word for word in first.split() if word[0].isdigit()), "")


if __name__ == "__main__":
    sys.exit(main())
