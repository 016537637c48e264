"""Federations from the ``[data]`` table or from your own arrays."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from bespoke.core.data import FederatedData
from bespoke.core.settings import check, refuse_given
from bespoke.data.examples import ClientArrays, Examples, join, share_of
from bespoke.data.images import corrupt
from bespoke.data.images.cifar_s import assign, corrupted
from bespoke.data.images.degrade import DEGRADATIONS
from bespoke.data.images.views import views
from bespoke.data.mapped import taken
from bespoke.data.partition.basic import Partition, follow
from bespoke.data.partition.schemes import KEYS, PARTITIONS, Known, split_rows
from bespoke.data.pool import LOAD, PARTITION, SUBSAMPLE, cut, generator, pool_of
from bespoke.data.settings import DataSettings
from bespoke.data.sources import catalogue
from bespoke.data.sources.built_in import BUILT_IN, contract
from bespoke.data.sources.own import OwnClients
from bespoke.data.transforms import Step, as_transform, step_of
from bespoke.errors import UserError, reason
from bespoke.registry import Function, Registry, function

DEFAULT_CLIENTS = 20
_READ_AGAIN = 64  # examples of a Dataset, to see whether it draws
_WITHOUT_CLASSES = ("iid", "natural", "owner_groups")  # shipped partitions that serve any targets


def _dataset(thing: Any, where: str) -> Function:
    return function(thing, ("rng", "settings"), "data", KEYS, where)


_OF_CATALOGUE = _dataset(catalogue.load, "catalogue.load")

DATASETS: Registry[Function] = Registry(
    "data set",
    {load.__name__: _dataset(load, load.__name__) for load in (*BUILT_IN, contract)}
    | {name: replace(_OF_CATALOGUE, doc=entry.doc) for name, entry in catalogue.CATALOGUE.items()},
    _dataset,
    "bespoke.datasets",
)


def register_dataset(name: str, load: Callable[..., Any]) -> None:
    """Add your own data set under a name for ``[data] name``.

    The parameters of ``load`` may be ``rng`` (a NumPy generator) and any key of ``[data]``, such as ``path``. It
    returns rows that ``[data] partition`` divides among clients, ``(x, y)`` or ``(x, y, x_test, y_test)`` with x
    (N, ...) and integer y (N,), or :class:`Examples`; or a list, or dict by name, of clients as ``bespoke.federate``
    takes them. Registering your own name again replaces it.
    """
    DATASETS.register(name, load, "register_dataset")


def federate_data(settings: DataSettings, seed: int, skip_empty: bool = False) -> FederatedData:
    """Return the federation of a ``[data]`` table; it depends only on the settings and the seed, not on the method."""
    return partitioned(settings, seed, skip_empty)[0]


def partitioned(settings: DataSettings, seed: int, skip_empty: bool = False) -> tuple[FederatedData, Partition]:
    """Return the federation of :func:`federate_data` and its partition, with the number of tries."""
    source = check_settings(settings)
    draws = generator(seed, LOAD)
    examples = _examples(source({"rng": draws, "settings": settings} | vars(settings)), settings, draws)
    return _spread(_transformed(_of_classes(examples, settings), settings), settings, seed, skip_empty)


def _transformed(examples: Examples, settings: DataSettings) -> Examples:
    """Return the examples with the transform that the settings name, if any, before their own."""
    if not settings.transform:
        return examples
    steps = [step_of(text, "[data] transform") for text in settings.transform]
    return replace(examples, transform=as_transform(steps, examples.x, examples.transform))


def check_settings(settings: DataSettings) -> Function:
    """Refuse wrong settings before any data is read, and return the data set."""
    check(settings, "[data]")
    source = DATASETS.find(settings.name, "[data] name")
    takes = source.takes(KEYS)
    if settings.name not in DATASETS.shipped:
        takes |= {"num_classes", "test"}  # for rows and clients given as plain arrays
    _check_relevant(settings, "name", f"data set {settings.name}", takes)
    if settings.pool == "split" and "test" not in takes:
        refuse_given(settings, "[data]", ("test",), 'pool = "split"', ())
    _check_together(settings)
    if settings.partition != "auto":  # else the data decide
        _check_partition(settings)
    return source


def _examples(found: Any, settings: DataSettings, rng: np.random.Generator) -> Examples:
    """Turn what a data set returned into examples: examples themselves, or a user's rows or clients."""
    if isinstance(found, Examples):
        return found
    where = f"the data set {settings.name}"
    if not isinstance(found, list | Mapping):
        rows = _client_arrays(settings.name, found, where)
        joined = join([rows], settings.num_classes, settings.test, rng, classes=None)
        return replace(joined, owner=None, owner_names=())
    clients = found if isinstance(found, Mapping) else dict(enumerate(found))
    arrays = [_client_arrays(str(name), client, f"client {name!r} of {where}") for name, client in clients.items()]
    return _named(join(arrays, settings.num_classes, settings.test, rng, classes=None), found)


