"""Tasks and environments of other projects, as rewards, datasets and rollouts."""
