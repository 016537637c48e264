"""Five hospitals with a CSV file each get a model each; a sixth comes later and gets one from the run's folder alone.

    python examples/own_csv.py [FOLDER]

FOLDER, by default own_csv_example, gets the made-up files FOLDER/hospitals/*.csv, the run and the models.
"""

import sys
from pathlib import Path

import numpy as np
from torch import nn

import bespoke


def write_patients(path: Path, patients: int, seed: int) -> None:
    """Write made-up patients; how age and weight count for the outcome differs between hospitals."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["age,sex,bmi,outcome"]
    for _ in range(patients):
        age, sex, bmi = rng.integers(20, 90), rng.choice(["F", "M"]), rng.normal(26, 4)
        risk = (seed % 3) * (age - 55) / 20 + (bmi - 26) / 4 + 0.5 * (sex == "M") + rng.normal(0, 0.3)
        lines.append(f"{age},{sex},{bmi:.1f},{'ill' if risk > 0 else 'well'}")
    path.write_text("\n".join(lines) + "\n")


def network() -> nn.Module:
    """Return the network: four features (age, sex=F, sex=M, bmi), two classes."""
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


# Of each feature: what all hospitals may know beforehand, not what is computed from their rows.
UNITS = bespoke.data.Normalise(mean=(55, 0.5, 0.5, 26), deviation=(20, 0.5, 0.5, 4))


def main() -> None:
    """Train with five hospitals, then serve the sixth."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "own_csv_example")
    for i, name in enumerate(("ada", "bonn", "cairo", "delhi", "essen")):
        write_patients(folder / "hospitals" / f"{name}.csv", 150, seed=i)
    hospitals = bespoke.data.from_csv(folder / "hospitals" / "*.csv", label="outcome")
    print(hospitals)
    run = bespoke.federate(
        hospitals,
        network,
        head="2",
        algorithm="fedavg_ft",
        rounds=20,
        lr=0.1,
        transform=UNITS,
        out=folder / "run",
        resume=True,  # a second call of this program finds the run complete
    )
    for name, model in run.models.items():
        model.save(folder / f"{name}.safetensors")
        print(f"{name:6} accuracy on its own test patients {model.about['score']['value']:.3f}")

    # Later, in another program: neither the data nor the models of the five are there, only the run's folder.
    write_patients(folder / "sixth.csv", 100, seed=7)
    write_patients(folder / "sixth_later.csv", 200, seed=7 + 30)
    opened = bespoke.open_run(folder / "run", model=network)
    x, y = bespoke.data.read_rows(folder / "sixth.csv", hospitals.contract)
    model = opened.personalize(x, y)
    model.save(folder / "sixth.safetensors")
    later, outcomes = bespoke.data.read_rows(folder / "sixth_later.csv", hospitals.contract)
    print(f"sixth  accuracy on patients that came later {model.score(later, outcomes):.3f}")


if __name__ == "__main__":
    main()
