"""``python -m bespoke``, which ``torchrun -m bespoke`` needs."""

from bespoke.cli import main

main()
