"""Inputs in other units are noticed when the data are loaded."""

import pytest
import torch
from small_runs import experiment
from toy import data_of

import bespoke
from bespoke.data import odd_scales, scales

LISTS = [range(10 * i, 10 * i + 10) for i in range(5)]
Y = torch.zeros(50, dtype=torch.int64)


def rows(*shape):
    return torch.randn(50, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(4,), (1, 3, 3)])
@pytest.mark.parametrize("factor", [1e4, 1e-4, 1e38])
def test_a_client_in_other_units_is_named(shape, factor):
    x = rows(*shape)
    assert odd_scales(data_of(x, Y, LISTS)) == []
    x[20:30] *= factor
    (note,) = odd_scales(data_of(x, Y, LISTS))
    assert "inputs seem to be in other units on client 2 (" in note and "client 1" not in note


def test_one_feature_in_other_units_is_enough_and_a_rare_one_is_not_odd():
    x = rows(4) * torch.tensor([1e3, 1.0, 1.0, 1.0])
    x[:, 3] = 0.0
    x[5, 3] = 1.0
    assert odd_scales(data_of(x, Y, LISTS)) == []
    x[10:20, 2] *= 2000
    (note,) = odd_scales(data_of(x, Y, LISTS))
    assert "client 1 (" in note


def test_tokens_bytes_and_two_clients():
    tokens = torch.randint(0, 9, (50, 4))
    tokens[:10] = 0
    assert odd_scales(data_of(tokens, Y, LISTS)) == []
    dark = torch.full((50, 1, 2, 2), 200, dtype=torch.uint8)
    dark[:10] = 1
    (note,) = odd_scales(data_of(dark, Y, LISTS))
    assert "client 0 (" in note


def test_few_clients():
    x = rows(4)
    x[:10] *= 1e-6
    x[:, 3] = 0.0
    x[12, 3] = 1.0
    for count in (3, 4):
        (note,) = odd_scales(data_of(x, Y, LISTS[:count]))
        assert "client 0 (" in note and "client 1" not in note and "client 2" not in note
    assert odd_scales(data_of(x, Y, LISTS[1:3])) == odd_scales(data_of(x, Y, LISTS[:1])) == []
    (note,) = odd_scales(data_of(x, Y, LISTS[:2]))
    assert note == "inputs of client 0 and client 1 seem to be in different units: check the data"


def test_many_odd_clients_are_counted():
    x = rows(4).repeat(4, 1)
    lists = [range(10 * i, 10 * i + 10) for i in range(20)]
    for client in range(8):
        x[10 * client : 10 * client + 10] *= 1e5
    (note,) = odd_scales(data_of(x, torch.zeros(200, dtype=torch.int64), lists))
    assert "client 4 (" in note and "client 5 (" not in note and "and 3 more" in note


def test_a_run_tells_of_it():
    x, y = rows(4), torch.arange(50) % 2
    clients = {f"hospital {i}": (x[10 * i : 10 * i + 10] * (1e4 if i == 3 else 1.0), y[:10]) for i in range(5)}
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    run = bespoke.federate(clients, model, "0", rounds=1)
    assert any("hospital 3" in note and "other units" in note for note in run.notes)
    assert bespoke.run(experiment(rounds=1)).notes == []


def test_of_large_pictures_few_rows_are_looked_at_and_of_tables_all(monkeypatch):
    pictures, tables = rows(1, 3, 3), rows(9)
    for x in (pictures, tables):
        x[16:20] *= 1e5  # client 1 from its seventh row on
    monkeypatch.setattr(scales, "NUMBERS", 9)
    assert odd_scales(data_of(pictures, Y, LISTS)) == []
    (note,) = odd_scales(data_of(tables, Y, LISTS))
    assert "client 1 (" in note
