"""The ``[data]`` table of an experiment."""

from dataclasses import dataclass

from bespoke.core.inputs import DTYPES
from bespoke.core.settings import knob
from bespoke.data.images.degrade import DEGRADATIONS


@dataclass(frozen=True)
class DataSettings:
    """The ``[data]`` table: the examples, how they become clients, and how a client's rows are split."""

    name: str = knob("digits", "data set")
    path: str = knob("", "pattern of your own files, such as clients/*.npz, or the folder of your pictures", of="name")
    client: str = knob("", "column of a table that names each row's client; empty = a client per file", of="name")
    label: str = knob("", "column of a table that holds the classes or targets", of="name")
    features: tuple[str, ...] = knob((), "columns of a table to use; empty = all but client and label", of="name")
    categorical: tuple[str, ...] = knob((), "features that are categories although they look like numbers", of="name")
    delimiter: str = knob(",", "what separates the cells of a CSV file", of="name")
    size: int = knob(
        0, "pixels per side that pictures are resized to; 0 = all have one size", low=0, high=4096, of="name"
    )
    shape: tuple[int, ...] = knob((), "contract: the shape of one example, such as [1, 28, 28]", low=1, of="name")
    dtype: str = knob("float32", "contract: the type of the examples", choices=DTYPES, of="name")
    class_names: tuple[str, ...] = knob((), "contract: the name of each class, in order", of="name")
    targets: int = knob(1, "contract: numbers to predict per row, where there are no classes", low=1, of="name")
    like: str = knob("", "data set whose shape, classes, own clients and domains the random rows have", of="name")
    pool: str = knob(
        "auto",
        "official train and test rows: merged and split again per client (train+test), or kept separate (split); "
        "auto keeps the test rows of a data set's own clients, and merges otherwise",
        choices=("auto", "train+test", "split"),
    )
    classes: tuple[int, ...] = knob(
        (), "keep only the rows of these classes, renumbered 0, 1, ... in this order; empty = all", low=0
    )
    subsample: float = knob(
        1.0, "share of all rows to draw, uniformly, before they are divided among clients", above=0, high=1
    )
    partition: str = knob(
        "auto", "how rows become clients; auto takes the data set's own clients, and dirichlet where it has none"
    )
    clients: int = knob(0, "number of clients, including new ones; 0 means 20, or all of the data set's own", low=0)
    new_clients: int = knob(
        0, "number of last clients that appear only in evaluation; drawn evenly from domains or degradations", low=0
    )
    new_draw: str = knob(
        "seed",
        "how new clients are drawn from domains or degradations: by the run's seed, or by the rule of FedPCE's later "
        "code, which takes the same ones for every seed",
        choices=("seed", "code"),
        of="partition",
    )
    alpha: float = knob(0.3, "concentration of the Dirichlet draws; smaller is more skewed", above=0, of="partition")
    min_rows: int = knob(1, "redraw until every client has at least this many rows", low=0, of="partition")
    balance: bool = knob(True, "a client that holds its even share receives no further class", of="partition")
    replay: int = knob(
        0,
        "seed of the legacy generators, for pFedFDA's own federation (42) and split, or pFedMe's own (1); 0 = off",
        low=0,
        of="partition",
    )
    volume: int = knob(500, "rows per client", low=1, of="partition")
    classes_per_client: int = knob(2, "distinct classes per client", low=1, of="partition")
    rows_per_class: int = knob(
        0,
        "pathological: rows of each of a client's classes, 0 splits a class evenly among its clients; "
        "power_law: rows of each of a client's classes before the extra ones, 0 = 5",
        low=0,
        of="partition",
    )
    class_draw: str = knob(
        "even",
        "every class goes to equally many clients, or each client draws its classes independently",
        choices=("even", "independent"),
        of="partition",
    )
    inside: str = knob(
        "dirichlet", "how a domain's rows become its clients", choices=("dirichlet", "iid"), of="partition"
    )
    test: float = knob(0.2, "share of a client's rows that are test rows", low=0, high=0.99, of="folds")
    folds: int = knob(
        0, "cut a client's rows into this many parts, one of which is the test rows; 0 = use test", low=0, high=1000
    )
    fold: int = knob(0, "the part that is the test rows, counted from 0", low=0, of="folds")
    validation: float = knob(0.0, "share of a client's train rows to set aside", low=0, high=0.99)
    keep: float = knob(1.0, "share of a client's train rows to keep, at least one row", above=0, high=1)
    keep_rows: int = knob(0, "train rows to keep per client, such as one minibatch; 0 = all", low=0)
    keep_clients: str = knob(
        "all",
        "clients that keep and keep_rows hit: all, the new ones, or those that train",
        choices=("all", "new", "train"),
        of="keep",
    )
    corrupt: str = knob(
        "", 'corruption of the images: "cifar_s" (one pair per client), or "NAME:SEVERITY" as in "fog:3"; empty = none'
    )
    corrupt_clients: str = knob(
        "half",
        "clients with corrupted images: the first half, the new ones, or all",
        choices=("half", "new", "all"),
        of="corrupt",
    )
    pairs: str = knob(
        "code",
        "the ten pairs of pFedFDA's released code, or the fifty of its paper",
        choices=("code", "paper"),
        of="corrupt",
    )
    degrade: str = knob(
        "none",
        "FedPCE's Gaussian noise and colour jitter, by the client's kind in partition = degradations",
        choices=tuple(DEGRADATIONS),
    )
    jitter_order: str = knob(
        "client",
        "draw the order of the four colour changes once per client, or for every minibatch",
        choices=("client", "call"),
        of="degrade",
    )
    noise_at: str = knob(
        "after",
        "add noise after the augmentation, as in FedPCE's code, or before",
        choices=("after", "before"),
        of="degrade",
    )
    noise_scale: str = knob(
        "unit",
        "scale of the noise: the pixels' from 0 to 1, or each image's own, from its least value to its largest after "
        "normalisation, as in FedPCE's code",
        choices=("unit", "image"),
        of="degrade",
    )
    augment: str = knob(
        "none",
        "augmentation of training images: FedPCE's crop, flip, rotation and erasing",
        choices=("none", "fedpce"),
    )
    normalise: str = knob(
        "auto",
        "pixel scale: the data set's own (auto, mostly [-1, 1]), [-1, 1], by CIFAR's or ImageNet's moments, or each "
        "pixel by its own moments over the whole set, test rows included, as in FedProx's MNIST",
        choices=("auto", "symmetric", "cifar", "imagenet", "pixel"),
    )
    transform: tuple[str, ...] = knob(
        (),
        'steps on each minibatch, in order, such as "crop(pad=4)", "flip(p=0.5)", "normalise(mean=[0.5], '
        'deviation=[0.25])", or a function of your own, "mine:noise"',
    )
    num_classes: int = knob(
        0, "number of classes; 0 = from the labels of files, and 10 for gaussian", low=0, high=10**6, of="name"
    )
    rows: int = knob(2000, "number of rows", low=1, of="name")
    dim: int = knob(20, "numbers per row", low=1, of="name")
    spread: float = knob(1.5, "standard deviation within a class; the means are standard normal", low=0, of="name")
    between: float = knob(1.0, "variance of the clients' true means", low=0, high=1e12, of="name")
