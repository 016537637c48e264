"""The server's side as an ordinary Flower app: an experiment over whatever nodes its grid shows."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bespoke.errors import UserError
from bespoke.flower.link import FlowerLink
from bespoke.runs.experiment import load
from bespoke.runs.serving import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config names, on this machine."""
    given = context.run_config
    if absent := [name for name in ("experiment", "out") if not given.get(name)]:
        raise UserError(f"the run config has no {absent[0]}: give it to flwr run with --run-config")
    experiment, _ = load(str(given["experiment"]))
    serve(experiment, FlowerLink(grid), Path(str(given["out"])), resume=bool(given.get("resume")))
