"""Numbers that are counted from models and methods, and how they become results of a table."""

import paper_tables
import pytest
from small_runs import command

from bespoke.errors import UserError
from bespoke.tables import counting, results, spec
from bespoke.tables.beside import Reader


def value(table, id):
    return counting.counted(spec.find(table).entry(id))["value"]


def test_the_parts_of_a_model():
    assert value("pfedfda/t8", "cifar_cnn/body") == 106_400
    assert value("pfedfda/t8", "cifar_cnn/linear") == 128 * 100 + 100
    assert value("pfedfda/t8", "cifar_cnn/gaussian") == 128 * 100 + 128 * 129 // 2


def test_classes_of_the_settings_come_first():
    assert value("pfedfda/t8", "mobilenet/linear") == 1024 * 1000 + 1000


def test_what_a_client_trains():
    whole = value("fedpce/t1", "parameters_col/fedavg")
    assert value("fedpce/t1", "parameters_col/fedper") == value("fedpce/t1", "parameters_col/fedbn") == whole
    assert value("fedpce/t1", "parameters_cl/fedper") == 512 * 10 + 10
    assert value("fedpce/t1", "parameters_cl/fedpce") == 32
    assert value("fedpce/t1", "parameters_col/fedpce") > 1.05 * whole  # the nets that turn an embedding into norms


def test_they_become_results(tmp_path):
    done = command("sweep", "pfedvmp/t4", "--results", tmp_path / "results")
    assert done.code == 0 and done.out == "8 numbers counted; nothing of this is trained\n"
    numbers = {n.entry.id: n.mean for n in Reader(tmp_path / "results").beside(spec.find("pfedvmp/t4")).numbers}
    assert numbers["cifar10/linear"] == 512 * 10 + 10 and len(numbers) == 8


def test_they_are_no_trainings(tmp_path):
    counting.count([spec.find("pfedvmp/t4")], tmp_path)
    assert not list(results.everything(tmp_path))


def test_what_cannot_be_counted_is_refused(tmp_path):
    cell = '[[cell]]\nid = "size"\nkind = "benchmark"\nhow = "parameters"\nbase = "easy"\n'
    table = paper_tables.make(tmp_path, paper_tables.TABLE + cell)
    with pytest.raises(UserError, match="'digits' is no data set of the catalogue"):
        counting.count([table], tmp_path / "results")
    (tmp_path / "experiments/maker/easy.toml").write_text('[data]\nname = "mnist"\n[model]\nname = "mlp"\n')
    with pytest.raises(UserError, match="there is no row 'fedavg' among the parameters; use body, linear, gaussian"):
        counting.count([table], tmp_path / "results")
