"""`rloo chat`, by scripted lines of stdin; its replies are those of transformers' `generate`."""

import io
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo import RLOOConfig
from rloo.cli import main
from rloo.tools.chat import Chat
from support.adapters import make_adapted
from support.chat import make_chat_tokenizer
from support.models import disturb, make_model

CPU = ("--use_cpu", "true")
# As in a run's config.yaml, which has all options.
SAMPLED = (
    "max_completion_length: 30\ntemperature: 0.7\ntop_p: 0.9\ntop_k: 20\nmin_p: 0.1\n"
    'repetition_penalty: 1.1\nseed: 5\nbeta: 0\nstop_strings: ["a"]\n'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that chats, as a run leaves it."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = make_chat_tokenizer()
    tokenizer.save_pretrained(folder)
    model = make_model("qwen3")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    disturb(model)  # of its first weights, it repeats one token for any prompt
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    (folder / "config.yaml").write_text(SAMPLED)
    return folder


@pytest.fixture
def talk(capsys):
    """Status, stdout and stderr of `rloo chat` for lines of stdin."""

    def talk(lines, *arguments):
        before, sys.stdin = sys.stdin, io.StringIO(lines)
        try:
            status = main(["chat", *map(str, arguments), *CPU])
        finally:
            sys.stdin = before
        return status, *capsys.readouterr()

    return talk


def expected(folder, messages, model=None, **how):
    """The reply by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = model or AutoModelForCausalLM.from_pretrained(folder)
    text = messages
    if not isinstance(messages, str):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    how = {"do_sample": False, "max_new_tokens": 12, **how}
    output = model.generate(**inputs, tokenizer=tokenizer, **how)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def said(role, content):
    return {"role": role, "content": content}


GREEDY = ("--greedy", "--max_completion_length", "12", "--stop_strings", "null")


def test_greedy_replies_of_a_conversation_are_those_of_generate(folder, talk):
    lines = "Hello\nOne\\\nTwo\n/reset\n\nHello\n/exit\nnever\n"
    status, out, _ = talk(lines, folder, *GREEDY, "--system", "Be brief")
    start = [said("system", "Be brief"), said("user", "Hello")]
    first = expected(folder, start)
    after = [*start, said("assistant", first), said("user", "One\nTwo")]
    second = expected(folder, after)
    assert status == 0 and first and second not in (first, "")
    assert out == f"{first}\n{second}\n{first}\n"


def test_a_reply_is_sampled_by_the_options_in_the_folder_which_the_line_overrides(folder, talk):
    options = {
        "do_sample": True, "max_new_tokens": 30, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    lines = {
        0.3: ("--temperature", "0.3", "--min_p", "0.5"),
        0.7: (),
        1.6: ("--temperature", "1.6"),
    }
    for temperature, line in lines.items():
        options["min_p"] = 0.5 if "--min_p" in line else 0.1
        torch.manual_seed(5)
        reply = expected(
            folder, [said("user", "Hi")], temperature=temperature, stop_strings=["a"], **options
        )
        status, out, err = talk("Hi\n", folder, *line)
        assert (status, out) == (0, f"{reply}\n")
        assert f"temperature {temperature:g}, top_p 0.9, at most 30 tokens" in err
        assert str(folder / "config.yaml") in err
    torch.manual_seed(5)
    longer = expected(folder, [said("user", "Hi")], temperature=1.6, **options)
    assert longer.startswith(reply) and len(longer) > len(reply)  # the stop string ended it


def test_the_line_overrides_what_the_run_had_in_generation_kwargs_but_not_its_end(folder, tmp_path):
    from rloo.tools.chat_command import config_of

    (tmp_path / "config.yaml").write_text(
        "generation_kwargs: {temperature: 0.5, eos_token_id: [7]}\ntemperature: 0.5\n"
    )
    config, _ = config_of(str(tmp_path), ["--temperature", "0.9"])
    assert config.temperature == 0.9 and config.generation_kwargs == {"eos_token_id": [7]}
    assert config_of(str(tmp_path), [])[0].temperature == 0.5


def test_an_adapter_is_loaded_with_its_base_and_a_checkpoint_with_the_runs_options(
    folder, tmp_path, talk
):
    run = tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted = make_adapted(base=base)
    checkpoint = run / "checkpoint-2"
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(folder).save_pretrained(checkpoint)
    (run / "config.yaml").write_text("max_completion_length: 12\nuse_peft: true\n")
    reply = expected(checkpoint, [said("user", "Hello")], model=adapted.eval())
    assert reply != expected(folder, [said("user", "Hello")])
    assert talk("Hello\n", checkpoint, "--greedy")[:2] == (0, f"{reply}\n")


def test_an_adapter_whose_base_is_gone_is_refused_by_its_name_and_the_bases(tmp_path, talk):
    make_adapted().save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    given = {**json.loads(file.read_text()), "base_model_name_or_path": "runs/gone/model"}
    file.write_text(json.dumps(given))
    status, out, err = talk("Hello\n", tmp_path)
    assert (status, out) == (2, "")
    assert f"{tmp_path} is an adapter of runs/gone/model: " in err
    assert "adapter_config.json (base_model_name_or_path)" in err


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """The same model, without a chat template and with a short context."""
    plain = tmp_path_factory.mktemp("plain")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.max_position_embeddings = 20
    model.save_pretrained(plain)
    return plain


def test_without_a_chat_template_each_line_is_continued_alone_and_within_the_context(plain, talk):
    lines = f"3 + 4 =\n{'too long ' * 4}\n12345678901234\n"
    status, out, err = talk(lines, plain, *GREEDY)
    first, last = expected(plain, "3 + 4 ="), expected(plain, "1234567890" + "1234")
    assert out == f"{first}\n{last[:6]}\n" and len(last) > 6
    assert status == 1  # a line got no reply
    assert "the conversation has 36 tokens, and the model's context is 20" in err
    assert "no chat template" in err


def test_a_reply_is_written_while_it_is_generated(plain):
    config = RLOOConfig("run", model=str(plain), use_cpu=True, max_completion_length=10)
    parts = []
    reply = Chat(config, greedy=True).reply("a b", parts.append)
    assert "".join(parts) == reply and reply


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "chat needs the folder of a model, first"),
        (("--greedy",), "chat needs the folder of a model, first"),
        (("nowhere/at/all",), "nowhere/at/all"),
        (("{plain}", "--learning_rate", "1"), "chat does not use learning_rate"),
        (("{plain}", "--temperatur", "1"), "temperatur"),
        (("{plain}", "--temperature", "0"), "temperature is 0"),
        (
            ("{plain}", "--greedy", "--top_p", "0.5"),
            "--greedy chooses the most likely tokens; leave",
        ),
        (("{plain}", "--system", "Be brief"), "has no chat template, and a system message needs"),
    ],
)
def test_what_no_chat_can_do_is_refused(plain, talk, arguments, message):
    status, out, err = talk("Hello\n", *(a.format(plain=plain) for a in arguments))
    assert (status, out) == (2, "") and message in err
