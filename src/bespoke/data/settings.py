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
    subsample: float = knob(
        1.0, "share of all rows that is drawn, uniformly, before they become clients", above=0, high=1
    )
    partition: str = knob(
        "auto",
        "how rows become clients; auto takes the data set's own clients, and dirichlet where it has none",
        choices=(
            "auto",
            "iid",
            "dirichlet",
            "equal_dirichlet",
            "pathological",
            "power_law",
            "domain",
            "degradations",
            "natural",
        ),
    )
    clients: int = knob(0, "number of clients, new ones among them; 0 means 20, or all of the data set's own", low=0)
    new_clients: int = knob(
        0, "so many of the last clients are met only in evaluation; drawn evenly from domains or degradations", low=0
    )
    alpha: float = knob(0.3, "dirichlet, equal_dirichlet, domain: concentration; smaller is more skewed", above=0)
    min_rows: int = knob(1, "dirichlet, domain, degradations: redraw until every client has so many rows", low=0)
    balance: bool = knob(
        True, "dirichlet, domain, degradations: a client that holds its even share receives no further class"
    )
    replay: int = knob(
        0, "dirichlet: seed of NumPy's legacy generator, for pFedFDA's own federation (42) and split; 0 = off", low=0
    )
    volume: int = knob(500, "equal_dirichlet: rows of every client", low=1)
    classes_per_client: int = knob(2, "pathological, power_law: distinct classes of a client", low=1)
    rows_per_class: int = knob(
        0,
        "pathological: rows of each of its classes, 0 splits a class evenly among its clients; "
        "power_law: rows of each of its classes before the extra ones, 0 = 5",
        low=0,
    )
    class_draw: str = knob(
        "even",
        "pathological: every class goes to as many clients as any other, or each client draws its own independently",
        choices=("even", "independent"),
    )
    inside: str = knob("dirichlet", "domain: how a domain's rows become its clients", choices=("dirichlet", "iid"))
    test: float = knob(0.2, "share of a client's rows that are test rows", low=0, high=0.99)
    folds: int = knob(0, "cut a client's rows into so many parts, one of which are the test rows; 0 = by test", low=0)
    fold: int = knob(0, "folds: which part the test rows are, counted from 0", low=0)
    validation: float = knob(0.0, "share of a client's train rows that are set aside", low=0, high=0.99)
    keep: float = knob(1.0, "share of a client's train rows that are kept, at least one", above=0, high=1)
    keep_rows: int = knob(0, "train rows of a client that are kept, such as one minibatch; 0 = all", low=0)
    corrupt: str = knob(
        "", 'corruption of the images: "cifar_s" (a pair a client), or "NAME:SEVERITY" such as "fog:3"; empty = none'
    )
    corrupt_clients: str = knob(
        "half", "corrupt: the first half of the clients, the new ones, or all", choices=("half", "new", "all")
    )
    pairs: str = knob(
        "code",
        "cifar_s: pFedFDA's released code, ten pairs, or its text, fifty of them",
        choices=("code", "paper"),
    )
    degrade: str = knob(
        "none",
        "FedPCE's Gaussian noise and colour jitter, by the kinds of partition = degradations",
        choices=("none", "fedpce"),
    )
    jitter_order: str = knob(
        "client",
        "degrade: the order of a client's four colour changes is drawn once, or anew for every minibatch",
        choices=("client", "call"),
    )
    noise_at: str = knob(
        "after",
        "degrade: noise is added after the augmentation, as in FedPCE's code, or before",
        choices=("after", "before"),
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
        0, "files: number of classes, 0 = as found in the labels; gaussian: number of classes, 0 = 10", low=0
    )
    rows: int = knob(2000, "gaussian: number of rows", low=1)
    dim: int = knob(20, "gaussian: numbers in a row", low=1)
    spread: float = knob(1.5, "gaussian: standard deviation within a class; the means are standard normal", low=0)
