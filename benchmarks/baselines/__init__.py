"""Learning curves and gradient variance of RLOO and related estimators: see `docs/baselines.md`."""
