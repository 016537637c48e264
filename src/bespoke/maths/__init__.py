"""Mathematics that methods share: for one client, with fixed shapes and masks."""
