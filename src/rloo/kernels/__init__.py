"""Arithmetic of a CPU in C, built with the machine's own compiler when it is first used: for what
torch does in many small operations (a token of the sampler) or in many passes over memory (norms,
gated units, the vocabulary's softmax). Where it cannot be built, or is not wanted, torch computes.
"""
