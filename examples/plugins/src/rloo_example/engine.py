"""`lightest`: an engine. It samples with transformers' generate, under a name of its own."""

from dataclasses import replace

from rloo.config.engine_spec import EngineSpec


def make(inputs):
    """The engine of transformers that reports another name. An engine of a server would connect to
    it here, and send it `inputs.weights` whenever `load` is called."""
    from rloo.engines.engine_registry import MAKERS

    engine, note = MAKERS["hf"](inputs)
    engine.capabilities = replace(engine.capabilities, name="lightest")
    return engine, note


def check(config):
    """Refuse what this engine cannot do."""
    if config.top_k:
        raise ValueError("the engine lightest takes no top_k (top_k)")


LIGHTEST = EngineSpec(make, check)
