"""The memory of a token's activations, computed without a model."""


def activation_bytes(layers: int, width: int, *, half: bool, checkpointing: bool) -> int:
    """Bytes of activations per token on a GPU. A layer stores about 34 numbers per hidden unit for
    the backward (Korthikanti et al., arXiv 2205.05198, without the attention scores). In 16 bits
    (`half`), half of these numbers (norms, residual stream) stay float32. With `checkpointing`,
    only one layer has activations, and each layer one float32 state."""
    number = 3 if half else 4
    a_layer = 34 * number * width
    return a_layer + 4 * layers * width if checkpointing else layers * a_layer
