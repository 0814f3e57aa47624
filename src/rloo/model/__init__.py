"""The model that is trained: loading, forward passes, log-probs, gradients, memory."""
