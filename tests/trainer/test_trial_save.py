"""What cannot be saved, or could end no completion, is refused before the first sample."""

import tempfile

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from rloo import RLOOTrainer
from support.adapters import make_adapted
from support.models import COMMON, make_model
from support.policies import make_policy
from support.text import make_tokenizer
from support.training import ROWS, make_config, make_trainer


def change(model, tokenizer, name):
    if name == "tokenizer":
        tokenizer.init_kwargs["note"] = object()
    elif name == "config":
        model.config.note = object()
    elif name == "nothing":
        model.save_pretrained = lambda *_, **__: None
    elif name == "shared":
        first, second, *_ = model.model.layers
        second.mlp.up_proj.weight.data = first.mlp.up_proj.weight.data
    else:
        setattr(model.generation_config, name, 0.7)


FAULTS = {
    "temperature": "`temperature` is set to `0.7`",
    "top_p": "`top_p` is set to `0.7`",
    "config": "object is not JSON serializable",
    "tokenizer": "object is not JSON serializable",
    "shared": "up_proj",
    "nothing": "save_pretrained has written no weights",
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_saved_is_refused_before_the_first_sample(name, tmp_path):
    def reward(**_):
        raise AssertionError("something was sampled")

    model, tokenizer = make_model("qwen3"), make_tokenizer()
    change(model, tokenizer, name)
    config = make_config(tmp_path)
    trainer = RLOOTrainer(model, reward, config, ROWS, processing_class=tokenizer)
    with pytest.raises(ValueError, match=rf"cannot be saved, so nothing .*{FAULTS[name]}"):
        trainer.train()


def make_large():
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**COMMON, **sizes}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["temperature", "config"])
def test_large_models_are_tried_without_their_weights(name):
    model = make_large()
    assert sum(p.nbytes for p in model.parameters()) > 2**26
    policy = make_policy(model)
    policy.files.try_save()
    change(model, None, name)
    with pytest.raises(ValueError, match=FAULTS[name]):
        policy.files.try_save()


def test_of_an_adapter_only_what_is_saved_is_tried():
    wrapper = make_adapted()
    policy = make_policy(wrapper)
    change(policy.model, None, "temperature")  # the base's, which is not written
    policy.files.try_save()
    wrapper.peft_config["default"].revision = object()
    with pytest.raises(ValueError, match="object is not JSON serializable"):
        policy.files.try_save()


def test_a_machine_without_a_temporary_folder_trains(tmp_path):
    usual, tempfile.tempdir = tempfile.tempdir, str(tmp_path / "gone")
    try:
        make_policy(make_model("llama")).files.try_save()
    finally:
        tempfile.tempdir = usual


def test_an_end_token_that_the_model_does_not_have_is_refused(tmp_path):
    config = make_config(tmp_path, generation_kwargs={"eos_token_id": [2, 10**6]})
    with pytest.raises(ValueError, match="eos_token_id is 1000000 but the model has 97 tokens"):
        make_trainer(config)
