import json
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL.Image import Image as Picture
from transformers import LlamaConfig, LlamaForSequenceClassification

from rloo import RLOOConfig, RLOOTrainer
from rloo.data.images import with_images
from rloo.data.prompt_dataset import PromptDataset, PromptLengthLimit, image_reader, with_prompts
from rloo.data.tokenization import encode_prompts
from rloo.distributed import World
from rloo.engines.counter_rng import row_keys
from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.engines.hf_engine import HFEngine, _Drawing
from rloo.model.policy import Policy
from rloo.rewards.reward_model import as_reward
from rloo.tracking.sample_text import as_string
from rloo.types import Completion, Prompt, Sample, Sampling, text_of
from support.markers import every_second
from support.models import CPU
from support.training import make_config
from support.vision_models import FAMILIES, RELATIVES, make_image, make_processor, make_vision_model

SAMPLING = Sampling(max_tokens=6, stop_token_ids=(2,), temperature=0.8)
TEXTS = ["what is it?", "and these?", "nothing here", "one more"]
# None, one or several images, of sizes that the processors treat differently.
SIZES = [[(30, 24)], [(16, 40), (40, 40)], [], [(64, 12)]]


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def make_rows(texts=TEXTS, sizes=SIZES, seed=0) -> Dataset:
    pictures = [
        [make_image(seed + 10 * row + n, size) for n, size in enumerate(of_row)]
        for row, of_row in enumerate(sizes)
    ]
    return Dataset.from_dict(
        {"prompt": [user(text) for text in texts], "images": pictures},
        features=Features(
            {
                "prompt": List({"role": Value("string"), "content": Value("string")}),
                "images": List(Image()),
            }
        ),
    )


def make_source(rows, processor, limit=500, overlong="error") -> PromptDataset:
    return PromptDataset(
        rows,
        partial(encode_prompts, processing_class=processor, chat_template_kwargs={}),
        seed=0,
        shuffle=False,
        images=image_reader(rows, processor, chat_template_kwargs={}),
        limit=PromptLengthLimit(limit, overlong),
    )


def make_prompts(family: str, rows: Dataset | None = None) -> list[Prompt]:
    return make_source(rows or make_rows(), make_processor(family)).all_prompts()


def make_model(family: str):
    """With weights so large that every image shows."""
    model = make_vision_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def make_image_config(folder: Path, **options) -> RLOOConfig:
    short = {"num_generations": 2, "num_prompts": 4, "max_steps": 2, "max_completion_length": 5}
    return make_config(folder, **{**short, "temperature": 0.8, **options})


def make_policy(family: str, folder: Path, **options) -> Policy:
    config = make_image_config(folder, **options)
    return Policy(
        make_model(family),
        make_processor(family),
        config,
        world=World(CPU),
        num_training_steps=2,
    )


def make_samples(prompts, sampled) -> list[Sample]:
    return [
        Sample(
            key=(group, index),
            place=group * len(completions) + index,
            prompt_ids=prompt.token_ids,
            token_ids=completion.token_ids,
            policy_logprobs=completion.policy_logprobs,
            reward=0.0,
            truncated=False,
            pixels=prompt.pixels,
        )
        for group, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
        for index, completion in enumerate(completions)
    ]


def draw_samples(policy: Policy, prompts) -> list[Sample]:
    engine = HFEngine(policy.model, pad_token_id=0)
    return make_samples(prompts, engine.sample(prompts, 2, SAMPLING, noise=7))