def _named(examples: Examples, clients: Any) -> Examples:
    """Return the examples with the names that came with the clients, where they were read from tables or pictures."""
    if not isinstance(clients, OwnClients):
        return examples
    return replace(examples, contract=clients.contract, notes=clients.notes)


def _of_classes(examples: Examples, settings: DataSettings) -> Examples:
    """Return the rows of the classes that the settings keep, renumbered by their order there."""
    classes = settings.classes
    if not classes:
        return examples
    if not examples.num_classes:
        raise UserError("[data] classes keeps rows by class, but the targets are not classes: leave it out")
    there = np.unique(examples.y)
    absent = [label for label in classes if label not in there]
    if absent or len(set(classes)) < len(classes):
        wrong = f"class {absent[0]}, of which {settings.name!r} has no rows" if absent else "a class twice"
        raise UserError(
            f"[data] classes names {wrong}: name each of its classes, {there[0]} to {there[-1]}, at most once"
        )
    order = np.argsort(classes)
    rows = np.flatnonzero(np.isin(examples.y, classes))
    places = order[np.searchsorted(np.array(classes)[order], examples.y[rows])]
    of = {name: getattr(examples, name) for name in ("official_test", "owner", "domain")}
    chosen: dict[str, Any] = {name: None if values is None else values[rows] for name, values in of.items()}
    chosen["x"] = taken(examples.x, rows)
    if examples.contract is not None and examples.contract.classes:
        names = tuple(examples.contract.classes[label] for label in classes)
        chosen["contract"] = replace(examples.contract, classes=names)
    return replace(examples, y=places, num_classes=len(classes), **chosen)


def from_arrays(
    clients: Sequence[Any] | Mapping[Any, Any],
    *,
    test: float = 0.2,
    validation: float = 0.0,
    new_clients: int = 0,
    num_classes: int | None = None,
    seed: int = 0,
    transform: Step | Sequence[Step] | None = None,
    skip_empty: bool = False,
    classes: bool = True,
) -> FederatedData:
    """Return the federation of clients with their own data: a list of clients, or a dict by name.

    A client is ``(x, y)`` or ``(x, y, x_test, y_test)`` with x (n, ...) and integer y (n,), arrays or
    tensors; or a torch Dataset of (x, y) pairs, or ``(train_dataset, test_dataset)``. Where a client
    brings no test rows, a share ``test`` of its rows is drawn; ``validation`` is a share of its train rows.
    The last ``new_clients`` appear only in evaluation. ``num_classes`` defaults to the largest label plus
    one. Where targets are not ``classes``, y (n,) or (n, T) holds any numbers. uint8 examples are scaled to
    [-1, 1] where the ``transform``, a function ``fn(key, x, train)`` or several, leaves them as they are.
    """
    named = clients.items() if isinstance(clients, Mapping) else enumerate(clients)
    arrays = [_client_arrays(str(name), client) for name, client in named]
    if not arrays:
        raise UserError("there are no clients: give at least one")
    names = [client.name for client in arrays]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two clients are named {twice!r}: give each client a different name")
    settings = DataSettings(
        name="files", partition="natural", test=test, validation=validation, new_clients=new_clients
    )
    check(settings, "[data]")
    examples = join(arrays, num_classes or 0, test, generator(seed, LOAD), classes)
    examples = replace(examples, transform=as_transform(transform, examples.x))
    return _spread(_named(examples, clients), settings, seed, skip_empty)[0]


def _check_relevant(settings: DataSettings, of: str, to: str, takes: Collection[str]) -> None:
    """Refuse keys that depend on the key ``of`` but mean nothing ``to`` its value."""
    keys = [field.name for field in dataclasses.fields(settings) if field.metadata.get("of") == of]
    refuse_given(settings, "[data]", set(keys).difference(takes), to, [key for key in keys if key in takes])


def _check_partition(settings: DataSettings) -> None:
    """Refuse a partition that does not exist, and keys that mean nothing to it."""
    takes = PARTITIONS.find(settings.partition, "[data] partition").takes(KEYS)
    if settings.partition == "domain":  # the partition inside each domain takes keys too
        takes &= {"inside"} | PARTITIONS[settings.inside].takes(KEYS)
    _check_relevant(settings, "partition", f"partition {settings.partition}", takes)


