"""Rewards, datasets and rollouts from tasks and environments of other projects."""
