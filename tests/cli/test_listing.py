"""``bespoke list settings``: every setting with its type, default and meaning."""

import json
from dataclasses import asdict, fields

import pytest
from small_runs import command

import bespoke
from bespoke.cli.listing import settings
from bespoke.network.settings import FederationSettings
from bespoke.runs.experiment import changed, literal, table_names


def listed(*words):
    done = command("list", "settings", *words)
    assert done.code == 0, done.err
    return done.out


def test_every_setting_of_an_experiment_is_listed():
    found, tables = settings(None), bespoke.Experiment().tables() | {"federation": asdict(FederationSettings())}
    assert list(found) == table_names() == [name for name in tables if name not in ("seed", "algorithm")]
    for name, rows in found.items():
        assert {key: row["default"] for key, row in rows.items()} == tables[name]
        assert all(row["meaning"] and row["type"] for row in rows.values())


def test_a_listed_default_can_be_written_as_a_setting():
    experiment = bespoke.Experiment()
    for name, rows in settings(None).items():
        for key, row in rows.items():
            if row["default"] != "":
                assert changed(experiment, [f"{name}.{key}={literal(row['default'])}"]) == experiment


def test_one_table_as_text():
    lines = listed("training").splitlines()
    assert lines[0] == "[training]" and len(lines) == 1 + len(fields(bespoke.Training))
    assert lines[7].split() == ["lr", "float", "0.05", "learning", "rate", "(greater", "than", "0)"]
    assert "features            list of str  []" in listed("data")


def test_a_method_s_settings_have_the_defaults_of_its_name():
    assert '[algorithm] name = "fedavg_ft"\nfinetune_epochs  int    5 ' in listed("fedavg_ft")
    assert listed("local") == '[algorithm] name = "local"\nno settings of its own\n'


def test_settings_as_json():
    found = json.loads(listed("evaluation", "--json"))
    assert found["evaluation"]["every"] | {"meaning": ""} == {"type": "int", "default": 0, "meaning": ""}


@pytest.mark.parametrize(
    ("word", "told"), [("trainin", "did you mean 'training'?"), ("algorithm", "give a method's name"), ("x:y", "'x:y'")]
)
def test_a_table_that_is_none(word, told):
    assert told in command("list", "settings", word).sentence