def _check_together(settings: DataSettings) -> None:
    """Refuse keys that contradict each other or mean nothing together, before any data is read."""
    choices: dict[str, Collection[str]] = {
        "folds": ("fold",) if settings.folds else ("test",),
        "corrupt": corrupt.takes(settings.corrupt),
        "degrade": DEGRADATIONS[settings.degrade],
    }
    for of, takes in choices.items():
        _check_relevant(settings, of, f"{of} = {getattr(settings, of)!r}", takes)
    hits = settings.keep < 1.0 or settings.keep_rows
    _check_relevant(settings, "keep", "keep = 1 beside keep_rows = 0", ("keep_clients",) if hits else ())
    for text in settings.transform:
        step_of(text, "[data] transform")
    beside = [key for key in ("degrade", "augment", "normalise") if getattr(settings, key) not in ("none", "auto")]
    if settings.transform and beside:
        raise UserError(f"[data] transform and {beside[0]} both say how images are seen: leave one of them out")
    if settings.keep_clients == "new" and not settings.new_clients:
        raise UserError("[data] keep_clients = 'new' selects no client: set [data] new_clients")
    if settings.new_draw == "code" and not settings.new_clients:
        raise UserError("[data] new_draw = 'code' draws no client: set [data] new_clients")
    if settings.folds == 1 or (settings.folds and settings.fold >= settings.folds):
        raise UserError(
            f"[data] folds = {settings.folds}, fold = {settings.fold}: give at least 2 folds, and a fold in 0..folds-1"
        )
    if _splits(settings) and (
        not settings.balance or settings.classes or settings.subsample < 1.0 or settings.folds or settings.validation
    ):
        raise UserError(
            "[data] replay repeats pFedFDA's script: leave balance on, and classes, subsample, folds and validation off"
        )
    if _splits(settings) and settings.keep < 1.0 and settings.keep_clients != "all":
        raise UserError("[data] replay keeps rows as pFedFDA's script does, of all clients: leave keep_clients out")


def _splits(settings: DataSettings) -> bool:
    """Return whether the partition makes train and test rows itself, as pFedFDA's script does."""
    return settings.replay > 0 and settings.partition in ("auto", "dirichlet")


def _is_natural(examples: Examples, settings: DataSettings) -> bool:
    """Return whether the data set's own clients are kept."""
    return settings.partition == "natural" and len(examples.owner_names) > 0


def _number(examples: Examples, settings: DataSettings) -> int:
    """Return the number of clients to make."""
    return settings.clients or (len(examples.owner_names) if _is_natural(examples, settings) else DEFAULT_CLIENTS)


def _chosen(examples: Examples, settings: DataSettings) -> DataSettings:
    """Return the settings with the partition that ``auto`` means, after checking that they fit the data set."""
    own = len(examples.owner_names)
    if settings.partition == "auto":
        scheme = "natural" if own else "dirichlet" if examples.num_classes else "iid"
        settings = replace(settings, partition=scheme)
        _check_partition(settings)
    scheme, natural = settings.partition, _is_natural(examples, settings)
    if scheme in PARTITIONS.shipped and scheme not in _WITHOUT_CLASSES and not examples.num_classes:
        raise UserError(f'[data] partition = "{scheme}" deals rows by class, but targets are not classes: use "iid"')
    clients = _number(examples, settings)
    if natural and clients > own:
        raise UserError(f"[data] clients is {clients}, but the data set has {own} clients of its own: lower it")
    if settings.new_clients >= clients:
        raise UserError(
            f"{settings.new_clients} of {clients} clients cannot be new: lower [data] new_clients, "
            "so that at least one client takes part in training"
        )
    if settings.pool == "split" and examples.official_test is None:
        raise UserError(f'{settings.name!r} has no official test rows to keep separate: set [data] pool = "train+test"')
    return settings


