"""What is known of a data set: where it comes from, how its files are read, what must be in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bespoke.data.examples import Examples

Reader = Callable[[Sequence[Path], "Entry"], Examples]
Builder = Callable[[Sequence[Examples]], Examples]


class File(NamedTuple):
    """An official file: its addresses, the best one first, and its MD5 where one was found published."""

    name: str
    addresses: tuple[str, ...]
    md5: str | None = None
    shared: str = ""  # several sets are in it: it is kept under this name once downloaded


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue.

    ``content_hash`` and ``order_hash`` are those of :func:`bespoke.data.sources.content.hashes`, computed from the real
    arrays; a set without them is not verified, and its first import or download has to be trusted by the user.
    """

    name: str
    doc: str  # one line
    licence: str
    page: str  # where it is described
    source: str  # where addresses, file hashes and sizes were taken from
    classes: int
    shapes: tuple[tuple[int, ...], ...]  # of a row; more than one where there are several editions
    sizes: tuple[tuple[int, int], ...] = ()  # (train rows, test rows) of each edition; empty where not known
    counts: tuple[int, ...] = ()  # rows of each class, train and test together; empty where not known
    owners: int | None = None  # clients of its own; 0 where the number is not known, None where it has none
    domains: tuple[str, ...] = ()
    dtype: str = "uint8"
    files: tuple[File, ...] = ()
    hint: str = ""  # how to come by the files, where no address can be downloaded from
    read: Reader | None = None
    canonical: Callable[[Examples], Examples] | None = None  # puts rows in one order, whatever the source
    content_hash: str | None = None
    order_hash: str | None = None
    parts: tuple[str, ...] = ()  # the sets it is made of
    build: Builder | None = None  # from the parts
    stored: bool = True  # False: made of its parts at every load

    @property
    def verified(self) -> bool:
        """Whether the content can be checked against a hash computed from the real arrays."""
        return self.content_hash is not None
