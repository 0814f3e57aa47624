"""Other projects' tasks and environments as rewards, datasets and rollouts."""