def _spread(examples: Examples, settings: DataSettings, seed: int, skip_empty: bool) -> tuple[FederatedData, Partition]:
    settings = _chosen(examples, settings)
    marks, natural = examples.official_test, _is_natural(examples, settings)
    apart = marks is not None and (settings.pool == "split" or (settings.pool == "auto" and natural))
    if apart and not natural and not examples.num_classes:
        raise UserError('[data] pool = "split" deals test rows by class, but the targets are not classes: leave it out')
    if apart and (settings.folds or _splits(settings)):
        key = "folds" if settings.folds else "replay"
        raise UserError(f'[data] {key} makes its own test rows: set pool = "train+test"')

    rng = generator(seed, PARTITION)
    everything = _subsample(len(examples.y), settings.subsample, seed)
    rows = everything[~marks[everything]] if apart and marks is not None else everything
    known = _known(examples, rows, marked=not apart)
    wanted = replace(settings, clients=_number(examples, settings))
    found = split_rows(known, wanted, rng, own_number=not settings.clients)
    lists = [rows[part] for part in found.lists]
    clients, train_lists, test_lists = len(lists), lists, None
    if found.test is not None and found.train is not None:
        train_lists, test_lists = ([rows[part] for part in parts] for parts in (found.train, found.test))
        settings = replace(settings, keep=1.0)  # done already
    elif apart and marks is not None:
        others = everything[marks[everything]]
        if natural and examples.owner is not None:
            test_lists = [others[examples.owner[others] == i] for i in range(clients)]
        else:
            parts = follow(known.labels, found.lists, examples.y[others], rng)
            test_lists = [others[part] for part in parts]

    train, test, val = cut(train_lists, settings, seed, test_lists)
    pairs = assign(settings, clients)
    x, conditions = examples.x, tuple(str(pair or "clean") for pair in pairs)
    if any(pairs):
        x = corrupted(x, [np.concatenate(parts) for parts in zip(train, test, val, strict=True)], pairs)
    seen = views(examples, found, settings, seed)
    pool = pool_of(
        x,
        examples.y,
        train,
        test,
        val,
        num_classes=examples.num_classes,
        names=examples.owner_names[:clients] if natural else found.names(),
        new_clients=settings.new_clients,
        transform=seen.transform,
        extra=seen.extra,
        skip_empty=skip_empty,
        contract=examples.contract,
        notes=examples.notes,
    )
    told = seen.conditions or (conditions if any(pairs) else found.conditions or _domains(examples, train, test, val))
    told = tuple(condition for condition, rows in zip(told, train, strict=False) if len(rows))  # of those kept
    return pool, found._replace(lists=lists, train=list(train), test=list(test), conditions=told)


def _domains(examples: Examples, *splits: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Return each client's domain, "" for one without rows; nothing if a client has several, or the data have none."""
    if examples.domain is None:
        return ()
    found = [np.unique(examples.domain[np.concatenate(parts)]).tolist() for parts in zip(*splits, strict=True)]
    if any(len(own) > 1 for own in found):
        return ()
    return tuple(examples.domain_names[own[0]] if own else "" for own in found)


def _subsample(rows: int, share: float, seed: int) -> np.ndarray:
    """Return the rows that are used at all, ascending."""
    if share == 1.0:
        return np.arange(rows)
    return np.sort(generator(seed, SUBSAMPLE).permutation(rows)[: max(1, share_of(share, rows))])


def _known(examples: Examples, rows: np.ndarray, marked: bool) -> Known:
    def of(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else np.asarray(values)[rows]

    return Known(
        np.asarray(examples.y)[rows],
        of(examples.owner),
        of(examples.domain),
        examples.domain_names,
        of(examples.official_test) if marked else None,
    )


def _client_arrays(name: str, client: Any, where: str = "") -> ClientArrays:
    where = where or f"client {name!r}"
    if isinstance(client, Dataset):
        return ClientArrays(name, where, *_read_dataset(client, where))
    if isinstance(client, tuple | list) and len(client) == 2 and all(isinstance(d, Dataset) for d in client):
        return ClientArrays(name, where, *(part for d in client for part in _read_dataset(d, where)))
    if isinstance(client, tuple | list) and len(client) in (2, 4):
        return ClientArrays(name, where, *(_from_tensor(part) for part in client))
    raise UserError(
        f"{where} is a {type(client).__name__}: give (x, y), (x, y, x_test, y_test), a torch Dataset, "
        "or a pair of Datasets for training and test"
    )


def _from_tensor(part: Any) -> Any:
    if not isinstance(part, torch.Tensor):
        return part
    part = part.detach().cpu()
    return (part.float() if part.dtype == torch.bfloat16 else part).numpy()


def _read_dataset(dataset: "Dataset[Any]", where: str) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(f"the Dataset of {where} has no length: give one with __len__ and __getitem__")
    pairs = [dataset[i] for i in range(len(dataset))]
    try:
        xs = [np.asarray(_from_tensor(x)) for x, _ in pairs]
        ys = [np.asarray(_from_tensor(y)) for _, y in pairs]
        _check_repeats(dataset, xs, where)
        return (np.stack(xs), np.stack(ys)) if pairs else (np.empty(0), np.empty(0))
    except (TypeError, ValueError) as error:
        raise UserError(f"the Dataset of {where} does not give (x, y) pairs of one shape: {reason(error)}") from None


def _check_repeats(dataset: "Dataset[Any]", xs: Sequence[np.ndarray], where: str) -> None:
    """Refuse a Dataset whose examples change from one reading to the next: it is read once."""
    for i, first in enumerate(xs[:_READ_AGAIN]):
        again = np.asarray(_from_tensor(dataset[i][0]))
        if first.dtype != object and again.tobytes() != first.tobytes():
            raise UserError(
                f"the Dataset of {where} gives another example {i} each time it is read, and it is read once: leave "
                "its augmentation out, and give it as transform"
            )
