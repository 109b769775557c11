"""Send a list in parts, straight to an object store, and complete the upload. For lists that are too large for one
request to the store."""

from typing import Any

from conveyor.client.lists import ListFile
from conveyor.client.transport import Transport, path_of
from conveyor.client.upload_file import BytesProgress, FileBody
from conveyor.errors import ConveyorError

# Links to ask for at once: they expire while earlier parts are sent.
_PARTS_PER_REQUEST = 20
_LINK_EXPIRED = 403


async def send_parts(transport: Transport, upload_id: str, list_file: ListFile, progress: BytesProgress | None) -> None:
    """Send all parts, one after another. An upload that an earlier call has completed is not sent again."""
    if (await transport.json("GET", path_of("uploads", upload_id)))["stored"]:
        return
    begun = await _links(transport, upload_id, {"numbers": []})
    multipart_id, part_bytes, count = begun["multipart_id"], begun["part_bytes"], begun["count"]

    async def ask(numbers: list[int]) -> list[dict[str, Any]]:
        links = await _links(transport, upload_id, {"multipart_id": multipart_id, "numbers": numbers})
        parts: list[dict[str, Any]] = links["parts"]
        return parts

    for first in range(1, count + 1, _PARTS_PER_REQUEST):
        for part in await ask(list(range(first, min(first + _PARTS_PER_REQUEST, count + 1)))):
            offset = (part["number"] - 1) * part_bytes
            body = FileBody(list_file.path, part["size"], _shifted(progress, offset, list_file.size), offset)
            try:
                await transport.put(part["method"], part["url"], part["headers"], body)
            except ConveyorError as error:
                if error.status != _LINK_EXPIRED:
                    raise
                (fresh,) = await ask([part["number"]])
                await transport.put(fresh["method"], fresh["url"], fresh["headers"], body)
    path = path_of("uploads", upload_id, "complete")
    await transport.json("POST", path, body={"multipart_id": multipart_id}, safe=True)


async def _links(transport: Transport, upload_id: str, body: dict[str, Any]) -> dict[str, Any]:
    # Safe to repeat: an upload in parts that is begun twice is completed once, and the other expires.
    return await transport.json("POST", path_of("uploads", upload_id, "parts"), body=body, safe=True)


def _shifted(progress: BytesProgress | None, offset: int, total: int) -> BytesProgress | None:
    if progress is None:
        return None
    return lambda sent, _: progress(offset + sent, total)
