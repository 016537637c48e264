"""Readers of LEAF's JSON files (FEMNIST) and of Sentiment140's tweets: sets whose clients are people."""

import codecs
import csv
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import PIECE, Files, Member, reading
from bespoke.data.sources.entry import Entry
from bespoke.errors import UserError, shown

TOKENS = 25  # per tweet; shorter ones are padded, longer ones cut
WORDS = 10_000  # in the vocabulary, including padding and the unknown word
FEWEST = 30  # tweets of a user who becomes a client
PADDING, UNKNOWN = 0, 1
_SPACES = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_WORD = re.compile(r"[\w']+|[.,!?;]")


class JsonText:
    """A JSON text that is read value by value, so that a large one is never in memory as a whole."""

    LONGEST = 2**17  # characters of a value that is read at once

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.decode = file, codecs.getincrementaldecoder("utf-8")().decode
        self.text, self.place, self.ended = "", 0, False

    def next(self) -> str:
        """Return the next character that is no space, or "" at the end, and stay there."""
        while True:
            while len(self.text) - self.place < self.LONGEST and not self.ended:
                piece = self.file.read(PIECE)
                self.ended = not piece
                self.text, self.place = self.text[self.place :] + self.decode(piece, self.ended), 0
            self.place = _SPACES.match(self.text, self.place).end()  # type: ignore[union-attr]
            if self.place < len(self.text) or self.ended:
                return self.text[self.place : self.place + 1]

    def value(self) -> Any:
        """Read a value of at most ``LONGEST`` characters."""
        self.next()
        found, self.place = _DECODER.raw_decode(self.text, self.place)
        if self.place == len(self.text) and not self.ended:
            raise ValueError("a value in it is too long")
        return found

    def elements(self, brackets: str = "[]") -> Iterator[None]:
        """Stand before each element of a list; read it before the next."""
        self._take(brackets[0])
        if self.next() == brackets[1]:
            self._take(brackets[1])
            return
        while True:
            yield
            if self.next() != ",":
                break
            self._take(",")
        self._take(brackets[1])

    def keys(self) -> Iterator[str]:
        """Yield each key of an object; read its value before the next."""
        seen = set()
        for _ in self.elements("{}"):
            key = self.value()
            if not isinstance(key, str) or key in seen:
                raise ValueError(f"{str(key)[:40]!r} is no key, or is there twice")
            seen.add(key)
            self._take(":")
            yield key

    def skip(self) -> None:
        """Read a value and forget it; its elements are read one by one."""
        first = self.next()
        if first not in ("[", "{"):
            self.value()
            return
        for count, _ in enumerate(self.elements() if first == "[" else self.keys()):
            self.value()
            if count > self.LONGEST:
                raise ValueError("a value in it is too long")

    def _take(self, character: str) -> None:
        if self.next() != character:
            raise ValueError(f"{character!r} is missing before {self.text[self.place : self.place + 20]!r}")
        self.place += 1


def read_leaf(files: Files, entry: Entry) -> Examples:
    """Read LEAF's FEMNIST: ``{"users": [...], "user_data": {user: {"x": [[784 numbers in 0..1]], "y": [...]}}}``.

    Rows of a file with "test" in its name are test rows. Writers are sorted by name.
    """
    rows: dict[str, list[tuple[bytearray, list[int], bool]]] = {}
    count = 0
    for member in files.members(lambda name: name.endswith(".json")):
        for user, pixels, labels in _leaf_clients(member, entry):
            rows.setdefault(user, []).append((pixels, labels, "test" in member.last))
            count += len(labels)
            entry.admit(count, files)
    if not count:
        raise UserError(f"{files} holds no rows in .json files: give those that LEAF's preprocess.sh wrote")
    users = sorted(rows)
    parts = [(i, *part) for i, user in enumerate(users) for part in sorted(rows.pop(user), key=lambda part: part[2])]
    sizes = [len(labels) for _, _, labels, _ in parts]
    held = np.repeat([test for *_, test in parts], sizes)
    return Examples(
        x=np.frombuffer(b"".join(pixels for _, pixels, _, _ in parts), np.uint8).reshape(-1, 1, 28, 28),
        y=np.array([label for _, _, labels, _ in parts for label in labels], np.int64),
        num_classes=entry.classes,
        official_test=held if held.any() else None,
        owner=np.repeat([i for i, *_ in parts], sizes),
        owner_names=tuple(users),
    )


