"""Checks that no object of a JSON text has a field twice.

Decoders take the last one, and other readers of the same text, such as a proxy that inspects requests, the first one.
"""

import re

import msgspec

from conveyor.errors import BodyTooLarge, DuplicateField

# Strings before commas, which are values: a list has many. Or a string, with the colon if it is the name of a field; or
# the beginning or end of an object. Names belong to the innermost open object, so arrays do not matter.
_TEXT = rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"\s*+'
_VALUES = rb"(?:" + _TEXT.replace(b"([", b"(?:[") + rb",\s*+)++"
_TOKEN = re.compile(_VALUES + rb"|" + _TEXT + rb"(:)?|([{}])", re.DOTALL)
# More would keep a processor busy for seconds.
MAX_OBJECTS = 2_000_000
_SHOWN = 100


def check_unique_fields(text: bytes | bytearray) -> None:
    """Raise DuplicateField if an object of this valid JSON text has a field twice."""
    open_objects: list[set[bytes]] = []
    count = 0
    for token in _TOKEN.finditer(text):
        name, colon, brace = token.groups()
        if colon:
            if b"\\" in name:
                name = msgspec.json.decode(b'"%b"' % name, type=str).encode(errors="surrogatepass")
            fields = open_objects[-1]
            if name in fields:
                shown = bytes(name).decode(errors="replace")[:_SHOWN]
                raise DuplicateField(
                    f"The body has the field `{shown}` twice in one object. Send it once.", field=shown
                )
            fields.add(bytes(name))
        elif brace == b"{":
            open_objects.append(set())
            count += 1
            if count > MAX_OBJECTS:
                raise BodyTooLarge(f"The body has more than {MAX_OBJECTS} objects. Split it, or upload the list.")
        elif brace:
            open_objects.pop()