def own_logprobs(family: str, model, content, completion: list[int]) -> torch.Tensor:
    """From the model's logits on what the processor makes of one prompt, completion appended."""
    inputs = dict(
        make_processor(family).apply_chat_template(
            content,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
    )
    tail = torch.tensor([completion])
    for name, value in inputs.items():
        if name in ("input_ids", "attention_mask") or name.endswith("token_type_ids"):
            more = {"input_ids": tail, "attention_mask": torch.ones_like(tail)}
            inputs[name] = torch.cat([value, more.get(name, torch.zeros_like(tail))], dim=1)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0, -len(completion) - 1 : -1] / 0.8
    return logits.log_softmax(-1).gather(-1, tail[0][:, None])[:, 0]


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *every_second(RELATIVES)])
def test_sampler_and_trainer_agree_with_the_model_on_each_prompt_alone(family, tmp_path):
    prompts = make_prompts(family)
    policy = make_policy(family, tmp_path, beta=0.0)
    assert not policy.packed and any("reads images" in note for note in policy.notes)
    samples = draw_samples(policy, prompts)
    expected = torch.cat(
        [
            own_logprobs(family, policy.model, prompts[s.key[0]].content, s.token_ids)
            for s in samples
        ]
    )
    sampled = torch.tensor([x for s in samples for x in s.policy_logprobs])
    torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=0)
    trained = policy.logprobs(policy.batch(samples)).logprobs
    torch.testing.assert_close(trained, expected, atol=1e-4, rtol=0)
    policy.check_forward(samples)
    # Text after images, and the other way round: the model keeps nothing of the last call.
    for part in ([samples[4], samples[5]], [samples[0]]):
        values = policy.score(policy.batch(part))
        wanted = [
            own_logprobs(family, policy.model, prompts[s.key[0]].content, s.token_ids) for s in part
        ]
        torch.testing.assert_close(values, torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", every_second(FAMILIES))
def test_the_same_draws_whatever_the_waves(family, tmp_path):
    prompts = make_prompts(family)
    model = make_model(family)
    together = HFEngine(model, pad_token_id=0).sample(prompts, 2, SAMPLING, noise=7)
    one_by_one = HFEngine(model, pad_token_id=0, cache_bytes=1).sample(
        prompts, 2, SAMPLING, noise=7
    )
    for first, second in zip(together, one_by_one, strict=True):
        for a, b in zip(first, second, strict=True):
            assert a.token_ids == b.token_ids
            torch.testing.assert_close(
                torch.tensor(a.policy_logprobs), torch.tensor(b.policy_logprobs), atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_gives_other_logprobs_and_gradients_reach_what_reads_it(family, tmp_path):
    policy = make_policy(family, tmp_path, beta=0.0)
    prompts, others = (make_prompts(family, make_rows(seed=seed)) for seed in (0, 100))
    assert [p.token_ids for p in prompts] == [p.token_ids for p in others]
    samples = draw_samples(policy, prompts)
    swapped = make_samples(
        others, [[_as_completion(s) for s in samples if s.key[0] == g] for g in range(len(others))]
    )
    batch = policy.batch(samples)
    logprobs = policy.logprobs(batch).logprobs
    change = (logprobs - policy.score(policy.batch(swapped))).abs()
    for number, amount in enumerate(change.split(batch.lengths)):
        has_image = bool(SIZES[samples[number].key[0]])
        assert (amount.max() > 1e-3) == has_image
    logprobs.sum().backward()
    gradients = {name: p.grad for name, p in policy.model.named_parameters()}
    projector = "visual.merger" if family == "qwen2_5_vl" else "multi_modal_projector"
    for part in ("language_model.layers", projector):
        found = [g for name, g in gradients.items() if part in name]
        assert found and all(g is not None and g.abs().max() > 0 for g in found), part


def _as_completion(sample: Sample) -> Completion:
    return Completion(sample.token_ids, "length", sample.policy_logprobs, sample.policy_logprobs)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("top_k", [0, 3])
def test_an_image_token_is_never_sampled_and_both_distributions_are_told(greedy, top_k):
    sampling = Sampling(
        max_tokens=1, stop_token_ids=(), temperature=0.5, top_k=top_k, greedy=greedy
    )
    rows, image = 64, 3
    keys = row_keys(1, torch.arange(rows), torch.zeros(rows, dtype=torch.long))
    pads = torch.zeros(rows, dtype=torch.long)
    drawing = _Drawing(sampling, keys, pads, 2, [1] * rows, [image])
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 0.5, -1.0]]).repeat(rows, 1)
    drawing(torch.zeros(rows, 2, dtype=torch.long), logits.clone())
    tokens = drawing.tokens[:, 0]
    assert image not in tokens
    if greedy:
        assert set(tokens.tolist()) == {2}
        expected, kept = logits, None
    else:
        expected = logits / 0.5
        kept = expected.clone()
        kept[:, image] = -torch.inf
        if top_k:
            kept[:, [0, 5]] = -torch.inf  # 1, 2 and 4 are the likeliest of the others
    policy = expected.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(drawing.policy_logprobs[:, 0], policy)
    behavior = torch.zeros(rows)
    if kept is not None:
        behavior = kept.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(drawing.behavior_logprobs[:, 0], behavior)


