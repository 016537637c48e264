"""``python -m bespoke``, which ``torchrun -m bespoke`` needs."""

from bespoke.cli.main import main

main()
