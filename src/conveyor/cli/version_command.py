"""`conveyor version`: print the version."""

from conveyor import __version__
from conveyor.cli.output import print_json
from conveyor.cli.shared_options import AsJson


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        print(f"conveyor {__version__}")
