"""Names and manners of TRL, transformers and accelerate."""
