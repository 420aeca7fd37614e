"""Many engines that are only their metrics, in one process: what `kvoncall bench collect` scrapes.

`python -m probe.bench.exporters` prints its port and serves until its standard input ends: /ENGINE/metrics is a page
of vLLM's size whose counters grow with every scrape; /ENGINE/queue/N sets its number of waiting requests.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections import Counter

from probe.dialects import load_dialect

BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 10.0)
PAGE_BYTES = 60_000
_QUEUE = "vllm:num_requests_waiting"


def template() -> list[tuple[str, bool]]:
    """Lines of a page up to their value, and whether the value grows; comments are (line, False)."""
    lines: list[tuple[str, bool]] = []
    for name, form in sorted(load_dialect("vllm").exposed_at().items()):
        base = name.removesuffix("_total") if form.type == "counter" else name
        lines += [(f"# HELP {base} A metric of the engine.", False), (f"# TYPE {base} {form.type}", False)]
        labels = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
        if form.type == "histogram":
            lines += [(f'{name}_bucket{{{labels},le="{bound}"}}', True) for bound in (*BUCKETS, "+Inf")]
            lines += [(f"{name}_sum{{{labels}}}", True), (f"{name}_count{{{labels}}}", True)]
        else:
            lines.append((f"{name}{{{labels}}}", form.type == "counter"))
    size, i = sum(len(line) + 8 for line, _ in lines), 0
    while size < PAGE_BYTES:  # what an engine exposes besides
        lines.append((f'other_requests_total{{handler="/v1/path/{i}",method="POST",status="2xx"}}', True))
        size, i = size + len(lines[-1][0]) + 8, i + 1
    return lines


class Exporters:
    """Serves pages; keeps how often each was read and its queue."""

    def __init__(self) -> None:
        self._template = template()
        self._scrapes: Counter[str] = Counter()
        self._queues: dict[str, int] = {}

    async def serve(self) -> None:
        """Serve on a free port of the loopback interface until stdin ends."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True).start()
        await ended.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                status, body = self._answer(head.split(b" ", 2)[1].decode())
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, path: str) -> tuple[str, bytes]:
        if match := re.fullmatch(r"/(\w+)/metrics", path):
            return "200 OK", self._page(match[1])
        if match := re.fullmatch(r"/(\w+)/queue/(\d+)", path):
            self._queues[match[1]] = int(match[2])
            return "200 OK", b""
        return "404 Not Found", b""

    def _page(self, name: str) -> bytes:
        self._scrapes[name] += 1
        grows, queue = self._scrapes[name] * 17.0, self._queues.get(name, 0)
        rows = []
        for line, counter in self._template:
            if line[0] == "#":
                rows.append(line)
            elif line.startswith(_QUEUE + "{"):
                rows.append(f"{line} {queue}")
            else:
                rows.append(f"{line} {grows if counter else 0.25}")
        return ("\n".join(rows) + "\n").encode()


if __name__ == "__main__":
    asyncio.run(Exporters().serve())
