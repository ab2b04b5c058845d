"""A link of a fixed rate before an S3 server: `storage_link.py --to PORT --listeners N --rate BYTES_PER_S --wait S`.

One port for each job, one token bucket for all; it prints the ports, and at each line of input the bytes and requests
of each port. What comes first after a request waits as long as a request over a wide network does.
"""

import argparse
import asyncio
import json
import os
import sys
import time

READ_BYTES = 1 << 16


class Link:
    """The rate that all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_s = bytes_per_s, 0.0
        self._turn = asyncio.Lock()

    async def pass_on(self, n_bytes: int) -> None:
        """Wait until so many bytes are through; a twentieth of a second may have been saved up."""
        async with self._turn:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - 0.05) + n_bytes / self._bytes_per_s
            if self._free_s > now_s:
                await asyncio.sleep(self._free_s - now_s)


async def serve(to: int, listeners: int, bytes_per_s: float, wait_s: float) -> None:
    link, upward = Link(bytes_per_s), Link(bytes_per_s)
    counted = [{"bytes": 0, "requests": 0} for _ in range(listeners)]

    def handler(number: int):
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", to)
            asked_s = [0.0]

            async def up() -> None:
                while data := await reader.read(READ_BYTES):
                    if data[:5] in (b"GET /", b"HEAD "):
                        asked_s[0] = time.monotonic()
                        counted[number]["requests"] += 1
                    await upward.pass_on(len(data))
                    behind_writer.write(data)
                    await behind_writer.drain()
                behind_writer.close()

            async def down() -> None:
                while data := await behind_reader.read(READ_BYTES):
                    if asked_s[0]:
                        left_s = asked_s[0] + wait_s - time.monotonic()
                        asked_s[0] = 0.0
                        if left_s > 0:
                            await asyncio.sleep(left_s)
                    await link.pass_on(len(data))
                    counted[number]["bytes"] += len(data)
                    writer.write(data)
                    await writer.drain()
                writer.close()

            await asyncio.gather(up(), down(), return_exceptions=True)

        return handle

    servers = [await asyncio.start_server(handler(number), "127.0.0.1", 0) for number in range(listeners)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps(counted), flush=True)
        for each in counted:
            each |= {"bytes": 0, "requests": 0}
    os._exit(0)  # connections that are open say nothing more


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option, kind in (("to", int), ("listeners", int), ("rate", float), ("wait", float)):
        parser.add_argument(f"--{option}", type=kind, required=True)
    given = parser.parse_args()
    asyncio.run(serve(given.to, given.listeners, given.rate, given.wait))
