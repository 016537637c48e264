"""The data contract of a real federation: the form that every client's rows have, and no row."""

from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from bespoke.core.data import FederatedData, Rows
from bespoke.core.inputs import Column, InputContract
from bespoke.core.settings import refuse_given
from bespoke.data.examples import Examples
from bespoke.data.federate import check_settings
from bespoke.data.images.views import views
from bespoke.data.partition.basic import Partition
from bespoke.data.settings import DataSettings
from bespoke.data.transforms import as_transform, step_of
from bespoke.errors import UserError

CONTRACT = "contract"  # [data] name

_TAKES = (
    "name",
    "shape",
    "dtype",
    "class_names",
    "num_classes",
    "targets",
    "features",
    "label",
    "size",
    "clients",
    "test",
    "validation",
    "augment",
    "normalise",
    "transform",
)
_TRIED = 8  # made-up rows that a transform is tried on


def contract_of(settings: DataSettings) -> InputContract:
    """Return the form of the clients' rows; a feature ``sex=F`` is the category F of the column sex."""
    columns = _columns(settings.features)
    width = sum(len(column.features) for column in columns)
    shape = settings.shape or ((width,) if columns else ())
    if not shape:
        raise UserError("[data] a contract needs the shape of one example: set shape, or features for a table")
    if columns and shape != (width,):
        raise UserError(f"[data] shape = {list(shape)}, but features names {width} numbers: leave shape out")
    if columns and (settings.dtype != "float32" or not settings.label):
        raise UserError('[data] a contract of tables needs label, the column of the targets, and dtype = "float32"')
    if settings.size and (settings.dtype != "uint8" or len(shape) != 3 or shape[1:] != (settings.size,) * 2):
        raise UserError(
            f'[data] size = {settings.size} resizes pictures: set dtype = "uint8" and shape = [3, {settings.size}, '
            f"{settings.size}], or 1 in place of 3 where they are grey"
        )
    resized = settings.size > 0
    return InputContract(shape, settings.dtype, columns, settings.class_names, settings.label, resized)


def _columns(features: tuple[str, ...]) -> tuple[Column, ...]:
    """Return the columns of a table, from the names of its features in order."""
    found = []
    for name, group in groupby(features, key=lambda feature: feature.partition("=")[0]):
        own = list(group)
        if any("=" in feature for feature in own) and not all("=" in feature for feature in own):
            raise UserError(f"[data] features has {name!r} with a category and without: write one of them")
        found.append(Column(name, tuple(feature.partition("=")[2] for feature in own if "=" in feature)))
        if not name or (len(own) > 1 and not found[-1].categories):
            raise UserError(f"[data] features names {name!r} twice, or nothing: name each column once")
    return tuple(found)


def agreed(settings: DataSettings) -> FederatedData:
    """Return the federation of a contract: its clients, the form of their rows and what is done to them, and no row."""
    check_settings(settings)
    others = {field.name for field in fields(settings)}.difference(_TAKES)
    refuse_given(settings, "[data]", others, f"a {CONTRACT}", _TAKES[1:])
    contract, named = contract_of(settings), len(settings.class_names)
    if settings.clients < 1:
        raise UserError("[data] a contract needs the number of clients that train: set clients")
    if named and settings.num_classes not in (0, named):
        raise UserError(f"[data] num_classes = {settings.num_classes}, but class_names has {named}: leave one out")
    if settings.normalise == "pixel":
        raise UserError('[data] normalise = "pixel" needs all rows, which nobody has here: write transform instead')
    classes = named or settings.num_classes
    if classes and settings.targets != 1:
        raise UserError(f"[data] targets = {settings.targets} means nothing beside classes: leave it out")
    x = np.zeros((_TRIED, *contract.shape), contract.dtype)
    examples = Examples(x, np.zeros(_TRIED, np.int64), classes, contract=contract)
    if settings.transform:
        steps = [step_of(text, "[data] transform") for text in settings.transform]
        examples = replace(examples, transform=as_transform(steps, x))
    nobody: list[Any] = [np.empty(0, np.int64)] * settings.clients
    seen, none = views(examples, Partition(nobody), settings, 0), Rows.of(nobody)
    numbers = torch.empty(0, settings.targets) if settings.targets > 1 else torch.empty(0)
    return FederatedData(
        x=torch.from_numpy(x[:0]),
        y=torch.empty(0, dtype=torch.int64) if classes else numbers,
        train=none,
        test=none,
        val=none,
        num_classes=classes,
        num_clients=settings.clients,
        names=tuple(map(str, range(settings.clients))),
        extra=seen.extra,
        transform=seen.transform,
        contract=contract,
    )
