"""Where rows come from, and how they are kept and checked."""
