"""pFedFDA's own federation: its released partition script, draw by draw.

NumPy's legacy generator is frozen, so the script's seed gives exactly the paper's clients, provided the rows are
in the official order, train before test. Row counts depend on the labels only through the number of rows of
each class.
"""

import numpy as np

from bespoke.data.examples import share_of, train_count
from bespoke.data.partition.basic import MAX_TRIES, Partition, check_clients
from bespoke.errors import UserError

SPLIT_SEED = 42  # for the script's train and test split, whatever the partition's seed
KEEP_SEED = 0  # for drawing the train rows to keep


def replay(
    labels: np.ndarray, seed: int, clients: int, alpha: float, min_rows: int, test: float, keep: float = 1.0
) -> Partition:
    """Spread ``labels`` (N,) by class-wise Dirichlet shares with the balance rule, from the legacy generator.

    For each class: shuffle its rows, draw the shares, zero them for clients that hold N/M rows, and cut.
    Everything is redrawn until every client has ``min_rows`` rows. Then a client's n rows, class by class,
    are permuted by a generator with seed 42, and the first n - floor((1 - test) n) are its test rows. Of
    the m others floor(``keep`` m) are train rows, drawn client by client from one generator with seed 0.
    """
    check_clients(len(labels), clients, min_rows)
    draws = np.random.RandomState(seed)
    by_class = [np.flatnonzero(labels == k) for k in range(int(labels.max()) + 1)]
    concentration, even = np.repeat(alpha, clients), len(labels) / clients
    for attempt in range(1, MAX_TRIES + 1):
        held = np.zeros(clients, dtype=np.int64)
        shuffled, ends = [], []
        for rows in by_class:
            rows = rows.copy()
            draws.shuffle(rows)
            share = draws.dirichlet(concentration)
            share[held >= even] = 0.0
            share /= share.sum()
            cuts = (share.cumsum() * len(rows)).astype(np.int64)
            cuts[-1] = len(rows)
            held += np.diff(cuts, prepend=0)
            shuffled.append(rows)
            ends.append(cuts[:-1])
        if held.min() >= min_rows:
            parts = [np.split(rows, cuts) for rows, cuts in zip(shuffled, ends, strict=True)]
            lists = [np.concatenate(own) for own in zip(*parts, strict=True)]
            train, held_out = _split(lists, test, keep)
            return Partition([np.sort(rows) for rows in lists], attempt, held_out, train)
    raise UserError(
        f"{MAX_TRIES:,} draws of Dir({alpha:g}) over {clients} clients never gave each of them {min_rows} "
        "rows: raise [data] alpha, or lower clients or min_rows"
    )


def _split(lists: list[np.ndarray], test: float, keep: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the train and test rows of each client, ascending."""
    draws = np.random.RandomState(KEEP_SEED)
    train, held_out = [], []
    for rows in lists:
        order = np.random.RandomState(SPLIT_SEED).permutation(len(rows))
        apart = len(rows) - train_count(len(rows), test)
        held_out.append(np.sort(rows[order[:apart]]))
        own = rows[order[apart:]]
        kept = max(1, share_of(keep, len(own)))
        train.append(np.sort(own[draws.permutation(len(own))[:kept]]))
        draws.permutation(len(own) - kept)  # the script draws unused validation rows from the others
    return train, held_out
