"""Pictures in folders: each client gets a model of its own, as a file that another program loads.

    python examples/own_images.py [FOLDER]

FOLDER, by default own_images_example, gets pictures FOLDER/scans/CLIENT/CLASS/*.png of handwritten digits, which are
then read as anybody's pictures would be, and a model for each client.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import bespoke

CLIENTS = {"north": (0, 1, 2, 3), "east": (2, 3, 4, 5), "south": (4, 5, 6, 7), "west": (6, 7, 8, 9)}


def write_pictures(root: Path) -> None:
    """Write digits as pictures of 8 x 8 pixels: each client has four of the ten classes, and every row one owner."""
    digits = load_digits()
    for place, (client, classes) in enumerate(CLIENTS.items()):
        for label in classes:
            folder = root / client / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            for row in np.flatnonzero(digits.target == label)[place::4]:
                Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).save(folder / f"{row:04}.png")


def network() -> nn.Module:
    """Return the network: every client starts from the same weights, which the seed of the run decides."""
    body = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.ReLU())
    return nn.Sequential(*body, nn.Linear(32, 10))


def main() -> None:
    """Read the pictures, train, save a model for each client, and load one again."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "own_images_example")
    write_pictures(folder / "scans")
    scans = bespoke.data.from_image_folder(folder / "scans")
    print(scans)
    run = bespoke.federate(
        scans, network, head="6", algorithm="fedrep", rounds=6, lr=0.2, batch=16, transform=bespoke.data.Crop(pad=1)
    )
    for name, model in run.models.items():
        model.save(folder / f"{name}.safetensors")
        print(f"{name:6} accuracy on its own test pictures {model.about['score']['value']:.3f}")

    # In another program: the file holds no rows; only the network has to be given again.
    model = bespoke.load_model(folder / "north.safetensors", model=network)
    x, _ = bespoke.data.read_rows(folder / "scans" / "north" / "digit 2", scans.contract)
    found = [model.class_names[i] for i in model.predict(x)]
    print(f"north's model calls {found.count('digit 2')} of its {len(found)} pictures of a 2 a 2")


if __name__ == "__main__":
    main()
