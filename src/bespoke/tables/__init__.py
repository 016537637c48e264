"""The papers' tables and figures: what they print, what is run for them, and ours beside theirs."""
