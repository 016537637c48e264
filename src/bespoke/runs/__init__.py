"""From an experiment to a run in its folder."""
