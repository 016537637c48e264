"""The facts about a data set: where it comes from, how its files are read, what must be in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bespoke.data.examples import Examples

Reader = Callable[[Sequence[Path], "Entry"], Examples]
Builder = Callable[[Sequence[Examples]], Examples]


class File(NamedTuple):
    """An official file: its addresses, the best one first, and its MD5 where one is published."""

    name: str
    addresses: tuple[str, ...]
    md5: str | None = None
    shared: str = ""  # for a file with several sets: the name under which the download is kept


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue.

    ``content_hash`` and ``order_hash`` are those of :func:`bespoke.data.sources.content.hashes`, computed from the real
    arrays; a set without them is not verified, and the user has to trust its first import or download.
    """

    name: str
    doc: str  # one line
    licence: str
    page: str  # where it is described
    source: str  # where addresses, file hashes and sizes were taken from
    classes: int
    shapes: tuple[tuple[int, ...], ...]  # of one row; several where there are several editions
    sizes: tuple[tuple[int, int], ...] = ()  # (train rows, test rows) of each edition; empty where not known
    counts: tuple[int, ...] = ()  # rows of each class, train and test together; empty where not known
    owners: int | None = None  # number of its own clients; 0 where it is not known, None where there are none
    domains: tuple[str, ...] = ()
    dtype: str = "uint8"
    files: tuple[File, ...] = ()
    hint: str = ""  # how to get the files, where they cannot be downloaded
    read: Reader | None = None
    canonical: Callable[[Examples], Examples] | None = None  # puts rows in one order, whatever the source
    content_hash: str | None = None
    order_hash: str | None = None
    parts: tuple[str, ...] = ()  # the sets it is built from
    build: Builder | None = None  # from the parts
    stored: bool = True  # False: built from its parts at every load

    @property
    def verified(self) -> bool:
        """Return whether the content can be checked against a hash computed from the real arrays."""
        return self.content_hash is not None
