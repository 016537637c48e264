"""``bespoke new``: a commented starting file with its test, for a method or an experiment."""

import contextlib
import importlib.util
import keyword
import re
import shlex
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from bespoke.errors import UserError, shown

app = typer.Typer(help="Write a commented starting file with its test.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="In small letters, digits and underscores, such as half_way.")]

_METHOD = Template('''\
"""$kind: say here in one line what the method does.

Run it:    bespoke run demo --algorithm $name:$kind --set training.rounds=5
Check it:  python test_$name.py
"""

from dataclasses import dataclass
from typing import final

import bespoke


@final
@dataclass(frozen=True)
class $kind(bespoke.Algorithm):
    """Each client predicts with a mixture of the global model and a fine-tuned copy of it: change this."""

    # The settings, each with its default, its meaning and its bounds: --set algorithm.own_share=0.3
    own_share: float = bespoke.knob(0.5, "share of the client's own model in the mixture", low=0, high=1)
    finetune_epochs: int = bespoke.knob(1, "epochs of fine-tuning before prediction", low=0)

    # What a client does in a round. `local` is its desk, with its train rows and nothing else; `down` is what the
    # server sent, `state` what client_init or the last round left here. Return the new state and the upload. States
    # and messages are trees: nested dicts of tensors.
    def client_update(self, local, state, down):
        """Train the received model on the client's own rows and send it back."""
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    # What a client predicts with. It may train, but it changes no state.
    def personalize(self, local, state, down):
        """Return the mixture of the newest model and a fine-tuned copy of it."""
        own, share = local.finetune(down["model"], self.finetune_epochs), self.own_share
        return bespoke.tree.map(lambda mine, common: share * mine + (1 - share) * common, own, down["model"])

    # Seven more hooks have defaults; write those that you need:
    #   client_init(self, task, params, client)              a client's first state, by default {}
    #   adapt(self, local, state, down)                      the state of one that never took part, by default as is
    #   predict(self, task, personal, x)                     outputs, or several by name: {"personal": ..., ...}
    #   server_init(self, task, params, num_clients, key)    the server's first state, by default {"model": params}
    #   broadcast(self, server)                              what every client is sent, by default {"model": ...}
    #   tailor(self, server, clients)                        what each is sent in addition, leaves (K, ...)
    #   aggregate(self, task, server, uploads, key)          the next state, by default the mean of every uploaded name
    # Names of the state that may never be uploaded:
    #   private = ("head",)
''')

_METHOD_TEST = Template('''\
"""Does $kind keep the contract of every method? Run by pytest, or as `python test_$name.py`."""

import bespoke

from $name import $kind


def test_the_contract():
    """One client after another equals a cohort at once, padding and neighbours change nothing, it learns, ..."""
    assert "learns" in bespoke.check_method($kind())


if __name__ == "__main__":
    test_the_contract()
    print("$kind keeps the contract")
''')

_EXPERIMENT = Template("""\
# $name: say here in one line what the experiment is about.
#
# Run it:            bespoke run $name.toml
# With another seed: bespoke run $name.toml --seed 1
# Another method:    bespoke run $name.toml --algorithm ditto
# Every setting:     bespoke list settings [TABLE]

seed = 0

[data]
name = "digits"            # bespoke list datasets; your own tables, pictures or arrays: docs/own_data.md
partition = "dirichlet"    # how rows become clients: bespoke list partitions
alpha = 0.3                # smaller is more skewed
clients = 10
# test = 0.2               # share of a client's rows that are test rows
# validation = 0.2         # share of its train rows to choose settings by
# new_clients = 2          # the last clients, which never train

[model]
name = "mlp"               # bespoke list models

[algorithm]
name = "fedrep"            # bespoke list algorithms, and bespoke list settings fedrep
# head_epochs = 5

[training]
rounds = 20
lr = 0.1
rate = 0.5                 # share of the clients that take part in a round
# epochs = 1
# batch = 32

[evaluation]
every = 5
""")

_EXPERIMENT_TEST = Template('''\
"""Can $name.toml be run? Run by pytest, or as `python test_$name.py`."""

from dataclasses import replace
from pathlib import Path

import bespoke
from bespoke.runs.experiment import load

FILE = Path(__file__).parent / "$name.toml"


def test_a_round_of_it_runs():
    """One round instead of all, on the experiment's own data."""
    experiment, _ = load(FILE)
    run = bespoke.run(replace(experiment, training=replace(experiment.training, rounds=1)))
    assert run.last_round == 1
    print(run)


if __name__ == "__main__":
    test_a_round_of_it_runs()
''')


@app.command()
def method(name: Name) -> None:
    """Write NAME.py, a method to change, and test_NAME.py, which checks it."""
    _check_name(name)
    kind = "".join(word.capitalize() for word in name.split("_"))
    _check_free(name)
    _write({f"{name}.py": _METHOD, f"test_{name}.py": _METHOD_TEST}, name=name, kind=kind)
    again = shlex.join(["bespoke", "run", "demo", "--algorithm", f"{name}:{kind}"])
    print(f"wrote {name}.py and test_{name}.py; next: python test_{name}.py, then {again}")


@app.command()
def experiment(name: Name) -> None:
    """Write NAME.toml, an experiment to change, and test_NAME.py, which runs a round of it."""
    _check_name(name)
    _write({f"{name}.toml": _EXPERIMENT, f"test_{name}.py": _EXPERIMENT_TEST}, name=name)
    print(f"wrote {name}.toml and test_{name}.py; next: python test_{name}.py, then bespoke run {name}.toml")


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", name) or keyword.iskeyword(name):
        raise UserError(
            f"a new file cannot be named {shown(name)}: use small letters, digits and underscores, as half_way"
        )


def _check_free(name: str) -> None:
    """Refuse the name of a shipped method, and of a module that the new file would hide from Python."""
    from bespoke.algorithms import ALGORITHMS

    if name in ALGORITHMS.shipped:
        raise UserError(f"{name} is one of bespoke's own methods: choose another name")
    if not Path(f"{name}.py").exists() and importlib.util.find_spec(name) is not None:
        raise UserError(f"{name} is a module that Python has already, which {name}.py would hide: choose another name")


def _write(files: dict[str, Template], **values: str) -> None:
    """Write all files to the working folder, or none; what is there already is not touched."""
    with contextlib.ExitStack() as undone:
        for path, text in files.items():
            try:
                with open(path, "x", encoding="utf-8") as file:
                    undone.callback(Path(path).unlink, missing_ok=True)
                    file.write(text.substitute(values))
            except FileExistsError:
                raise UserError(f"{path} is there already, and is not overwritten: choose another name") from None
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}; start in a folder of your own") from error
        undone.pop_all()
