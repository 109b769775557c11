"""Bodies with content codings, right and wrong, as pages of a target site: /encoded/<name>."""

import asyncio
import gzip
import zlib
from typing import NamedTuple

import brotli

from tests.support.target_site import Seen, Site, noise, page
from tests.support.zstd_library import zstd

ONE = b"the first part, " * 100
TWO = b"and the second" * 100
# Does not compress, and is read in more than one piece.
LARGE = noise(700_000)


class EncodedPage(NamedTuple):
    """`codings` are the values of Content-Encoding, each a header. `body` is the decoded body, or None if the body is
    broken; `code` is then the error. `as_curl`: whether curl --compressed has the same body or also fails."""

    codings: tuple[str, ...]
    sent: bytes
    body: bytes | None
    code: str = "decode_failed"
    as_curl: bool = True


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def _nested(times: int) -> bytes:
    data = ONE
    for _ in range(times):
        data = gzip.compress(data)
    return data


SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
BAD_CHECKSUM = gzip.compress(ONE)[:-8] + bytes(4) + gzip.compress(ONE)[-4:]
TWO_MEMBERS = gzip.compress(ONE) + gzip.compress(TWO)

ENCODED = {
    "plain": EncodedPage((), ONE, ONE),
    "gzip": EncodedPage(("gzip",), gzip.compress(ONE), ONE),
    "gzip-large": EncodedPage(("gzip",), gzip.compress(LARGE), LARGE),
    "gzip-upper": EncodedPage(("GZip",), gzip.compress(ONE), ONE),
    "x-gzip": EncodedPage(("x-gzip",), gzip.compress(ONE), ONE),
    "gzip-empty": EncodedPage(("gzip",), b"", b""),
    "gzip-of-nothing": EncodedPage(("gzip",), gzip.compress(b""), b""),
    "gzip-that-is-zlib": EncodedPage(("gzip",), zlib.compress(ONE), ONE),
    # curl stops at the end of the first member, with an error.
    "two-members": EncodedPage(("gzip",), TWO_MEMBERS, ONE + TWO, as_curl=False),
    "many-members": EncodedPage(("gzip",), gzip.compress(b"x") * 5000, b"x" * 5000, as_curl=False),
    "two-large-members": EncodedPage(("gzip",), gzip.compress(LARGE) * 2, LARGE * 2, as_curl=False),
    "two-members-in-x-gzip": EncodedPage(("x-gzip",), TWO_MEMBERS, ONE + TWO, as_curl=False),
    "padded": EncodedPage(("gzip",), gzip.compress(ONE) + bytes(512), ONE, as_curl=False),
    "padded-members": EncodedPage(("gzip",), gzip.compress(ONE) + bytes(9) + gzip.compress(TWO), ONE + TWO, "", False),
    "junk-after-gzip": EncodedPage(("gzip",), gzip.compress(ONE) + b"junk", None),
    "second-member-cut": EncodedPage(("gzip",), TWO_MEMBERS[:-9], None),
    "second-member-broken": EncodedPage(("gzip",), gzip.compress(TWO) + BAD_CHECKSUM, None),
    "bad-checksum": EncodedPage(("gzip",), BAD_CHECKSUM, None),
    "not-gzip": EncodedPage(("gzip",), ONE, None),
    # curl takes these for complete.
    "gzip-cut": EncodedPage(("gzip",), gzip.compress(ONE)[:-20], None, "read_failed", as_curl=False),
    "gzip-without-checksum": EncodedPage(("gzip",), gzip.compress(ONE)[:-8], None, "read_failed", as_curl=False),
    "deflate": EncodedPage(("deflate",), zlib.compress(ONE), ONE),
    "raw-deflate": EncodedPage(("deflate",), raw_deflate(ONE), ONE),
    "raw-deflate-large": EncodedPage(("deflate",), raw_deflate(LARGE), LARGE),
    "raw-deflate-with-checksum": EncodedPage(("deflate",), raw_deflate(ONE) + b"\x01\x02\x03\x04", ONE),
    "junk-after-deflate": EncodedPage(("deflate",), zlib.compress(ONE) + b"junk", None),
    "not-deflate": EncodedPage(("deflate",), gzip.compress(ONE), None),
    "br": EncodedPage(("br",), brotli.compress(ONE), ONE),
    "br-large": EncodedPage(("br",), brotli.compress(LARGE), LARGE),
    "junk-after-br": EncodedPage(("br",), brotli.compress(ONE) + b"junk", None),
    "br-cut": EncodedPage(("br",), brotli.compress(ONE)[:-3], None, "read_failed", as_curl=False),
    "zstd": EncodedPage(("zstd",), zstd.compress(ONE), ONE),
    "zstd-large": EncodedPage(("zstd",), zstd.compress(LARGE), LARGE),
    "two-frames": EncodedPage(("zstd",), zstd.compress(ONE) + SKIPPABLE + zstd.compress(TWO), ONE + TWO),
    "junk-after-zstd": EncodedPage(("zstd",), zstd.compress(ONE) + b"junkjunk", None),
    "zstd-cut": EncodedPage(("zstd",), zstd.compress(ONE)[:-3], None, "read_failed", as_curl=False),
    "stacked": EncodedPage(("deflate, gzip",), gzip.compress(zlib.compress(ONE)), ONE),
    "stacked-four": EncodedPage(
        ("br, zstd, deflate , GZIP",),
        gzip.compress(zlib.compress(zstd.compress(brotli.compress(LARGE)))),
        LARGE,
    ),
    "two-headers": EncodedPage(("deflate", "gzip"), gzip.compress(zlib.compress(ONE)), ONE),
    "gzip-twice": EncodedPage(("gzip, gzip",), _nested(2), ONE),
    "stacked-members": EncodedPage(("gzip, br",), brotli.compress(TWO_MEMBERS), ONE + TWO, as_curl=False),
    "five-codings": EncodedPage((", ".join(["gzip"] * 5),), _nested(5), ONE),
    "six-codings": EncodedPage((", ".join(["gzip"] * 6),), _nested(6), None),
    "identity": EncodedPage(("identity",), ONE, ONE),
    "identity-gzip": EncodedPage(("identity, gzip,",), gzip.compress(ONE), ONE),
    "no-name": EncodedPage(("",), ONE, ONE),
    "unknown": EncodedPage(("utf-8",), ONE, None),
    "unknown-below-gzip": EncodedPage(("compress, gzip",), gzip.compress(ONE), None),
    "unknown-empty": EncodedPage(("utf-8",), b"", b""),
}


@page("encoded")
async def encoded(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """With ?chunk=N, in chunks of that many bytes."""
    given = ENCODED[seen.path.split("/")[2]]
    fields = "".join(f"Content-Encoding: {coding}\r\n" for coding in given.codings)
    size = int(seen.query("chunk", "0"))
    if not size:
        writer.write(f"HTTP/1.1 200 OK\r\n{fields}Content-Length: {len(given.sent)}\r\n\r\n".encode() + given.sent)
        return
    writer.write(f"HTTP/1.1 200 OK\r\n{fields}Transfer-Encoding: chunked\r\n\r\n".encode())
    for start in range(0, len(given.sent), size):
        piece = given.sent[start : start + size]
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


@page("encoded-cut")
async def encoded_cut(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """A file that could be resumed by range if it were not encoded. The first response is cut."""
    sent = gzip.compress(LARGE)
    fields = f'Content-Encoding: gzip\r\nETag: "one"\r\nAccept-Ranges: bytes\r\nContent-Length: {len(sent)}\r\n'
    is_cut = site.visits[seen.path] == 1
    writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n".encode() + (sent[: len(sent) // 2] if is_cut else sent))
    await writer.drain()
    if is_cut:
        writer.close()
