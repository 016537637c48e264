"""Uploads that are wrong in every way are refused, one by one: no crash, none accepted, and no memory for them."""

import functools
import json
import resource
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import toy
from fuzz_profile import hostile
from hypothesis import given
from hypothesis import strategies as st
from network_runs import TRAINING, Network, federation, terms

from bespoke.network.messages import Leaf, Message
from bespoke.runs.bounds import Bound

EVERYONE, BAD = [0, 1, 2], 2
ROOM = 2**18  # KiB that all cases together may take beside what the tests have
METHOD = "pfedvmp"  # it sends weights, means, counts and packed matrices
FOLDER = tempfile.TemporaryDirectory()  # until the end of the process


class Replies:
    """A link that answers with replies made before, after a change of one client's."""

    def __init__(self, keys, replies):
        self.keys, self.replies, self.change, self.waiting = keys, replies, None, []

    def online(self):
        return set(self.keys)

    def push(self, messages):
        for key, message in messages.items():
            client, id = self.keys.index(key), json.loads(message.head)["id"]
            head, leaves = json.loads(self.replies[client].head) | {"id": id}, list(self.replies[client].leaves)
            if client == BAD and self.change:
                head, leaves = self.change(head, leaves)
            self.waiting.append((key, Message(head if isinstance(head, str) else json.dumps(head), leaves)))

    def pull(self):
        came, self.waiting = self.waiting, []
        return came


@functools.cache
def second_round():
    """A federation after its first round, its server and bound then, the replies to the second, and its outcome."""
    network = Network(terms(METHOD, replace(TRAINING, rate=1.0)), Path(FOLDER.name))
    clients = network.clients()
    over = federation(network.terms, clients)
    first, known = next(over.rounds()), {}
    members, bound = [replace(member) for member in clients.store.members], dict(over.bound.recent)
    network.wire.change = lambda request, reply: known.update({request["client"]: reply}) or reply
    next(over.rounds(first.server, 2))
    clients.roster.link = Replies(network.keys, known)
    outcomes = {}
    for who in (EVERYONE, [0, 1]):
        reset(over, members, bound)
        outcomes[tuple(who)] = next(over.rounds(first.server, 2, lambda number, who=who: who))
    assert outcomes[0, 1, 2].uploads.clients.tolist() == EVERYONE
    return over, first.server, members, bound, outcomes[0, 1].server, known[BAD]


def reset(over, members, bound):
    over.clients.store.members[:] = [replace(member) for member in members]
    over.bound = Bound(over.bound.factor, over.bound.unbounded)
    over.bound.recent = dict(bound)


def outcome(change):
    """The second round with a change of one client's reply."""
    over, server, members, bound, _, _ = second_round()
    reset(over, members, bound)
    over.clients.roster.link.change = change
    return next(over.rounds(server, 2, lambda number: EVERYONE))


@functools.cache
def names():
    """The arrays of a reply."""
    return [name for name, _ in second_round()[5].leaves]


words = st.text(max_size=12)
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([2**53, -1, 10**400, 1e308]))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
no_pair = anything.filter(lambda value: not isinstance(value, list) or len(value) != 2)
fractions = st.floats(0, 1, exclude_max=True)
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 15, 2**31, 2**40, 2**62]), max_size=5).map(tuple)


def replaced(leaves, name, content):
    return [(each, content if each == name else old) for each, old in leaves]


def header_of(content):
    return content[: 10 + int.from_bytes(content[8:10], "little")]


def values(name, change):
    """A change of an array's numbers."""

    def changed(head, leaves):
        content = dict(leaves)[name]
        header = header_of(content)
        array = np.frombuffer(content, "<f8", offset=len(header)).copy()
        change(array)
        return head, replaced(leaves, name, header + array.tobytes())

    return changed


@st.composite
def of_names(draw):
    """Arrays that are missing, unknown, or there twice."""
    kind, name = draw(st.sampled_from(["drop", "rename", "add", "twice", "all"])), draw(st.sampled_from(names()))
    other, place = draw(words.filter(lambda word: word not in names())), draw(st.integers(0, len(names())))
    content = draw(st.binary(max_size=40))

    def changed(head, leaves):
        own = dict(leaves)[name]
        if kind == "drop":
            return head, [leaf for leaf in leaves if leaf[0] != name]
        if kind == "rename":
            return head, [(other if each == name else each, old) for each, old in leaves]
        if kind == "all":
            return head, []
        return head, [*leaves[:place], (other, content) if kind == "add" else (name, own), *leaves[place:]]

    return changed


@st.composite
def of_bytes(draw):
    """Arrays that end early or late, and headers with a wrong byte, or of another array."""
    kind, name = draw(st.sampled_from(["cut", "longer", "flip", "forge", "empty"])), draw(st.sampled_from(names()))
    share, more, flip = draw(fractions), draw(st.binary(min_size=1, max_size=200)), draw(st.integers(1, 255))
    types = ["float64", "float32", "float16", "int64", "uint8", "bool"]
    shape, dtype = draw(shapes), draw(st.sampled_from(types))

    def changed(head, leaves):
        content = dict(leaves)[name]
        header = header_of(content)
        if kind == "cut":
            content = content[: int(share * len(content))]
        elif kind == "longer":
            content += more
        elif kind == "flip":
            place = int(share * len(header))
            content = content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
        elif kind == "forge":
            forged = Leaf(shape, getattr(torch, dtype)).header
            content = forged + (content[len(header) :] if forged != header else b"")
        else:
            content = b""
        return head, replaced(leaves, name, content)

    return changed


