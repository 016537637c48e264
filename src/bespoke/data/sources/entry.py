"""The facts about a data set: where it comes from, how its files are read, what must be in them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import Files
from bespoke.errors import UserError

Reader = Callable[[Files, "Entry"], Examples]
SLACK = 2**24  # bytes of a data set's files beside its rows: headers, names, lists
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
    most: int = 0  # rows at most, where the sizes are not known
    packed: int = 4  # bytes in the unpacked files for one byte of the rows, at most
    counts: tuple[int, ...] = ()  # rows of each class, train and test together; empty where not known
    owners: int | None = None  # number of its own clients; 0 where it is not known, None where there are none
    domains: tuple[str, ...] = ()
    dtype: str = "uint8"
    tokens: int = 0  # for texts: how many there are, numbered from 0
    held_out: bool = False  # it has official test rows, where the sizes are not known
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
    def most_rows(self) -> int:
        """Return how many rows there are at most; 0 where it is not known."""
        return max((train + test for train, test in self.sizes), default=self.most)

    @property
    def most_bytes(self) -> int:
        """Return how many bytes the unpacked files have at most."""
        row = max(math.prod(shape) for shape in self.shapes) * np.dtype(self.dtype).itemsize + 8  # and its label
        return self.packed * self.most_rows * row + SLACK

    def admit(self, rows: int, where: object) -> None:
        """Refuse more rows than the data set has, before they take up memory."""
        if 0 < self.most_rows < rows:
            raise UserError(f"{where} has more rows than the {self.most_rows} of {self.name}: it is another data set")

    @property
    def verified(self) -> bool:
        """Return whether the content can be checked against a hash computed from the real arrays."""
        return self.content_hash is not None
