"""`conveyor version`."""

from conveyor import __version__
from conveyor.cli.output import print_json
from conveyor.cli.shared_options import AsJson


def version(as_json: AsJson = False) -> None:
    """Show which Conveyor this is."""
    if as_json:
        print_json({"version": __version__})
    else:
        print(f"conveyor {__version__}")
