"""Small models and data under the names that TRL's own tests ask the hub for: a working folder in
which `trl-internal-testing/zen` is a folder, as transformers and datasets look for one first.

    python -m support.trl_names FOLDER
"""

import sys
from pathlib import Path

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.vision_models import QwenImageProcessor, make_image, make_processor, make_vision_model

ORGANISATION = "trl-internal-testing"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|finetune_right_pad_id|>")
# So many tokens that one of TRL's tests may rely on none ending a completion.
MANY = {"tiny-Qwen2ForCausalLM-2.5": 4096}
_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ':' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
_COMMON = {
    "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# The last part of TRL's name -> configuration class and what is its own.
_TEXT_MODELS = {
    "tiny-Cohere2ForCausalLM": ("Cohere2Config", {"logit_scale": 1.0}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4MoeConfig",
        {**_EXPERTS, "n_routed_experts": 4, "head_dim": 2, "attention_bias": True},
    ),
    "tiny-GptOssForCausalLM": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    ),
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2Config", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 4}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4, "head_dim": 4}),
    "tiny-NemotronHForCausalLM-nano": (
        "NemotronHConfig",
        {
            **_EXPERTS, "hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16,
            "mamba_d_conv": 4, "mamba_expand": 2, "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False,
        },
    ),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaConfig", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2Config", {}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3Config", {"head_dim": 4}),
}  # fmt: skip
_VISION_MODELS = {
    "tiny-Gemma3ForConditionalGeneration": "gemma3",
    "tiny-LlavaNextForConditionalGeneration": "llava_next",
    "tiny-Qwen2VLForConditionalGeneration": "qwen2_vl",
    "tiny-Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": "qwen3_5",
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": "qwen3_5_moe",
}
# A model whose class is in its own folder.
_REMOTE = {
    "configuration_remote.py": (
        "from transformers import LlamaConfig\n\n\n"
        'class RemoteConfig(LlamaConfig):\n    model_type = "remote"\n'
    ),
    "modeling_remote.py": (
        "from transformers import LlamaForCausalLM\n\n"
        "from .configuration_remote import RemoteConfig\n\n\n"
        "class RemoteForCausalLM(LlamaForCausalLM):\n    config_class = RemoteConfig\n"
    ),
}


def make_tokenizer(words: int = 256) -> PreTrainedTokenizerFast:
    """One token a byte, then `words` in all of which nothing is read, and the special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"x{number}" for number in range(len(letters), words)), *SPECIAL]
    inner = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIAL[0], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


def _write_text_model(folder: Path) -> None:
    kind, own = _TEXT_MODELS[folder.name]
    tokenizer = make_tokenizer(MANY.get(folder.name, 256))
    config = getattr(transformers, kind)(
        **{**_COMMON, **own}, vocab_size=len(tokenizer), bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    auto = transformers.AutoModelForCausalLM
    if "SequenceClassification" in folder.name:
        auto, config.num_labels = transformers.AutoModelForSequenceClassification, 1
    _save(auto.from_config(config), folder)
    tokenizer.save_pretrained(folder)


def _write_remote_model(folder: Path) -> None:
    tokenizer = make_tokenizer()
    config = transformers.LlamaConfig(
        **_COMMON, vocab_size=len(tokenizer), pad_token_id=256, bos_token_id=None, eos_token_id=258
    )
    config.auto_map = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    _save(transformers.LlamaForCausalLM(config), folder)
    file = folder / "config.json"
    text = file.read_text().replace('"model_type": "llama"', '"model_type": "remote"')
    file.write_text(text.replace("LlamaForCausalLM", "RemoteForCausalLM"))
    for name, source in _REMOTE.items():
        (folder / name).write_text(source)
    tokenizer.save_pretrained(folder)


def _write_vision_model(folder: Path) -> None:
    family = _VISION_MODELS[folder.name]
    _save(make_vision_model(family), folder)
    make_processor(family).save_pretrained(folder)


def _save(model: PreTrainedModel, folder: Path) -> None:
    """In bfloat16, as TRL's are."""
    model.to(torch.bfloat16).save_pretrained(folder)


def _rows(name: str) -> dict[str, datasets.Dataset]:
    """19 prompts, of which 2 are for evaluation, in the forms that a set of that name has."""
    texts = [f"How much is {n} times {n + 3}" for n in range(19)]
    if name == "zen":
        said = [[{"role": "user", "content": f"{text}?"}] for text in texts]
        forms = {"standard_prompt_only": texts, "conversational_prompt_only": said}
        return {form: datasets.Dataset.from_dict({"prompt": p}) for form, p in forms.items()}
    pictures = [make_image(n, (32 + n, 50 - n)) for n in range(19)]
    if name == "zen-image":
        said = [[{"role": "user", "content": f"{text}?"}] for text in texts]
        columns = {"prompt": said, "image": pictures}
    else:
        counts = [n % 4 for n in range(19)]
        said = [
            [{"role": "user", "content": _parts(text, count)}]
            for text, count in zip(texts, counts, strict=True)
        ]
        columns = {"prompt": said, "images": [[pictures[0]] * count for count in counts]}
    rows = datasets.Dataset.from_dict(columns)
    image = datasets.Image()
    feature = image if name == "zen-image" else datasets.List(image)
    column = "image" if name == "zen-image" else "images"
    return {"conversational_prompt_only": rows.cast_column(column, feature)}


def _parts(text: str, images: int) -> list[dict[str, str | None]]:
    before = [{"type": "image", "text": None}] * (images // 2)
    after = [{"type": "image", "text": None}] * (images - images // 2)
    return [*before, {"type": "text", "text": text}, *after]


def _write_rows(folder: Path) -> None:
    lines = ["---", "configs:"]
    for form, rows in _rows(folder.name).items():
        lines += [f"- config_name: {form}", "  data_files:"]
        for split, part in rows.train_test_split(test_size=0.1, shuffle=False).items():
            path = f"{form}/{split}.parquet"
            (folder / form).mkdir(parents=True, exist_ok=True)
            part.to_parquet(folder / path)
            lines += [f"  - split: {split}", f"    path: {path}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def register() -> None:
    """Have AutoProcessor find the processor of Qwen's family that needs no torchvision."""
    for name in ("Qwen2_5_VLConfig", "Qwen2VLConfig", "Qwen3_5Config", "Qwen3_5MoeConfig"):
        kind = getattr(transformers, name)
        transformers.AutoProcessor.register(kind, QwenImageProcessor, exist_ok=True)


def write(root: Path) -> None:
    """Write everything that is not there yet under `root`."""
    writers = {
        **dict.fromkeys(_TEXT_MODELS, _write_text_model),
        "tiny-RemoteForCausalLM": _write_remote_model,
        **dict.fromkeys(_VISION_MODELS, _write_vision_model),
        **dict.fromkeys(("zen", "zen-image", "zen-multi-image"), _write_rows),
    }
    for name, writer in writers.items():
        folder = root / ORGANISATION / name
        if not folder.exists():
            torch.manual_seed(0)
            writer(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
