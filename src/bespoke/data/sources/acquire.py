"""Getting a data set from files, by download, or from other sets; checking it, then storing it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources import store
from bespoke.data.sources.archives import Allowance, Files, names_of, plausible
from bespoke.data.sources.content import Hashes, hashes
from bespoke.data.sources.download import Progress, download, set_aside
from bespoke.data.sources.entry import Entry
from bespoke.data.sources.formats import read_npz
from bespoke.errors import UserError

Tell = Callable[[str], None]


class NotYetTrusted(UserError):
    """The files look right, but the user has to say that they are trusted."""


def check(entry: Entry, examples: Examples, where: str) -> None:
    """Refuse rows that are not those of the data set, by shape, classes, rows, own clients and domains."""
    name, y = entry.name, examples.y
    for text in (*examples.owner_names, *examples.domain_names):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{where} has the name {text!r}, which is no proper text: get it again")
    if not len(y):
        raise UserError(f"{where} holds no rows: it is not {name}")
    if examples.x.shape[1:] not in entry.shapes or examples.x.dtype != entry.dtype:
        wanted = " or ".join(str(shape) for shape in entry.shapes)
        raise UserError(
            f"{name} has rows of {entry.dtype} in shape {wanted}, {where} has {examples.x.dtype} in shape "
            f"{examples.x.shape[1:]}: it is another data set"
        )
    if y.min() < 0 or y.max() >= entry.classes:
        raise UserError(
            f"{name} has the labels 0..{entry.classes - 1}, {where} has {y.min()}..{y.max()}: it is another data set"
        )
    held = 0 if examples.official_test is None else int(examples.official_test.sum())
    if entry.sizes and (len(y) - held, held) not in entry.sizes:
        wanted = " or ".join(f"{train} + {test}" for train, test in entry.sizes)
        raise UserError(
            f"{name} has {wanted} rows for training and test, {where} has {len(y) - held} + {held}: "
            "it is incomplete or another data set"
        )
    counts = np.bincount(y, minlength=entry.classes)
    if entry.counts and tuple(counts.tolist()) != entry.counts:
        worst = int(np.argmax(counts != np.array(entry.counts)))
        raise UserError(
            f"{name} has {entry.counts[worst]} rows with the label {worst}, {where} has {counts[worst]}: "
            "it is another data set"
        )
    own = len(examples.owner_names) if examples.owner is not None else None
    if (own is None) != (entry.owners is None) or (entry.owners and own != entry.owners):
        wanted = "no clients of its own" if entry.owners is None else f"{entry.owners or 'some'} clients of its own"
        raise UserError(f"{name} has {wanted}, {where} has {own or 'none'}: give the files of {name}")
    if examples.domain_names != entry.domains:
        raise UserError(f"{name} has the domains {entry.domains}, {where} has {examples.domain_names or 'none'}")


class Examined(NamedTuple):
    """Rows that have been checked and may be stored."""

    examples: Examples
    found: Hashes
    verified: bool
    official_order: bool


def examine(entry: Entry, paths: Sequence[Path], command: str, trust: str | None = None) -> Examined:
    """Read and check the files; ``command`` is the command to repeat with ``--trust``."""
    examples, where = read(entry, paths), names_of(paths)
    check(entry, examples, where)
    found = hashes(examples)
    verified = found.content == entry.content_hash
    if trust is not None and trust.lower() != found.content:
        raise UserError(f"the content of {where} has the hash {found.content}, not the trusted {trust}: it is not used")
    if not verified and trust is None:
        if entry.content_hash is not None:
            raise UserError(
                f"the content of {where} has the hash {found.content}, but that of {entry.name} is "
                f"{entry.content_hash}: it is not used; get the official files"
            )
        raise NotYetTrusted(
            f"no hash of {entry.name} is known to check {where} against; its content has the hash {found.content}: "
            f"if you trust the source, run {command} --trust {found.content}"
        )
    ordered = entry.order_hash is None or found.order == entry.order_hash
    return Examined(examples, found, verified, ordered)


def read(entry: Entry, paths: Sequence[Path]) -> Examples:
    """Return all rows of a data set's files, ready .npz arrays or the official files, in the canonical order."""
    files = Files(paths, Allowance(_allowed(entry, paths)))
    ready = [path.suffix == ".npz" for path in paths]
    if all(ready):
        examples = read_npz(files, entry)
    elif any(ready) or entry.read is None:
        raise UserError(f"{files}: give {entry.name} either as .npz files or as the official files")
    else:
        examples = entry.read(files, entry)
    return entry.canonical(examples) if entry.canonical is not None else examples


def _allowed(entry: Entry, paths: Sequence[Path]) -> int:
    """Return how many bytes the files may unpack to: what the set's files have, and no more than true data could."""
    return min(entry.most_bytes, plausible(paths))


def import_files(entry: Entry, paths: Sequence[Path], trust: str | None = None, tell: Tell = print) -> store.Manifest:
    """Read, check and store the user's files; the files themselves stay as they are."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"there is no file {path}: check the path")
    with store.locked(entry.name, _patience(entry, tell)):
        if store.holds(entry.name):
            tell(f"{entry.name} is already here; remove {store.folder(entry.name)} to import it again")
            return store.manifest(entry.name)
        command = f"bespoke data import {entry.name} {' '.join(str(path) for path in paths)}"
        return _keep(entry, examine(entry, paths, command, trust), names_of(paths))


def _keep(entry: Entry, rows: Examined, source: str) -> store.Manifest:
    return store.write(entry.name, rows.examples, rows.found, source, rows.verified, rows.official_order)


def _patience(entry: Entry, tell: Tell) -> Callable[[], None]:
    return lambda: tell(f"waiting for another process that is storing {entry.name}")


def fetch(
    entry: Entry, trust: str | None = None, tell: Tell = print, progress: Progress | None = None
) -> store.Manifest:
    """Download, read, check and store the official files.

    ``progress`` returns a progress bar with pooch's interface for a file's name. A file or content with a wrong hash
    is renamed ``.rejected`` and never used; correct downloads are kept until the data set is stored.
    """
    if not entry.files:
        raise UserError(
            f"{entry.name} cannot be downloaded: {entry.hint or f'see {entry.page}'}, then run "
            f"bespoke data import {entry.name} FILE"
        )
    with store.locked(entry.name, _patience(entry, tell)):
        if store.holds(entry.name):
            tell(f"{entry.name} is already here")
            return store.manifest(entry.name)
        paths = [download(entry, file, progress) for file in entry.files]
        try:
            rows = examine(entry, paths, f"bespoke data fetch {entry.name}", trust)
        except NotYetTrusted:
            raise
        except UserError as error:
            for path in paths:
                set_aside(path)
            raise UserError(f"{error} (kept as {paths[0]}.rejected)") from None
        done = _keep(entry, rows, ", ".join(file.addresses[0] for file in entry.files))
        for file, path in zip(entry.files, paths, strict=True):
            if not file.shared:
                path.unlink()
        return done


def make(entry: Entry, load: Callable[[str], Examples], tell: Tell = lambda text: None) -> store.Manifest:
    """Build a set from its parts, which are here, and store it."""
    build = entry.build
    assert build is not None
    with store.locked(entry.name, _patience(entry, tell)):
        if store.holds(entry.name):
            return store.manifest(entry.name)
        parts = ", ".join(entry.parts)
        examples = build([load(part) for part in entry.parts])
        check(entry, examples, parts)
        known = all(store.manifest(part)["verified"] for part in entry.parts)
        return store.write(entry.name, examples, hashes(examples), f"made of {parts}", known, True)
