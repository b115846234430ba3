"""The whole lines of a file that grows, read and hashed once: a pass over a long record costs what is new in it.

A file that was rewritten (the run went back to a checkpoint) is told by the bytes before the place up to which it has
been read; where they are the same, everything before them is: lines hold the time at which they were written.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

TAIL = 4096  # bytes compared before the place


class GrowingFile:
    """What is known of one file: `size` bytes of whole lines, their SHA-256, and the last of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.size, self._hash, self._tail = 0, hashlib.sha256(), b""
        self._marks: dict[int, str] = {}

    def read(self) -> None:
        """Take in what has been added, up to the last newline; all of it where the file is another than before."""
        try:
            with open(self.path, "rb") as file:
                start = self.size - len(self._tail)
                file.seek(start)
                if file.read(len(self._tail)) != self._tail:
                    self._forget()
                    file.seek(0)
                data = file.read()
        except FileNotFoundError:
            self._forget()
            return
        data = data[: data.rfind(b"\n") + 1]
        self._hash.update(data)
        self.size += len(data)
        self._tail = (self._tail + data)[-TAIL:]

    def digest(self) -> str:
        """SHA-256 of the `size` bytes, in hexadecimal."""
        return self._hash.hexdigest()

    def starts_with(self, size: int, digest: str) -> bool:
        """Are the first `size` bytes those of this digest? Known at once for the place where the last pass ended."""
        if size > self.size:
            return False
        if size == self.size:
            return digest == self.digest()
        if self._marks.get(size) == digest:
            return True
        return hashlib.sha256(self.bytes(0, size)).hexdigest() == digest

    def mark(self) -> None:
        """Remember this place: the next pass asks about it."""
        self._marks = {self.size: self.digest()}

    def bytes(self, start: int, end: int | None = None) -> bytes:
        """The bytes from `start` to `end` (`size` when not given)."""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read((self.size if end is None else end) - start)


_FILES: dict[Path, GrowingFile] = {}


def growing(path: Path) -> GrowingFile:
    """This process's view of a file, brought up to date."""
    file = _FILES.setdefault(path.absolute(), GrowingFile(path.absolute()))
    file.read()
    return file
