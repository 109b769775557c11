"""Requests made from the OpenAPI document, valid and invalid, sent to a real server: `make fuzz`, or
`python -m tests.fuzz --examples 100`.

Schemathesis makes the requests and compares each response with the document: status, media type, schema, `Allow`, what
must be refused and what must not. Ends with 1 if it found anything; `--seed` repeats a run.
"""

import argparse
import asyncio
import logging
import os
import random
import sys
from pathlib import Path
from typing import NamedTuple

import structlog

from tests.support.api import new_server
from tests.support.owned import make_owned

_CONFIG = Path(__file__).with_suffix(".toml")
# They stay open as long as their jobs run.
_ENDLESS = "/stream$"


class Fuzzed(NamedTuple):
    """How a run ended, and what it printed."""

    found: bool
    output: str


async def fuzz(examples: int, seed: int, phases: str, *, quiet: bool = True) -> Fuzzed:
    """Send requests to a server with data of its own."""
    async with new_server(failed_keys_per_minute=1_000_000) as api:
        # Ids in the listings of this tenant are used in later requests.
        admin = await api.as_tenant("acme", admin=True)
        await make_owned(admin, "acme")
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(_CONFIG), "run"]
        command += [f"{api.url}/v1/openapi.json", "--header", f"Authorization: Bearer {admin.key}"]
        command += ["--checks", "all", "--phases", phases, "--max-examples", str(examples), "--seed", str(seed)]
        command += ["--exclude-path-regex", _ENDLESS, "--continue-on-failure", "--no-color", "--warnings", "off"]
        output = asyncio.subprocess.PIPE if quiet else None
        # The requests go to loopback, whatever proxies this machine has.
        env = {**os.environ, "NO_PROXY": "*", "HYPOTHESIS_STORAGE_DIRECTORY": str(api.system.settings.data / "fuzz")}
        process = await asyncio.create_subprocess_exec(
            *command, env=env, cwd=api.system.settings.data, stdout=output, stderr=output and asyncio.subprocess.STDOUT
        )
        printed, _ = await process.communicate()
        return Fuzzed(process.returncode != 0, (printed or b"").decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="for each route")
    parser.add_argument("--seed", type=int, default=None, help="without it, a random one")
    chosen = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seed = random.SystemRandom().randrange(1 << 30) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    phases = "examples,coverage,fuzzing,stateful"
    sys.exit(1 if asyncio.run(fuzz(chosen.examples, seed, phases, quiet=False)).found else 0)


if __name__ == "__main__":
    main()
