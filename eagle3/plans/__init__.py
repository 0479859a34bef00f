"""Before a long run: what would run, what it costs, and whether this machine can."""
