"""The judge of checkpoints: config rules, the simulated load, weight values and the engine as witness."""
