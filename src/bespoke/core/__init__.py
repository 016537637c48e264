"""Everything a method may use: trees, keys, data, tasks, the client's desk, and the nine hooks."""
