"""`conveyor run`: run a list in this process, without a server, and write an archive."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.shared_options import (
    AllowPrivate,
    App,
    AsJson,
    Attempts,
    Bodies,
    Concurrency,
    Download,
    DropBodies,
    ExportSpec,
    Extract,
    Gateway,
    Handler,
    Headers,
    Http2,
    Insecure,
    Lists,
    MoreOptions,
    Name,
    Names,
    NoBreaker,
    OptionsFile,
    Overwrite,
    PaceOption,
    Patience,
    Rate,
    Timeout,
    UrlColumn,
    WhenInvalid,
    job_spec,
)
from conveyor.errors import BadInput
from conveyor.model import MAX_RETENTION_DAYS
from conveyor.settings import Settings

# How long tasks wait by default while their target is down, in seconds.
_PATIENCE = 60.0


def run(
    lists: Lists,
    out: Annotated[
        str,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            help="File to write. Its suffix sets the format: .zip, with a file for each body, or .jsonl, .csv or "
            ".parquet, with a row for each task; .jsonl and .csv may be followed by .gz or .zst. DIR/ is a directory "
            "that gets each body as a file once its task has finished.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Data directory, kept after the run. [CONVEYOR_DATA, else OUT.conveyor, which is deleted once the "
            "file is written]",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume a stopped run, with the options of its first start."),
    ] = False,
    overwrite: Overwrite = False,
    bodies: Bodies = None,
    names: Names = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    pace: PaceOption = None,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    insecure: Insecure = False,
    http2: Http2 = False,
    patience: Patience = None,
    no_breaker: NoBreaker = False,
    handler: Handler = None,
    extract: Extract = None,
    drop_bodies: DropBodies = False,
    download: Download = False,
    export: ExportSpec = None,
    option: MoreOptions = None,
    options: OptionsFile = None,
    url_column: UrlColumn = None,
    on_invalid: WhenInvalid = None,
    name: Name = None,
    app: App = None,
    allow_private_targets: AllowPrivate = False,
    ca_bundle: Annotated[
        Path | None,
        typer.Option(
            "--ca-bundle",
            metavar="FILE",
            help="File with certificates of authorities, in PEM, to trust besides those of the system. "
            "[CONVEYOR_CA_BUNDLE]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a list of tasks and write the results to a file.

    A zip or a directory has one file per body and a manifest.jsonl; the other formats are tables with one row per task.

    Ctrl-C stops cleanly. The same command with --resume continues, also after a crash.

    If a host is down, its tasks wait for 60 seconds (--patience) and then fail.

    If the list cannot be read to its end, the file has the results so far. Fix the list and pass --resume.

    Exits 0 if all tasks succeeded, 3 if some failed, 2 on bad input.
    """
    from conveyor.process.early_fetchers import early_fetchers

    flags: dict[str, Any] = {"app": app, "allow_private_targets": allow_private_targets or None}
    # The jobs are those of the user, who decides by --insecure; a run that is resumed may have had it.
    flags |= {"ca_bundle": ca_bundle, "allow_insecure": True}
    settings = Settings.load(data=data, **flags)
    # This process needs a core itself: more of them would hold up each other and it.
    with early_fetchers(min(settings.fetchers, max(1, (os.cpu_count() or 1) - 1))) as fetchers:
        from conveyor.cli.loop import loading

        with loading():
            import conveyor.embedded  # noqa: F401
            from conveyor.accept.option_limits import check_limits
            from conveyor.accept.spec import decode_spec
            from conveyor.cli.local_run import RunPlan, run_here
            from conveyor.cli.output_file import output_spec
            from conveyor.cli.run_directory import (
                check_data,
                check_lists,
                check_out,
                default_data,
                expand_lists,
                has_unfinished_run,
                is_default,
            )
            from conveyor.client.export_folder import check_folder, is_folder
            from conveyor.egress.ca_bundle import read_ca_bundle

        # `.` and `..` have no name for what goes beside them.
        path, is_directory = Path(out) if Path(out).name.strip(".") else Path(out).resolve(), is_folder(out)
        if not path.name:
            raise BadInput(f"{path} cannot be the output. Choose another directory with -o.")
        # A run that is resumed may have written what it had; of one that has to be, its data directory tells.
        (check_folder if is_directory else check_out)(path, overwrite or resume or has_unfinished_run(path, data))
        output = output_spec(path, bodies, names, is_directory)
        lists = expand_lists(lists)
        check_lists(lists)
        spec = job_spec(
            is_new=True,
            concurrency=concurrency,
            handler=handler,
            extract=extract,
            drop_bodies=drop_bodies,
            download=download,
            export=export,
            rate=rate,
            pace=pace,
            attempts=attempts,
            timeout=timeout,
            headers=header,
            gateway=gateway,
            insecure=insecure,
            http2=http2,
            patience=patience,
            no_breaker=no_breaker,
            name=name,
            on_invalid=on_invalid,
            option=option,
            options=options,
        )
        breaker = spec.get("breaker", {})
        if isinstance(breaker, dict) and breaker.get("enabled", True):
            # A user waits for this command: it does not wait an hour for a host that is down.
            spec["breaker"] = {"patience": _PATIENCE, **breaker}
        # An unfinished run does not expire. One whose list failed has ended, and may be resumed as long as a job is
        # kept.
        spec["retention_days"] = MAX_RETENTION_DAYS
        # As a server checks them, and before anything is opened, staged or started.
        check_limits(decode_spec(json.dumps(spec).encode()))
        read_ca_bundle(settings.ca_bundle)
        temporary = data is None and is_default(settings)
        if temporary:
            settings = Settings.load(data=default_data(path), **flags)
        check_data(settings.data)
        for function in (spec.get("handler"), spec.get("extract")):
            _check_handler(settings, function)
        plan = RunPlan(
            lists=lists,
            spec=spec,
            out=path,
            settings=settings,
            resume=resume,
            temporary=temporary,
            title=name or path.name,
            url_column=url_column,
            output=output,
            is_directory=is_directory,
            fetchers=fetchers,
        )
        raise typer.Exit(run_here(plan, as_json))


def _check_handler(settings: Settings, name: str | None) -> None:
    """Check that the function is registered, before anything runs. Raises BadInput."""
    from conveyor.handlers import default, load_app

    if name is None:
        return
    handlers = load_app(settings.app) if settings.app else default
    if handlers.find(name) is None:
        known = ", ".join(handlers.names()) or "none"
        where = f"in {settings.app}" if settings.app else "without --app"
        raise BadInput(f"Unknown handler {name!r}. Registered {where}: {known}.")