def test_the_native_engine_leaves_images_to_generate_and_says_so():
    for name in ("auto", "native"):
        engine, note = build_engine(name, EngineInputs(make_vision_model("gemma3"), 0))
        assert isinstance(engine, HFEngine)
        assert "not support this model, because Gemma3ForConditionalGeneration reads images" in note


def test_a_mixture_of_experts_that_reads_images_is_balanced_as_the_model_does_it(tmp_path):
    policy = make_policy("qwen3_vl_moe", tmp_path, beta=0.0)
    batch = policy.batch(draw_samples(policy, make_prompts("qwen3_vl_moe")))
    expected = policy.model(**batch.inputs, output_router_logits=True).aux_loss
    torch.testing.assert_close(policy.logprobs(batch).balance, expected, atol=1e-6, rtol=0)


# -- messages and rows ---------------------------------------------------------------------------


def test_images_come_before_the_first_user_text_or_into_their_places():
    a, b = make_image(1), make_image(2)
    text = {"type": "text", "text": "hi"}
    system = {"role": "system", "content": "s"}
    of_system = {"role": "system", "content": [{"type": "text", "text": "s"}]}
    assert with_images([system, *user("hi"), *user("hi")], [a, b]) == [
        of_system,
        *user([{"type": "image", "image": a}, {"type": "image", "image": b}, text]),
        *user([text]),
    ]
    # As Arrow gives them: every part with the keys of all.
    parts = [{"type": "text", "text": "hi", "image": None}, {"type": "image", "text": None}]
    assert with_images(user(parts), [a]) == user([text, {"type": "image", "image": a}])
    assert with_images(user("hi"), []) == user([text])
    # A part that has its image keeps it; where else a part may point to is not followed.
    own = [{"type": "image", "image": a, "url": "http://x"}, {"type": "image", "path": "y"}]
    assert with_images(user(own), [b]) == user(
        [{"type": "image", "image": a}, {"type": "image", "image": b}]
    )
    assert text_of([{"type": "image"}, text, text]) == "hihi"


@pytest.mark.parametrize(
    "content, images, reason",
    [
        ("hi", 1, "its prompt is a string"),
        (user([{"type": "image"}]), 2, "has 2 images and its messages have places for 1"),
        (user([{"type": "image"}]), 0, "has 0 images and its messages have places for 1"),
        ([{"role": "system", "content": "s"}], 1, "1 images and no user message"),
        (user([{"type": "video"}]), 0, "type 'video'; it must be text or image"),
        (user([{"type": "text"}]), 0, "type text and no text"),
        (["hi"], 1, "role and content"),
    ],
)
def test_images_and_messages_that_do_not_match_are_refused(content, images, reason):
    with pytest.raises(ValueError, match=reason):
        with_images(content, [make_image(i) for i in range(images)])


def test_explicit_places_in_the_text_are_where_the_image_tokens_stand():
    rows = Dataset.from_dict(
        {
            "prompt": [
                user(
                    [
                        {"type": "text", "text": "A"},
                        {"type": "image"},
                        {"type": "text", "text": "B"},
                    ]
                )
            ],
            "image": [make_image(1)],
        }
    ).cast_column("image", Image())
    processor = make_processor("llava")
    (prompt,) = make_source(rows, processor).all_prompts()
    assert processor.tokenizer.decode(prompt.token_ids) == (
        "<turn>user:A" + "<image>" * 4 + "B<turn>assistant:"
    )
    assert isinstance(prompt.columns["image"], Picture)