@st.composite
def of_numbers(draw):
    """Numbers that are not finite, huge, or not what the method claims."""
    kind, share = draw(st.sampled_from(["odd", "large", "many", "negative", "matrix"])), draw(fractions)
    odd, power = draw(st.sampled_from([np.nan, np.inf, -np.inf])), draw(st.integers(6, 300))
    bounded = [name for name in names() if name.startswith(("body/", "mean"))]
    any_name, body = draw(st.sampled_from(names())), draw(st.sampled_from(bounded))

    def put(array, value):
        array[int(share * len(array))] = value

    def indefinite(array):
        array.reshape(toy.CLASSES, -1)[int(share * toy.CLASSES), [0, 2, 5, 9, 14]] = -(10.0 ** min(power, 100))

    return {
        "odd": values(any_name, lambda array: put(array, odd)),
        "large": values(body, lambda array: put(array, 10.0**power)),
        "many": values("count", lambda array: put(array, 10.0**power)),
        "negative": values("count", lambda array: put(array, -(10.0**-3))),
        "matrix": values("precision", indefinite),
    }[kind]


@st.composite
def of_heads(draw):
    """Heads that are none, or of another experiment, run, client, round or message."""
    keys = ["kind", "id", "experiment", "federation", "client", "round", "version", "breaks", "logged", "scores", "why"]
    kind = draw(st.sampled_from(["text", "any", "value", "drop", "add", "replay", "logged", "long"]))
    key, value, text = draw(st.sampled_from(keys)), draw(anything), draw(st.text(max_size=40))
    other, name = draw(st.text(max_size=20)), draw(st.sampled_from(["loss", "bytes_up"]))
    off = draw(st.sampled_from([-2, -1, 1, 2, 2**40]))
    bad = draw(st.one_of(st.none(), words, st.booleans(), st.lists(numbers, max_size=2)))
    amount = draw(st.sampled_from([-1.0, float("nan"), float("inf"), 1e300]))

    def changed(head, leaves):
        if kind == "text":
            return text, leaves
        if kind == "any":
            return json.dumps(value), leaves
        if kind == "value":  # of another type, or another text
            wrong = other if key in ("id", "experiment", "federation", "kind") and other != head[key] else None
            return head | {key: wrong}, leaves
        if kind == "drop":
            return {each: old for each, old in head.items() if each != key}, leaves
        if kind == "add":
            return head | {f"{key}s": value}, leaves
        if kind == "replay":
            return head | {"round": max(head["round"] + off, 0), "client": head["client"]}, leaves
        if kind == "logged":
            logged = {name: bad if name == "loss" else amount}
            return head | {"logged": head["logged"] | logged}, leaves
        return json.dumps(head) + " " * 2**20, leaves

    return changed


def peak():
    """The largest memory of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


first_peak = functools.cache(peak)  # at the first case


@hostile(300, many=10_000)
@given(st.one_of(of_names(), of_bytes(), of_numbers(), of_heads()))
def test_a_hostile_upload_is_refused_and_changes_nothing(change):
    expected, before = second_round()[4], first_peak()
    done = outcome(change)
    assert done.uploads.clients.tolist() == [0, 1]
    assert [*done.refused, *done.trained.missing] == [BAD]
    (why,) = [*done.refused.values(), *done.trained.missing.values()]
    assert why and len(why) < 400 and why.isprintable()
    assert toy.same_bits(done.server, expected)
    member = second_round()[0].clients.store.members[BAD]
    assert member.accepted == 1 and member.strikes == len(done.refused)
    assert peak() - before < ROOM


def test_the_same_reply_unchanged_is_accepted():
    assert outcome(lambda head, leaves: (head, leaves[::-1])).uploads.clients.tolist() == EVERYONE


@hostile(60)
@given(st.lists(st.one_of(anything, st.tuples(*[anything] * 5)), max_size=2), no_pair)
def test_hostile_scores_are_refused(scores, metric):
    over = second_round()[0]
    metrics = {"accuracy": [1.0, 2.0], "loss": [1.0, 2.0]}
    good = ["test", "personal", over.clients.store.members[BAD].test, metrics, {}]
    odd = [*good[:3], metrics | {"loss": metric}, {}]
    over.clients.roster.link.change = lambda head, leaves: (
        head | {"kind": "evaluated", "scores": [good, odd, *scores]},
        [],
    )
    assert over.clients.evaluate(2, [BAD], *over.down(second_round()[1], [BAD])) == []
    over.clients.roster.link.change = lambda head, leaves: (head | {"kind": "evaluated", "scores": [good]}, [])
    (found,) = over.clients.evaluate(2, [BAD], *over.down(second_round()[1], [BAD]))
    assert found == (BAD, *good)
