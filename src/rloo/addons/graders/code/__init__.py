"""The reward `code`: runs the model's program in a sandbox and scores it with tests."""