def test_pixels_are_made_when_asked_for_and_not_kept():
    rows, calls = make_rows(), []
    processor = make_processor("qwen2_5_vl")
    reader = image_reader(rows, processor, chat_template_kwargs={})

    def process(messages):
        calls.append(messages)
        return reader.process(messages)

    source = PromptDataset(
        rows,
        lambda contents: [[1, 2] for _ in contents],
        seed=0,
        limit=PromptLengthLimit(9),
        images=type(reader)(reader.columns, process),
    )
    prompts = source.next(4)
    assert calls == []
    by_id = {prompt.id: prompt for prompt in prompts}
    assert by_id[2].pixels is None
    for _ in range(2):
        made = by_id[1].pixels()
        assert set(made) == {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
    assert len(calls) == 2


def test_streamed_rows_have_their_images(tmp_path):
    trainer = make_trainer("gemma3", tmp_path, rows=make_rows().to_iterable_dataset(), max_steps=1)
    trainer.train()
    assert len(list((tmp_path / "run" / "images").iterdir())) > 0


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda rows: rows.add_column("image", [None] * 4), "columns image and images"),
        (
            lambda rows: rows.remove_columns("images").add_column("image", ["a.png"] * 4),
            r"row 0: column 'image' holds a str.*datasets\.Image\(\)",
        ),
        (
            lambda rows: rows.remove_columns("prompt").add_column("prompt", TEXTS),
            "row 0: the row has images and its prompt is a string",
        ),
    ],
)
def test_rows_whose_images_cannot_be_read_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        make_source(change(make_rows()), make_processor("llava"))


def test_images_for_a_model_that_reads_none_and_prompts_cut_short_are_refused():
    processor = make_processor("llava")
    with pytest.raises(ValueError, match=r"has images \(column images\) and the model has no"):
        make_source(make_rows(), processor.tokenizer)
    with pytest.raises(ValueError, match="prompts of a dataset with images cannot be cut"):
        make_source(make_rows(), processor, limit=30, overlong="left")
    kept = make_source(make_rows(), processor, limit=34, overlong="drop")
    assert kept.dropped == 1


def test_a_template_makes_messages_beside_images_and_never_reads_them():
    rows = Dataset.from_dict({"image": [make_image(1)]}).cast_column("image", Image())
    template = [{"role": "user", "content": "what is it?"}]
    (prompt,) = make_source(with_prompts(rows, template), make_processor("llava")).all_prompts()
    assert [p["type"] for p in prompt.content[0]["content"]] == ["image", "text"]
    named = rows.add_column("colour", ["red"])
    with pytest.raises(ValueError, match=r"\{image\}, which is no column"):
        with_prompts(named, "{colour} {image}")


# -- training ------------------------------------------------------------------------------------


def count_letters(completions, **_):
    return [float(sum(c.isalpha() for c in turn[0]["content"])) for turn in completions]


def make_trainer(family, folder, reward=count_letters, rows=None, model=None, **options):
    extra = {n: options.pop(n) for n in ("peft_config", "eval_dataset") if n in options}
    return RLOOTrainer(
        model=model or make_model(family),
        reward_funcs=reward,
        args=make_image_config(folder, **options),
        train_dataset=rows or make_rows(),
        processing_class=None if isinstance(model, str) else make_processor(family),
        **extra,
    )


def read_lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


@pytest.mark.parametrize("family", every_second(FAMILIES))
def test_training_with_a_reference_starts_at_no_kl_and_moves_the_weights(family, tmp_path):
    seen = {}

    def reward(prompts, completions, images, **_):
        seen.update(prompts=prompts, images=images)
        return count_letters(completions)

    trainer = make_trainer(family, tmp_path, reward, beta=0.1)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    first, second = read_lines(tmp_path, "metrics.jsonl")
    assert first["kl"] == 0.0 and second["kl"] != 0.0
    assert first["mismatch/max"] < 1e-4
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert any("language_model" in name for name in moved)
    assert any("visual" in name or "vision_tower" in name for name in moved)
    # What a reward is given: the images as they are in the dataset, and in the messages.
    assert len(seen["images"]) == 8
    assert sorted({len(pictures) for pictures in seen["images"]}) == [0, 1, 2]
    for prompt, pictures in zip(seen["prompts"], seen["images"], strict=True):
        parts = prompt[0]["content"]
        assert [p["image"] for p in parts if p["type"] == "image"] == pictures
        assert all(isinstance(picture, Picture) for picture in pictures)
        assert parts[-1]["text"] in TEXTS


