"""The RLOO algorithm. Read: train, rollout, baselines, estimators, advantages, loss, update."""
