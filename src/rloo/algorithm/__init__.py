"""The method. Read in this order: train, rollout, advantages, update, objective."""
