"""The administrator key that `conveyor up` keeps in local.key for the other commands."""

from typing import TYPE_CHECKING

from conveyor.cli.connection import LOCAL_TENANT, local_key_file, read_line

if TYPE_CHECKING:
    from conveyor.system import System


async def ensure_local_key(system: "System") -> str:
    """Return the key in local.key. A missing, damaged or revoked one is replaced: the file may be empty or garbage
    after a power cut, and that must not keep a server from starting."""
    from conveyor.auth.durable_file import write_durably
    from conveyor.auth.keys import authenticate, make_key
    from conveyor.errors import InvalidKey

    path = local_key_file(system.settings.data)
    stored = read_line(path)
    if stored is not None:
        try:
            if (await authenticate(system.records.access, system.clock, stored)).admin:
                return stored
        except InvalidKey:
            pass
    text, key = make_key(system.clock, LOCAL_TENANT, "created by conveyor up", admin=True)
    # The file comes last: a key in it is always one that the server knows.
    await system.records.access.create_key(key)
    write_durably(path, text)
    return text
