"""The ``[data]`` table of an experiment."""

from dataclasses import dataclass

from bespoke.core.settings import knob


@dataclass(frozen=True)
class DataSettings:
    """The ``[data]`` table: which examples, how they become clients, and how a client splits its own."""

    name: str = knob("digits", "data set")
    path: str = knob("", "files: pattern of the clients' archives, such as clients/*.npz")
    pool: str = knob(
        "auto",
        "official train and test rows: merged and split anew per client (train+test), or kept apart (split); "
        "auto keeps the test rows that a data set's own clients bring, and merges otherwise",
        choices=("auto", "train+test", "split"),
    )
    partition: str = knob(
        "auto",
        "how rows become clients; auto takes the data set's own clients, and dirichlet where it has none",
        choices=("auto", "iid", "dirichlet", "pathological", "natural"),
    )
    clients: int = knob(0, "number of clients, new ones among them; 0 means 20, or all of the data set's own", low=0)
    new_clients: int = knob(0, "so many of the last clients are met only in evaluation", low=0)
    alpha: float = knob(0.3, "dirichlet: concentration; smaller is more skewed", above=0)
    min_rows: int = knob(1, "dirichlet: redraw until every client has so many rows", low=0)
    balance: bool = knob(True, "dirichlet: a client that holds its even share receives no further class")
    classes_per_client: int = knob(2, "pathological: distinct classes of a client", low=1)
    rows_per_class: int = knob(
        0, "pathological: rows of each of its classes; 0 splits a class evenly among its clients", low=0
    )
    test: float = knob(0.2, "share of a client's rows that are test rows", low=0, high=0.99)
    validation: float = knob(0.0, "share of a client's train rows that are set aside", low=0, high=0.99)
    keep: float = knob(1.0, "share of a client's train rows that are kept, at least one", above=0, high=1)
    num_classes: int = knob(
        0, "files: number of classes, 0 = as found in the labels; gaussian: number of classes, 0 = 10", low=0
    )
    rows: int = knob(2000, "gaussian: number of rows", low=1)
    dim: int = knob(20, "gaussian: numbers in a row", low=1)
    spread: float = knob(1.5, "gaussian: standard deviation within a class; the means are standard normal", low=0)
