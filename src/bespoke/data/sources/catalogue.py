"""Every data set that can be fetched or imported, by name, and how to get its rows."""

from bespoke.data.examples import Examples
from bespoke.data.sources import acquire, store
from bespoke.data.sources.catalogue_images import IMAGES
from bespoke.data.sources.catalogue_others import MADE, PEOPLE
from bespoke.data.sources.entry import Entry
from bespoke.errors import UserError
from bespoke.registry import closest

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in (*IMAGES, *PEOPLE, *MADE)}


def find(name: str) -> Entry:
    """Return the entry of a name, or suggest the nearest name in an error."""
    if name not in CATALOGUE:
        near = closest(name, CATALOGUE)
        raise UserError(f"there is no data set {name!r} to fetch or import{near}; there are {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def missing(name: str) -> list[str]:
    """Return the sets that have to be fetched or imported before the named one can be used."""
    entry = find(name)
    if store.holds(name):
        return []
    return [absent for part in entry.parts for absent in missing(part)] if entry.parts else [name]


def load(name: str) -> Examples:
    """Return the rows of a stored data set, memory-mapped; a union of stored sets is built once and stored."""
    entry = find(name)
    absent = missing(name)
    if absent:
        what = f"the data set {name} is not here" if absent == [name] else f"{name} needs {', '.join(absent)}, not here"
        there = all(CATALOGUE[part].files for part in absent)
        ways = [f"bespoke data fetch {name}"] * there + [f"bespoke data import {absent[0]} FILE"]
        raise UserError(f"{what}: run {' or '.join(ways)}")
    if entry.build is None:
        return store.load(name)
    if not entry.stored:
        return entry.build([load(part) for part in entry.parts])
    if not store.holds(name):
        acquire.make(entry, load)
    return store.load(name)
