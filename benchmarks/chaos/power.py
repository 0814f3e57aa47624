"""Simulated power cuts: after a cut, only synced data is certain to be on the disk.

A run is logged with all data that it writes. For a cut, its folder is created again with a content
that a disk may have:

- synced: a file has its content at its last sync, a folder has its names at its last sync;
- journal: folders also have the changes of names up to some later operation, in order, as a journal
   does; files have only their synced content, followed by nothing or zeros (ext4 without delayed
   flushing);
- scattered: like `synced`, with a random subset of the later writes and changes of names.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.chaos import operations as ops
from benchmarks.chaos.harness import Rig
from benchmarks.chaos.kills import killed
from benchmarks.chaos.processes import command, fork
from benchmarks.chaos.results import Trial
from rloo.trainer.checkpoint import find_checkpoint

FIGURE = "power cuts (200, on each of three disks): nothing that was committed is lost"
PROMISED = 200
DISKS = ("synced", "journal", "scattered")
# The runs that are cut: a new run; a run resumed after a kill; a run with a limit on checkpoints; a
# run that keeps the best checkpoint.
SESSIONS = (("full", 0), ("full", 120), ("keep one", 0), ("best", 0), ("lora", 0))


@dataclass
class File:
    """A file: its content, its content at the last sync, and the writes since then."""

    live: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    since: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        """Record a write."""
        self.since.append((offset, data))
        put(self.live, offset, data)

    def cut(self, size: int) -> None:
        """Record a truncation. If the file is shorter after a power cut, it stays shorter."""
        self.live[:] = self.live[:size].ljust(size, b"\0")
        self.since.append((size, b""))

    def sync(self, data: bytes) -> None:
        """Record that the complete content is on the disk."""
        self.live[:], self.synced, self.since = data, data, []


@dataclass
class Folder:
    """A folder: its names, its names at the last sync, and the changes since then (name -> new
    node, or None for a removed name)."""

    live: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    since: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, names: dict[str, Node | None]) -> None:
        """Record changes that happen atomically."""
        self.since.append(names)
        apply(self.live, names)

    def sync(self) -> None:
        """Record that all names are on the disk."""
        self.synced, self.since = dict(self.live), []


Node = File | Folder


def put(content: bytearray, offset: int, data: bytes) -> None:
    """Write data at an offset of a file's content. A gap is filled with zeros."""
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    """Set or remove names."""
    for name, node in change.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


class Disk:
    """The content of `folder` before a run, and after operations."""

    def __init__(self, folder: Path, before: Path | None) -> None:
        self._folder, self.root, self._inodes = folder, Folder(), dict[int, File]()
        if before is not None:
            self.root = read_folder(before)

    def replay(self, operations: Iterable[ops.Operation]) -> None:
        """Apply these operations."""
        for o in operations:
            if o.kind == ops.MARK:
                continue
            place = self._find(o.path)
            if o.kind in (ops.OPEN, ops.WRITE, ops.TRUNCATE, ops.SYNC):
                self._change_file(o, *place)
            elif o.kind == ops.SYNC_FOLDER:
                node = place[0].live[place[1]] if place[1] else place[0]
                assert isinstance(node, Folder), o.path
                node.sync()
            elif o.kind == ops.RENAME:
                self._rename(place, self._find(o.other))
            else:
                made = Folder() if o.kind == ops.MKDIR else None
                place[0].change({place[1]: made})

    def _find(self, path: str) -> tuple[Folder, str]:
        parts = Path(path).relative_to(self._folder).parts
        folder = self.root
        for name in parts[:-1]:
            inner = folder.live[name]
            assert isinstance(inner, Folder), path
            folder = inner
        return folder, parts[-1] if parts else ""

    def _change_file(self, o: ops.Operation, folder: Folder, name: str) -> None:
        if o.kind == ops.OPEN and o.flags & ops.CREATED:
            folder.change({name: File()})
        node = folder.live.get(name)
        if o.kind == ops.OPEN and isinstance(node, File):
            self._inodes[o.inode] = node
        # By inode, since the file may have been renamed or removed.
        file = self._inodes.get(o.inode, node)
        assert isinstance(file, File), o.path
        if o.kind == ops.OPEN and o.flags & ops.EMPTIED and file.live:
            file.cut(0)
        elif o.kind == ops.WRITE:
            file.write(o.offset, o.data)
        elif o.kind == ops.TRUNCATE:
            file.cut(o.offset)
        elif o.kind == ops.SYNC:
            file.sync(o.data)

    @staticmethod
    def _rename(old: tuple[Folder, str], new: tuple[Folder, str]) -> None:
        node = old[0].live[old[1]]
        if old[0] is new[0]:
            old[0].change({old[1]: None, new[1]: node})
        else:
            old[0].change({old[1]: None})
            new[0].change({new[1]: node})


def read_folder(path: Path) -> Folder:
    """The content of a folder on the disk, as synced."""
    folder = Folder()
    for item in path.iterdir():
        node: Node = read_folder(item) if item.is_dir() else File()
        if isinstance(node, File):
            node.sync(item.read_bytes())
        folder.live[item.name] = node
    folder.sync()
    return folder


