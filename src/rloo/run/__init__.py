"""A run put together: trainer, session, checkpoints, evaluation, plan."""
