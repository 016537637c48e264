"""How the one loop over minibatches runs: for one client alone, for lanes of clients, recorded as CUDA graphs."""
