"""Groups of clients: by their part in training, and by the condition that the data name for them.

A group is `all`, `train`, `unseen` or `new`, or one of these and a condition: `train:noise`, `new:contrast:5`. The
condition is a client's own text ("contrast:5", "noise of variance 0.1") or its kind, which has no level ("noise").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache

from bespoke.errors import UserError

GROUPS = {"all": ("train", "unseen"), "train": ("train",), "unseen": ("unseen",), "new": ("new",)}
PEOPLE = {
    "all": "all clients of the training population",
    "train": "clients that took part in training",
    "unseen": "clients of the training population that never took part",
    "new": "new clients, held out from training",
}
_LEVEL = re.compile(r"((:| of variance | by )[-+.,\de ]*\d)+$")


@cache
def kind(condition: str) -> str:
    """Return a condition without its level: "contrast" of "contrast:3", "noise" of "noise of variance 0.1"."""
    return _LEVEL.sub("", condition)


def parse(group: str) -> tuple[str, str]:
    """Return a group's part in training (a key of `GROUPS`) and its condition, "" if it has none."""
    name, colon, condition = group.partition(":")
    if name not in GROUPS or bool(colon) != bool(condition):
        raise UserError(f"there is no group {group!r}; use one of {', '.join(GROUPS)}, or GROUP:CONDITION")
    return name, condition


def people(group: str) -> str:
    """Return in words whom a group holds."""
    name, condition = parse(group)
    return PEOPLE[name] + (f", condition {condition}" if condition else "")


def require(condition: str, known: Collection[str], where: str = "the record") -> None:
    """Refuse a condition that is neither one of the known ones nor the kind of one; the sentence names the kinds."""
    if not known:
        raise UserError(f"there is no condition {condition!r}: {where} names no conditions of clients")
    kinds = list(dict.fromkeys(map(kind, known)))
    if condition not in known and condition not in kinds:
        raise UserError(f"there is no condition {condition!r} in {where}; use one of {', '.join(kinds)}")


def members(
    group: str, groups: Sequence[str], conditions: Sequence[str] | None, where: str = "the record"
) -> list[bool]:
    """Return which of M clients belong to a group, [M].

    `groups` is what the records say of each client (train, unseen or new), `conditions` each one's condition, None if
    the data name none; `where` says in an error whose conditions they are.
    """
    name, condition = parse(group)
    own = [recorded in GROUPS[name] for recorded in groups]
    if not condition:
        return own
    require(condition, dict.fromkeys(conditions or ()), where)
    return [is_there and condition in (c, kind(c)) for is_there, c in zip(own, conditions or (), strict=True)]
