"""`conveyor errors | hosts`: why tasks of a job failed, and how its hosts are doing."""

from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_lines
from conveyor.cli.shared_options import AsJson, Data, JobArgument, Server
from conveyor.settings import Settings

OneRun = Annotated[str | None, typer.Option("--run", help="This run, by number or id. [latest]")]

_ERRORS = [("failed", 9), ("retried", 9), ("error", 20), ("host", 30), ("messages", 0)]
_HOSTS = [
    ("attempts", 9),
    ("failed", 8),
    ("retried", 8),
    ("rate", 9),
    ("p50", 8),
    ("p95", 8),
    ("breaker", 9),
    ("pace", 12),
    ("host", 32),
    ("errors", 0),
]
_OTHER = "(others)"


def errors(
    job: JobArgument, run: OneRun = None, as_json: AsJson = False, url: Server = None, data: Data = None
) -> None:
    """Show why tasks failed and were retried: errors by code and host, with messages.

    `rerun JOB --error-code CODE --host HOST` reruns the tasks of one line.
    """
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = client.job(job).error_groups(run)
    if as_json:
        print_json(found)
        return
    print_lines(_ERRORS, [line for group in found["items"] for line in _group_lines(group)], "No attempt has failed.")
    if found["items"] and not found["is_exact"]:
        print("Failed tasks by error are exact. Retried attempts and hosts may lag a few seconds, or miss a few.")


def hosts(job: JobArgument, run: OneRun = None, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Show the hosts of a job: throughput, latency, errors, breaker and pace."""
    from conveyor.cli import formatting as text
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = client.job(job).hosts(run)
    if as_json:
        print_json(found)
        return
    rows = [_host_row(host) for host in found["items"]]
    if found["other"]:
        rows.append(_host_row({**found["other"], "host": _OTHER}))
    print_lines(_HOSTS, rows, "No figures by host yet." if found["missing"] else "No attempt has finished yet.")
    if found["missing"]:
        print(
            f"{text.count(found['missing'])} finished tasks are not counted here. Workers add theirs every few "
            "seconds; one that is killed loses those of its last seconds."
        )


def _group_lines(group: dict[str, Any]) -> list[list[object]]:
    """The group with its first message, and a line for each further one."""
    from conveyor.cli import formatting as text

    host = _OTHER if group["is_other"] else group["host"] or "-"
    messages = [f"{sample['message']}  (task {sample['index']})" for sample in group["samples"]] or [""]
    counts = [text.count(group["failed"]), text.count(group["retried"])]
    return [[*counts, group["code"] or _OTHER, host, messages[0]], *(["", "", "", "", each] for each in messages[1:])]


def _host_row(host: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    breaker, pace = host.get("breaker"), host.get("pace")
    return [
        text.count(host["attempts"]),
        text.count(host["failed"]),
        text.count(host["retried"]),
        text.rate(host["rate"]),
        text.latency(host["p50"]),
        text.latency(host["p95"]),
        breaker["state"].replace("_", "-") if breaker else "closed" if "breaker" in host else "",
        f"{pace['in_flight']} of {pace['limit']}" if pace else "",
        host["host"] or "-",
        _error_counts(host),
    ]


def _error_counts(host: dict[str, Any]) -> str:
    """The most frequent codes, and how many attempts had others."""
    from conveyor.cli import formatting as text

    errors = [(error["code"], error["count"]) for error in host.get("errors", ())]
    others = host["failed"] + host["retried"] - sum(number for _, number in errors)
    if errors and others > 0:
        errors.append(("others", others))
    return ", ".join(f"{code} {text.count(number)}" for code, number in errors)
