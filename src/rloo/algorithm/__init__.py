"""The method. Read: train, rollout, baselines, estimators, advantages, loss, update."""
