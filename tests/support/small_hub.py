"""A hub of one dataset on this machine, and what a run sees of it; prints JSON.

A process of its own: the libraries read the hub's address when they are imported.

python small_hub.py FOLDER
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OLD, NEW = "a" * 40, "b" * 40
HEADS = {"main": OLD}
FILES = {
    commit: "".join(json.dumps({"text": f"{word} {row}"}) + "\n" for row in range(90)).encode()
    for commit, word in ((OLD, "old"), (NEW, "new"))
}
NAME = "train.jsonl"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as `datasets` asks for: commits, one folder, and one file, in parts too."""

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api").removeprefix("/datasets/org/name")
        what, _, rest = path.strip("/").partition("/")
        name, _, file = rest.partition("/")
        commit = HEADS.get(name or "main", name)
        if commit not in FILES or what not in ("", "revision", "tree", "resolve"):
            self._send(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        elif what == "resolve":
            self._send_file(commit, file)
        elif what == "tree":
            entry = {"type": "file", "path": NAME, "size": len(FILES[commit]), "oid": commit}
            self._send(json.dumps([] if file else [entry]).encode())
        else:
            info = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": NAME}], "tags": []}
            self._send(json.dumps(info).encode())

    def _send_file(self, commit: str, file: str) -> None:
        headers = {"x-repo-commit": commit, "ETag": f'"{commit}"', "accept-ranges": "bytes"}
        if file != NAME:
            self._send(b"", 404, {**headers, "X-Error-Code": "EntryNotFound"})
        elif found := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("range") or ""):
            self._send(FILES[commit][int(found[1]) : int(found[2]) + 1], 206, headers)
        else:
            self._send(FILES[commit], 200, headers)

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def main(folder: Path) -> dict[str, Any]:
    """Rows of the whole dataset; tokens of a stream that goes on after the branch moved, and of one that does not."""
    from megatier.config.data_section import DataConfig
    from megatier.data.text import read_documents
    from megatier.data.text_stream import TextStream
    from megatier.data.tokenizer import byte_tokenizer

    def batches(run: str, steps: range, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
        settings: dict[str, Any] = {"sequence_length": 32, "holdout_rows": 5, "window_rows": 10, "tokenizer": "bytes"}
        config = DataConfig(dataset="org/name", streaming=True, **settings)
        with TextStream(config, byte_tokenizer(), folder / run, state) as stream:
            found = [stream.batch(step, 2)["input_ids"].tolist() for step in steps]
            return found, json.loads(json.dumps(stream.state))

    whole = list(read_documents(DataConfig(dataset="org/name")))
    unbroken, _ = batches("unbroken", range(6))
    first, state = batches("broken", range(3))
    HEADS["main"] = NEW
    second, after = batches("broken", range(3, 6), state)
    _, new = batches("new", range(1))
    return {
        "rows": [len(whole), whole[0], whole[-1]],
        "is_same": [*first, *second] == unbroken,
        "commits": [state["commit"], after["commit"], new["commit"]],
    }


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": sys.argv[1], "NO_PROXY": "*"}
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