@pytest.mark.parametrize("log_multimodal", [True, False])
def test_images_of_recorded_completions_are_kept_unless_told_not_to(log_multimodal, tmp_path):
    from PIL import Image as Pillow

    rows = make_rows()
    trainer = make_trainer(
        "llava", tmp_path, rows=rows, log_multimodal=log_multimodal, log_completions=True
    )
    trainer.train()
    records = read_lines(tmp_path, "completions.jsonl")
    for record in records:
        pictures = rows[record["prompt_id"]]["images"]
        places = [p for p in record["prompt"][0]["content"] if p["type"] == "image"]
        assert places == [{"type": "image"}] * len(pictures)
        names = record.get("images", [])
        assert len(names) == (len(pictures) if log_multimodal else 0)
        for name, picture in zip(names, pictures, strict=log_multimodal):
            with Pillow.open(tmp_path / "run" / name) as kept:
                assert kept.convert("RGB").tobytes() == picture.convert("RGB").tobytes()
    assert (tmp_path / "run" / "images").exists() == log_multimodal


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_adapters_bf16_and_checkpointing_train(family, tmp_path):
    from peft import LoraConfig

    trainer = make_trainer(
        family,
        tmp_path,
        beta=0.1,
        bf16=True,
        gradient_checkpointing=True,
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], r=4),
    )
    before = {n: p.detach().clone() for n, p in trainer.policy.model.named_parameters()}
    trainer.train()
    assert read_lines(tmp_path, "metrics.jsonl")[0]["kl"] == 0.0
    moved = {n for n, p in trainer.policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all("lora" in name for name in moved)


def test_a_vision_model_trains_on_text_alone(tmp_path):
    prompts = []

    def reward(prompts_seen=prompts, *, prompts, completions, **_):
        prompts_seen.extend(prompts)
        return count_letters(completions)

    rows = make_rows().remove_columns("images")
    trainer = make_trainer("qwen2_5_vl", tmp_path, reward, rows=rows)
    trainer.train()
    assert prompts[0][0]["content"] in TEXTS  # as in the dataset
    assert read_lines(tmp_path, "metrics.jsonl")[0]["mismatch/max"] < 1e-4


def test_a_folder_gives_model_and_processor_and_gets_them_back(tmp_path):
    folder = tmp_path / "model"
    make_model("gemma3").save_pretrained(folder)
    make_processor("gemma3").save_pretrained(folder)
    trainer = make_trainer(
        "gemma3", tmp_path, model=str(folder), max_steps=1, eval_dataset=make_rows()
    )
    assert type(trainer.model).__name__ == "Gemma3ForConditionalGeneration"
    trainer.train()
    assert trainer.evaluate()["eval_num_prompts"] == 4
    again = make_trainer("gemma3", tmp_path / "again", model=str(tmp_path / "run"), max_steps=1)
    assert type(again.processing_class).__name__ == "Gemma3Processor"
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, trainer.model.get_parameter(name)), name


def test_a_reward_model_of_text_reads_the_text_beside_the_images():
    tokenizer = make_processor("llava").tokenizer
    # As most templates of text do, it would write a list out, objects and all.
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    reward = as_reward(LlamaForSequenceClassification(config), tokenizer)
    answer = [{"role": "assistant", "content": "red"}]
    plain, beside = user("what?"), with_images(user("what?"), [make_image(1)])
    scores = reward(prompts=[plain, beside], completions=[answer, answer])
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_an_image_is_shown_as_a_word():
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    assert as_string([{"role": "user", "content": content}]) == "user: [image]What is this?"
