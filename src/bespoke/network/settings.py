"""The ``[federation]`` table of an experiment: how a server waits for clients on machines of their own."""

from dataclasses import dataclass

from bespoke.core.settings import knob


@dataclass(frozen=True)
class FederationSettings:
    """The ``[federation]`` table: how a real federation is carried out, which its result does not depend on."""

    round_timeout: float = knob(600.0, "seconds to wait for the answers of a round", above=0, high=604_800)
    quorum: int = knob(1, "clients without whom the run does not start, and a round does not count", low=1)
    interval: float = knob(0.2, "seconds between two looks for answers", above=0, high=60)
    most_rows: int = knob(10_000_000, "largest number of rows that a client may declare", low=1)
