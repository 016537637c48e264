"""The ``[data]`` table of an experiment."""

from dataclasses import dataclass

from bespoke.core.settings import knob
from bespoke.data.images.degrade import DEGRADATIONS


@dataclass(frozen=True)
class DataSettings:
    """The ``[data]`` table: which examples, how they become clients, and how a client splits its own."""

    name: str = knob("digits", "data set")
    path: str = knob("", "pattern of the clients' archives, such as clients/*.npz", of="name")
    pool: str = knob(
        "auto",
        "official train and test rows: merged and split anew per client (train+test), or kept apart (split); "
        "auto keeps the test rows that a data set's own clients bring, and merges otherwise",
        choices=("auto", "train+test", "split"),
    )
    subsample: float = knob(
        1.0, "share of all rows that is drawn, uniformly, before they become clients", above=0, high=1
    )
    partition: str = knob(
        "auto", "how rows become clients; auto takes the data set's own clients, and dirichlet where it has none"
    )
    clients: int = knob(0, "number of clients, new ones among them; 0 means 20, or all of the data set's own", low=0)
    new_clients: int = knob(
        0, "so many of the last clients are met only in evaluation; drawn evenly from domains or degradations", low=0
    )
    alpha: float = knob(0.3, "concentration of the Dirichlet draws; smaller is more skewed", above=0, of="partition")
    min_rows: int = knob(1, "redraw until every client has so many rows", low=0, of="partition")
    balance: bool = knob(True, "a client that holds its even share receives no further class", of="partition")
    replay: int = knob(
        0,
        "seed of NumPy's legacy generator, for pFedFDA's own federation (42) and split; 0 = off",
        low=0,
        of="partition",
    )
    volume: int = knob(500, "rows of every client", low=1, of="partition")
    classes_per_client: int = knob(2, "distinct classes of a client", low=1, of="partition")
    rows_per_class: int = knob(
        0,
        "pathological: rows of each of its classes, 0 splits a class evenly among its clients; "
        "power_law: rows of each of its classes before the extra ones, 0 = 5",
        low=0,
        of="partition",
    )
    class_draw: str = knob(
        "even",
        "every class goes to as many clients as any other, or each client draws its own independently",
        choices=("even", "independent"),
        of="partition",
    )
    inside: str = knob(
        "dirichlet", "how a domain's rows become its clients", choices=("dirichlet", "iid"), of="partition"
    )
    test: float = knob(0.2, "share of a client's rows that are test rows", low=0, high=0.99, of="folds")
    folds: int = knob(0, "cut a client's rows into so many parts, one of which are the test rows; 0 = by test", low=0)
    fold: int = knob(0, "which part the test rows are, counted from 0", low=0, of="folds")
    validation: float = knob(0.0, "share of a client's train rows that are set aside", low=0, high=0.99)
    keep: float = knob(1.0, "share of a client's train rows that are kept, at least one", above=0, high=1)
    keep_rows: int = knob(0, "train rows of a client that are kept, such as one minibatch; 0 = all", low=0)
    corrupt: str = knob(
        "", 'corruption of the images: "cifar_s" (a pair a client), or "NAME:SEVERITY" such as "fog:3"; empty = none'
    )
    corrupt_clients: str = knob(
        "half",
        "whose images: the first half of the clients', the new ones', or all",
        choices=("half", "new", "all"),
        of="corrupt",
    )
    pairs: str = knob(
        "code",
        "of pFedFDA's released code, ten, or of its text, fifty",
        choices=("code", "paper"),
        of="corrupt",
    )
    degrade: str = knob(
        "none",
        "FedPCE's Gaussian noise and colour jitter, by the kinds of partition = degradations",
        choices=tuple(DEGRADATIONS),
    )
    jitter_order: str = knob(
        "client",
        "the order of a client's four colour changes is drawn once, or anew for every minibatch",
        choices=("client", "call"),
        of="degrade",
    )
    noise_at: str = knob(
        "after",
        "noise is added after the augmentation, as in FedPCE's code, or before",
        choices=("after", "before"),
        of="degrade",
    )
    augment: str = knob(
        "none",
        "training images: FedPCE's crop, flip, rotation and erasing",
        choices=("none", "fedpce"),
    )
    normalise: str = knob(
        "auto",
        "pixels: as the data set has it (auto, mostly [-1, 1]), to [-1, 1], or by CIFAR's or ImageNet's moments",
        choices=("auto", "symmetric", "cifar", "imagenet"),
    )
    num_classes: int = knob(
        0, "number of classes; 0 = as found in the labels of files, and 10 for gaussian", low=0, of="name"
    )
    rows: int = knob(2000, "number of rows", low=1, of="name")
    dim: int = knob(20, "numbers in a row", low=1, of="name")
    spread: float = knob(1.5, "standard deviation within a class; the means are standard normal", low=0, of="name")
