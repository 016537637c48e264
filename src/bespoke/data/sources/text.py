"""Readers of LEAF's JSON files (FEMNIST) and of Sentiment140's tweets: sets whose clients are people."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import members, reading
from bespoke.data.sources.entry import Entry
from bespoke.data.sources.formats import names_of
from bespoke.errors import UserError

TOKENS = 25  # per tweet; shorter ones are padded, longer ones cut
WORDS = 10_000  # in the vocabulary, including padding and the unknown word
FEWEST = 30  # tweets of a user who becomes a client
PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[\w']+|[.,!?;]")


def read_leaf(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read LEAF's FEMNIST: ``{"users": [...], "user_data": {user: {"x": [[784 numbers in 0..1]], "y": [...]}}}``.

    Rows of a file with "test" in its name are test rows. Writers are sorted by name.
    """
    rows: dict[str, list[tuple[np.ndarray, np.ndarray, bool]]] = {}
    for name, content in members(paths, lambda name: name.endswith(".json")):
        with reading(name):
            for user, own in json.loads(content)["user_data"].items():
                x, y = np.asarray(own["x"], np.float64).reshape(-1, 784), np.asarray(own["y"], np.int64)
                if len(x) != len(y) or x.min(initial=0) < 0 or x.max(initial=0) > 1:
                    raise ValueError(f"the rows of {user} are not 784 numbers in 0..1 with one label each")
                images = np.rint(255 * x).astype(np.uint8).reshape(-1, 1, 28, 28)
                rows.setdefault(user, []).append((images, y, "test" in name.rpartition("/")[2]))
    if not rows:
        raise UserError(f"{names_of(paths)} holds no .json file: give those that LEAF's preprocess.sh wrote")
    users = sorted(rows)
    parts = [(i, *part) for i, user in enumerate(users) for part in sorted(rows[user], key=lambda part: part[2])]
    held = np.concatenate([np.full(len(y), test) for _, _, y, test in parts])
    return Examples(
        x=np.concatenate([x for _, x, _, _ in parts]),
        y=np.concatenate([y for _, _, y, _ in parts]),
        num_classes=entry.classes,
        official_test=held if held.any() else None,
        owner=np.concatenate([np.full(len(y), i) for i, _, y, _ in parts]),
        owner_names=tuple(users),
    )


def words_of(tweet: str) -> list[str]:
    """Return the words of a tweet, in lower case; user names and addresses become one word each."""
    plain = re.sub(r"https?://\S+|www\.\S+", " URL ", re.sub(r"@\w+", " USER ", tweet))
    return _WORD.findall(plain.lower())


def read_sent140(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read Sentiment140's training file: polarity (0 or 4), id, date, query, user, text; Latin-1, without a header.

    Users with at least 30 tweets are clients, sorted by name, their tweets in the file's order. A row is 25 tokens
    (int32): 0 is padding, 1 an unknown word, the others are numbered by frequency.
    """
    tweets: dict[str, list[tuple[int, list[str]]]] = {}
    for name, content in members(paths, lambda name: name.endswith(".csv") and "test" not in name):
        with reading(name):
            for line in csv.reader(io.StringIO(content.decode("latin-1"), newline="")):
                if len(line) != 6 or line[0] not in ("0", "4"):
                    raise ValueError("a line does not have the six fields of Sentiment140")
                tweets.setdefault(line[4], []).append((int(line[0] == "4"), words_of(line[5])))
    users = sorted(user for user, own in tweets.items() if len(own) >= FEWEST)
    if not users:
        raise UserError(f"{names_of(paths)} has no user with {FEWEST} tweets: give the training file of Sentiment140")
    counts = Counter(word for user in users for _, words in tweets[user] for word in words)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 2]
    number = {word: i + 2 for i, word in enumerate(ordered)}
    total = sum(len(tweets[user]) for user in users)
    x, y, owner = np.full((total, TOKENS), PADDING, np.int32), np.empty(total, np.int64), np.empty(total, np.int64)
    row = 0
    for i, user in enumerate(users):
        for label, words in tweets[user]:
            tokens = [number.get(word, UNKNOWN) for word in words[:TOKENS]]
            x[row, : len(tokens)] = tokens
            y[row], owner[row] = label, i
            row += 1
    return Examples(x, y, entry.classes, owner=owner, owner_names=tuple(users), words=("", "?", *ordered))
