"""Learning curves and gradient variance of RLOO and its relatives: see `docs/baselines.md`."""
