"""An engine with the name `lightest`. It samples with transformers' generate."""

from dataclasses import replace

from rloo.config.engine_spec import EngineSpec


def make(inputs):
    """The transformers engine with another name. An engine that uses a server would connect to the
    server here, and send `inputs.weights` to the server in every call of `load`."""
    from rloo.engines.engine_registry import MAKERS

    engine, note = MAKERS["hf"](inputs)
    engine.capabilities = replace(engine.capabilities, name="lightest")
    return engine, note


def check(config):
    """Raise ValueError for options that this engine does not support."""
    if config.top_k:
        raise ValueError("the engine lightest takes no top_k (top_k)")


LIGHTEST = EngineSpec(make, check)