def _leaf_clients(member: Member, entry: Entry) -> Iterator[tuple[str, bytearray, list[int]]]:
    """Yield name, pixels (n * 784) and labels (n) of each client of a file."""
    text, found = JsonText(member.file), False
    with reading(member.where):
        for key in text.keys():  # noqa: SIM118
            if key != "user_data":
                text.skip()
                continue
            found = True
            for user in text.keys():  # noqa: SIM118
                with reading(f"client {shown(user, 100)} of {member.where}"):
                    pixels, labels = _leaf_rows(text, entry)
                yield user, pixels, labels
        if not found or text.next():
            raise ValueError("it is not one table with user_data")


def _leaf_rows(text: JsonText, entry: Entry) -> tuple[bytearray, list[int]]:
    pixels, labels = bytearray(), []
    for key in text.keys():  # noqa: SIM118
        if key == "x":
            for _ in text.elements():
                pixels += _leaf_image(text.value())
                entry.admit(len(pixels) // 784, "a client")
        elif key == "y":
            for _ in text.elements():
                label = text.value()
                if type(label) not in (int, float) or label != int(label):
                    raise ValueError(f"the label {str(label)[:20]} is no whole number")
                if not 0 <= label < entry.classes:
                    raise ValueError(f"the label {str(label)[:20]} is not in 0..{entry.classes - 1}")
                labels.append(int(label))
                entry.admit(len(labels), "a client")
        else:
            text.skip()
    if len(pixels) != 784 * len(labels):
        raise ValueError(f"it has {len(pixels) // 784} rows and {len(labels)} labels")
    return pixels, labels


def _leaf_image(row: Any) -> bytes:
    if not isinstance(row, list) or len(row) != 784 or not set(map(type, row)) <= {int, float}:
        raise ValueError("a row does not have 784 numbers")
    values = np.array(row, np.float64)
    if not ((values >= 0) & (values <= 1)).all():  # NaN is neither
        raise ValueError("a pixel is not in 0..1")
    return np.rint(255 * values).astype(np.uint8).tobytes()


def words_of(tweet: str) -> list[str]:
    """Return the words of a tweet, in lower case; user names and addresses become one word each."""
    plain = re.sub(r"https?://\S+|www\.\S+", " URL ", re.sub(r"@\w+", " USER ", tweet))
    return _WORD.findall(plain.lower())


def read_sent140(files: Files, entry: Entry) -> Examples:
    """Read Sentiment140's training file: polarity (0 or 4), id, date, query, user, text; Latin-1, without a header.

    Users with at least 30 tweets are clients, sorted by name, their tweets in the file's order. A row is 25 tokens
    (int32): 0 is padding, 1 an unknown word, the others are numbered by frequency.
    """
    tweets: dict[str, list[tuple[int, array[int]]]] = {}  # of each user: the label, and the words as places
    places: dict[str, int] = {}  # each word's place among all; a tweet as places takes little memory
    count = 0
    for member in files.members(lambda name: name.endswith(".csv") and "test" not in name):
        for label, user, text in _tweets(member):
            words = array("I", (places.setdefault(word, len(places)) for word in words_of(text)))
            tweets.setdefault(user, []).append((label, words))
            count += 1
            entry.admit(count, files)
    users = sorted(user for user, own in tweets.items() if len(own) >= FEWEST)
    if not users:
        raise UserError(f"{files} has no user with {FEWEST} tweets: give the training file of Sentiment140")
    rows = [(i, label, words) for i, user in enumerate(users) for label, words in tweets[user]]
    numbers, known = _numbered(list(places), [words for _, _, words in rows])
    x = np.full((len(rows), TOKENS), PADDING, np.int32)
    for row, (_, _, words) in zip(x, rows, strict=True):
        row[: len(words)] = numbers[words[:TOKENS]]
    y, owner = (np.array([row[column] for row in rows], np.int64) for column in (1, 0))
    return Examples(x, y, entry.classes, owner=owner, owner_names=tuple(users), words=known)


def _tweets(member: Member) -> Iterator[tuple[int, str, str]]:
    """Yield label (0 or 1), user and text of each line."""
    with reading(member.where):
        for line in csv.reader(line.decode("latin-1") for line in member.lines()):
            if len(line) != 6 or line[0] not in ("0", "4"):
                raise ValueError("a line does not have the six fields of Sentiment140")
            yield int(line[0] == "4"), line[4], line[5]


def _numbered(words: list[str], tweets: Sequence["array[int]"]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the number of each word (words,), by its frequency in the tweets, and the words that have one in order."""
    counts = np.zeros(len(words), np.int64)
    for tweet in tweets:
        np.add.at(counts, tweet, 1)
    ordered = sorted(np.flatnonzero(counts).tolist(), key=lambda i: (-counts[i], words[i]))[: WORDS - 2]
    numbers = np.full(len(words), UNKNOWN, np.int32)
    numbers[ordered] = np.arange(2, len(ordered) + 2)
    return numbers, ("", "?", *(words[i] for i in ordered))