def write_folder(folder: Folder, path: Path, disk: str, rng: random.Random) -> None:
    """Write a folder to `path` with the content that a kind of disk has after the cut (`live`:
    without a cut)."""
    path.mkdir(exist_ok=True)
    names = dict(folder.live if disk in ("journal", "live") else folder.synced)
    if disk == "scattered":
        for change in folder.since:
            if rng.random() < 0.5:
                apply(names, change)
    for name, node in names.items():
        if isinstance(node, Folder):
            write_folder(node, path / name, disk, rng)
        else:
            (path / name).write_bytes(content_of(node, disk, rng))


def content_of(file: File, disk: str, rng: random.Random) -> bytes:
    """The content of a file on a kind of disk after the cut."""
    if disk == "live":
        return bytes(file.live)
    content = bytearray(file.synced)
    if disk == "journal" and file.since and rng.random() < 0.5:
        content = content.ljust(len(file.live), b"\0")
    if disk == "scattered":
        for offset, data in file.since:
            if rng.random() < 0.5:
                put(content, offset, data) if data else content.__delitem__(slice(offset, None))
    return bytes(content)


@dataclass(frozen=True)
class Session:
    """The operations of a run in `folder`, and the content `before` the run."""

    folder: Path
    before: Path
    operations: list[ops.Operation]


def log(rig: Rig, config: str, killed_at: int) -> Session:
    """Log a run; if `killed_at` is given, the run that resumes after a kill at this operation.
    Checks that a replay of the log gives the content of the folder."""
    home = rig.home / "logs" / f"{config} {killed_at} {os.getpid()}"
    folder, before, file = home / "trial", home / "before", home / "log of operations"
    folder.mkdir(parents=True)
    if killed_at:
        killed(rig, config, folder, killed_at)
        (folder / "log").unlink()
    shutil.copytree(folder, before)

    def action() -> int:
        from rloo.trainer import checkpoint_writer

        library, save = rig.operations, checkpoint_writer.save_checkpoint

        def saved(directory, checkpoint, **options):
            path = save(directory, checkpoint, **options)
            library.chaos_mark(f"{checkpoint.step}".encode())
            return path

        checkpoint_writer.save_checkpoint = saved
        ops.arm(library, folder, ops.LOG, log=file)
        status = command(rig.arguments(config, folder), None)()
        library.chaos_arm(b"", None, ops.OFF, 0, 0)
        return status

    ended = fork(action, home / "log")
    if ended.status:
        raise RuntimeError(f"the logged run ended with {ended.status}: {ended.output[-400:]}")
    logged = Session(folder, before, list(ops.read_log(file)))
    disk = Disk(folder, before)
    disk.replay(logged.operations)
    write_folder(disk.root, home / "rebuilt", "live", random.Random(0))
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        rebuilt = home / "rebuilt" / path.relative_to(folder)
        # Writes through a memory map are recorded at the next sync.
        if path.read_bytes() != rebuilt.read_bytes():
            raise RuntimeError(f"the log of operations does not tell what is in {path.name}")
    return logged


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Cuts at the end of each session and at random operations, each for every kind of disk; or
    only `count` of these trials."""
    if rig.operations is None:
        return []
    rng = random.Random(seed)
    sessions: dict[tuple[str, int], Session] = {}
    found = []
    for number in range(PROMISED):
        what = SESSIONS[number % len(SESSIONS)]
        share = 1.0 if number < len(SESSIONS) else rng.random()
        for disk in DISKS:
            name = f"{seed}.{number} {what[0]} after {what[1]} at {share:.4f}, {disk}"
            found.append(Trial(name, what[0], partial(cut, rig, what, share, disk, sessions)))
    return found[:count]


def cut(
    rig: Rig,
    what: tuple[str, int],
    share: float,
    disk: str,
    sessions: dict[tuple[str, int], Session],
) -> str:
    """Simulate a cut after a share of a run's operations (1: after its end), and resume the run."""
    if what not in sessions:
        sessions[what] = log(rig, *what)
    session = sessions[what]
    at = round(share * len(session.operations))
    return _try(rig, what[0], session, at, disk)


def _try(rig: Rig, config: str, session: Session, at: int, disk: str) -> str:
    rng = random.Random(f"{at} {disk}")
    done = session.operations[:at]
    if disk == "journal":  # the journal may have later changes
        syncs = [i for i, o in enumerate(done) if o.kind in (ops.SYNC, ops.SYNC_FOLDER)]
        done = done[: rng.randint(syncs[-1] + 1 if syncs else 0, at)]
    state = Disk(session.folder, session.before)
    state.replay(done)
    with rig.folder() as folder:
        write_folder(state.root, folder, disk, rng)
        committed = [int(o.path) for o in session.operations[:at] if o.kind == ops.MARK]
        newest, damaged = find_checkpoint(folder / "run")
        found = int(newest.name.split("-")[1]) if newest else 0
        if committed and found < committed[-1]:
            return f"checkpoint {committed[-1]} was committed, {found} is found; {damaged}"
        return rig.goes_on(config, folder)
