"""A model's folder gives all of its weights, or is refused with the names of those it lacks."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from rloo import RLOOConfig, RLOOTrainer
from rloo.model import lora
from rloo.model.model_loading import load_model
from support.models import CPU, make_model
from support.text import make_tokenizer

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make_model("qwen3").save_pretrained(folder)  # its head is its own
    make_tokenizer().save_pretrained(folder)
    return folder


def spoilt(saved: Path, folder: Path, file: str = "model.safetensors", **changed) -> str:
    """A copy in which tensors, by name with _ for dots, have other values or (None) are gone."""
    shutil.copytree(saved, folder / "model")
    tensors = load_file(saved / file)
    for name, value in changed.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model" / file, metadata={"format": "pt"})
    return str(folder / "model")


def load(name: str, **options):
    return load_model(RLOOConfig(model=name, **options), device=CPU)[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({QUERY: None}, f"has no weights for {QUERY}, which would be random"),
        ({"lm_head.weight": None}, "has no weights for lm_head.weight, which would be random"),
        ({"score.weight": torch.ones(1)}, "weights for which it has no place: score.weight"),
        ({QUERY: torch.ones(16, 32)}, rf"as {QUERY} \(16, 32\), not \(32, 32\)"),
        ({QUERY: torch.full((32, 32), torch.nan)}, f"{QUERY} of the model .* is not finite"),
        (
            {QUERY: torch.ones(32, 32, dtype=torch.int8)},
            rf"has integers for {QUERY}; .* its config.json must say how they are quantised",
        ),
    ],
)
def test_weights_that_are_not_all_there_are_refused_by_name(saved, tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        load(spoilt(saved, tmp_path, **changed))


def test_a_new_head_is_random_where_it_is_allowed_and_is_named(saved, tmp_path):
    folder = spoilt(saved, tmp_path, **{"lm_head.weight": None, "score.weight": torch.ones(1)})
    with pytest.warns(UserWarning, match=r"no weights for lm_head.weight.*no place: score.weight"):
        model = load(folder, allow_missing_weights=True)
    assert torch.equal(model.state_dict()[QUERY], load_file(saved / "model.safetensors")[QUERY])
    assert model.lm_head.weight.isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 20_000}, "num_hidden_layers 20,000; it may have at most 10,000"),
        ({"vocab_size": 10**12}, "vocab_size 1,000,000,000,000 and hidden_size 32; one matrix"),
        ({"head_dim": 10**12}, r"heads \d+ and head_dim 1,000,000,000,000 and hidden_size 32; one"),
        ({"num_attention_heads": 10**12}, "num_attention_heads 1,000,000,000,000 and head_dim"),
        ({"num_experts": 10**12}, r"num_experts 1,000,000,000,000 and intermediate_size \d+ and"),
        (
            {"n_routed_experts": 10**6, "moe_intermediate_size": 10**6},
            "n_routed_experts 1,000,000 and moe_intermediate_size 1,000,000 and hidden_size 32",
        ),
    ],
)
def test_sizes_are_refused_before_anything_is_made(saved, tmp_path, config, message):
    folder = Path(spoilt(saved, tmp_path))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": None} | config))
    with pytest.raises(ValueError, match=message):
        load(str(folder))


def test_a_tokenizer_of_another_model_is_refused_at_the_row(saved, tmp_path):
    folder = Path(spoilt(saved, tmp_path))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["w5"] = 1000
    path.write_text(json.dumps(tokenizer))
    rows = Dataset.from_list([{"prompt": "w1 w2"}, {"prompt": "w4 w5"}])
    args = RLOOConfig(model=str(folder), use_cpu=True, bf16=False, max_completion_length=4)
    with pytest.raises(ValueError, match=r"row 1: the tokenizer makes token 1000 .* embeds 97"):
        RLOOTrainer(reward_funcs=lambda completions: [0.0], args=args, train_dataset=rows)


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (None, "the adapter .* has no weights for base_model.*q_proj.lora_A"),
        ("x_proj", "the adapter .* has weights that are unknown here: .*x_proj.lora_A"),
    ],
)
def test_an_adapter_that_is_not_all_there_is_refused_by_name(saved, tmp_path, renamed, message):
    peft = pytest.importorskip("peft")
    base = load(str(saved))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    lora.add_adapter(base, config).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    if renamed is None:
        del tensors[name]
    else:
        tensors[name.replace("q_proj", renamed)] = tensors[name].clone()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says it too, and goes on
        load(str(tmp_path))
