"""A paper with a small table of its own, for the tests of tables."""

RUN = """\
# Three classes over six clients.
seed = 0
[data]
name = "gaussian"
rows = 240
dim = 3
num_classes = 3
clients = 6
alpha = 0.5
[model]
name = "linear"
[training]
rounds = 4
lr = 0.3
[evaluation]
every = 2
"""
TABLE = """\
# A table for the tests.
paper = "Paper"
source = "Table 1"
title = "Accuracy"
[[row]]
id = "fedavg"
label = "FedAvg"
[[row]]
id = "fedper"
[[cell]]
id = "a"
base = "small"
published = { fedavg = 62.5, fedper = 70 }
[[cell]]
id = "b"
base = "small"
set = ["data.alpha=0.1"]
[[cell]]
id = "c"
base = "small"
set = ["data.alpha=0.1"]
statistic = "mean"
rows = ["fedavg"]
"""


def write(folder, table=TABLE, run=RUN):
    """Write the paper's run file and table, and return the table's file."""
    tables = folder / "paper" / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    (tables.parent / "small.toml").write_text(run)
    (tables / "t1.toml").write_text(table)
    return tables / "t1.toml"
