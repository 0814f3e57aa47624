"""A whole run: trainer, session, checkpoints, evaluation, plan."""
