"""The memory of a token's activations and the tokens of a micro-batch, without a model."""


def activation_bytes(layers: int, width: int, *, half: bool, checkpointing: bool) -> int:
    """Bytes of activations per token on a GPU. A layer stores about 34 numbers per hidden unit for
    the backward (Korthikanti et al., arXiv 2205.05198, without the attention scores). In 16 bits
    (`half`), half of these numbers (norms, residual stream) stay float32. With `checkpointing`,
    only one layer has activations, and each layer one float32 state."""
    number = 3 if half else 4
    a_layer = 34 * number * width
    return a_layer + 4 * layers * width if checkpointing else layers * a_layer


def tokens_at_once(free: float, token: float) -> int:
    """Tokens of a micro-batch whose activations, `token` bytes each, take a quarter of the `free`
    bytes of a GPU: from 1,024 to 65,536."""
    return max(1024, min(65536, int(free / 4 // token)))
