"""`python -m bench [names…]`: run the benches and print a table, then one line of JSON for each figure."""

import argparse
import datetime
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from bench import (
    archive,
    aws,
    command,
    fetch,
    fleet,
    flood,
    growth,
    house,
    ingest,
    latency,
    machine,
    nginx,
    noop,
    pace,
    postgres,
    serve,
    small,
)
from bench.child import ROOT, MeasurementFailed, Setup
from bench.figures import Figure, table

BENCHES: dict[str, ModuleType] = {
    "noop": noop,
    "fetch": fetch,
    "ingest": ingest,
    "growth": growth,
    "archive": archive,
    "command": command,
    "postgres": postgres,
    "serve": serve,
    "aws": aws,
    "flood": flood,
    "house": house,
    "small": small,
    "fleet": fleet,
    "latency": latency,
    "pace": pace,
}
RESULTS = Path(__file__).parent / "RESULTS.md"
# On the disk that the code is on: what is in memory (/tmp, often) has no fsync to pay for.
SCRATCH = ROOT / ".cache" / "bench"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    names = options.names or list(BENCHES)
    if {"fetch", "command", "small", "latency", "pace"} & set(names) and nginx.found() is None:
        print(nginx.INSTALL, file=sys.stderr)
        return 1
    SCRATCH.mkdir(parents=True, exist_ok=True)
    known = machine.line(machine.facts(SCRATCH))
    print(known)
    # A server that was started must not outlive a bench that is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    figures, failed = _run_all(names, options)
    if figures:
        report = _report(figures, known, options)
        print(f"\n{report}\n")
    for figure in figures:
        print(figure.as_json())
    if options.record and not failed:
        _record(report)
    return 1 if failed else 0


def _run_all(names: Sequence[str], options: argparse.Namespace) -> tuple[list[Figure], bool]:
    """What could be measured, and whether something could not."""
    figures: list[Figure] = []
    failed = False
    for name in names:
        try:
            for figure in _run(name, options):
                figures.append(figure)
                print(figure.as_json(), file=sys.stderr, flush=True)
        except MeasurementFailed as error:
            print(f"{name} could not be measured: {error}", file=sys.stderr)
            failed = True
    return figures, failed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run: {', '.join(BENCHES)}; all without")
    parser.add_argument("--size", type=float, default=1.0, help="scale of every count; 0.1 for a quick look")
    parser.add_argument("--repeat", type=int, default=1, help="how often; figures are medians")
    parser.add_argument("--profile", action="store_true", help="show where our side spends its time; slows it down")
    parser.add_argument(
        "--quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait so long before each measurement for other processes to be idle, and measure again if they were not",
    )
    parser.add_argument("--record", action="store_true", help="add the table to bench/RESULTS.md")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHES]
    if unknown:
        parser.error(f"there is no bench {unknown[0]!r}; there are {', '.join(BENCHES)}")
    if options.size <= 0 or options.repeat < 1:
        parser.error("--size must be above 0 and --repeat at least 1")
    if options.profile and options.record:
        parser.error("a profiled run is slowed down: it can not be recorded")
    return options


def _run(name: str, options: argparse.Namespace) -> Iterator[Figure]:
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=SCRATCH))
    print(f"{name} …", file=sys.stderr, flush=True)
    try:
        setup = Setup(scratch, options.size, options.repeat, options.profile, options.quiet)
        yield from BENCHES[name].run(setup)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _report(figures: Sequence[Figure], known: str, options: argparse.Namespace) -> str:
    parts = [table(figures)]
    scale = "" if options.size == 1 else f", size {options.size:g}"
    disturbed = max((share for figure in figures for share in figure.more.get("disturbed", [])), default=0.0)
    parts.append(
        f"Medians of {options.repeat}{scale}, ratios of pairs. {known}. Other processes had up to {disturbed:.2f} of a "
        "core during our runs."
    )
    return "\n\n".join(parts)


def _record(report: str) -> None:
    if not RESULTS.exists():
        RESULTS.write_text("# Results of the benches\n\nWritten by `python -m bench --record`, the newest last.\n")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    with RESULTS.open("a") as file:
        file.write(f"\n## {today}\n\n{report}\n")


if __name__ == "__main__":
    sys.exit(main())
