"""Groups of clients by name: their part in training, and their condition."""

import pytest

from bespoke.errors import UserError
from bespoke.report.groups import kind, members, parse, people

GROUPS = ["train", "unseen", "train", "new", "new", "train"]
CONDITIONS = ["contrast:3", "contrast:3", "noise of variance 0.005", "contrast:5", "noise of variance 0.1", "clean"]


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("clean", "clean"),
        ("frost-like:2", "frost-like"),
        ("noise of variance 0.3", "noise"),
        ("noise of variance 1e-05", "noise"),
        ("jitter by 0.5, 1.17, 1.5, -0.5", "jitter"),
        ("mnist_m", "mnist_m"),  # a domain's name stays whole
        ("house by the river", "house by the river"),
        ("hall of mirrors", "hall of mirrors"),
        ("room:1:2", "room"),
    ],
)
def test_a_kind_is_a_condition_without_its_level(condition, found):
    assert kind(condition) == found == kind(found)


def test_a_group_is_a_part_in_training_and_perhaps_a_condition():
    assert parse("all") == ("all", "") and parse("new:contrast:5") == ("new", "contrast:5")
    assert people("train:noise") == "clients that took part in training, condition noise"
    for wrong in ("old", "old:noise", "train:", ":noise", "", "noise"):
        with pytest.raises(UserError, match=f"no group '{wrong}'; use one of all, train, unseen, new, or GROUP:COND"):
            parse(wrong)


@pytest.mark.parametrize(
    ("group", "places"),
    [
        ("all", [0, 1, 2, 5]),
        ("new", [3, 4]),
        ("all:contrast", [0, 1]),
        ("train:contrast", [0]),
        ("new:contrast", [3]),
        ("all:contrast:3", [0, 1]),
        ("new:contrast:3", []),  # known, but nobody's
        ("all:noise of variance 0.005", [2]),
        ("new:noise", [4]),
        ("train:clean", [5]),
    ],
)
def test_members_by_hand(group, places):
    assert [i for i, own in enumerate(members(group, GROUPS, CONDITIONS)) if own] == places


def test_an_unknown_condition_is_named_with_the_known_ones():
    with pytest.raises(UserError, match=r"^there is no condition 'fog' in runs/a; use one of contrast, noise, clean$"):
        members("train:fog", GROUPS, CONDITIONS, "runs/a")
    for nothing in (None, []):
        with pytest.raises(
            UserError, match=r"^there is no condition 'fog': the record names no conditions of clients$"
        ):
            members("train:fog", [], nothing)
    assert members("train", GROUPS, None) == [g == "train" for g in GROUPS]
