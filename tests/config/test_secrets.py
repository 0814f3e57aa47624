"""No secret lands in a file: not from the environment, and not by its form."""

import json

import pytest

from rloo import RLOOConfig
from rloo.config.secrets import HIDDEN, hide, hide_named
from rloo.config.show import render_resolved
from rloo.tracking.jsonl import write_json

# Made of the alphabet of keys; nobody's.
HF = "hf_" + "aB3" * 11 + "x"


@pytest.mark.parametrize(
    ("name", "value", "text", "shown"),
    [
        ("HF_TOKEN", HF, f"run-{HF}-1", "run-$HF_TOKEN-1"),
        ("WANDB_API_KEY", 20 * "a1", 20 * "a1", "$WANDB_API_KEY"),
        ("my_password", "correct horse", "correct horse", "$my_password"),
        ("DB_SECRET", "longer-secret", "x longer-secret", "x $DB_SECRET"),
        ("PGPASSWORD", "correct horse", "correct horse", "$PGPASSWORD"),
        ("HFTOKEN", "longer-secret", "x longer-secret", "x $HFTOKEN"),
        ("GITHUB_PAT", "longer-secret", "longer-secret", "$GITHUB_PAT"),
        ("MYSQL_PWD", "longer-secret", "longer-secret", "$MYSQL_PWD"),
        ("AWS_SECRETKEY", "longer-secret", "longer-secret", "$AWS_SECRETKEY"),
        ("TOKENIZER", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("MAX_TOKENS", "100000000", "100000000", "100000000"),
        ("OLDPWD", "/nowhere/at/all", "/nowhere/at/all", "/nowhere/at/all"),
        ("TOKEN", "short", "short story", "short story"),
        ("TOKENIZERS_PARALLELISM", "parallelism", "parallelism", "parallelism"),
        ("MONKEY", "bananas-and-more", "bananas-and-more", "bananas-and-more"),
        ("SSH_KEY", "/", "/", "/"),
    ],
)
def test_the_value_of_a_variable_is_its_name(monkeypatch, name, value, text, shown):
    monkeypatch.setenv(name, value)
    assert hide(text) == shown


def test_a_secret_within_another_does_not_leave_half_of_it(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "12345678")
    monkeypatch.setenv("B_TOKEN", "12345678-and-9")
    assert hide(["12345678-and-9", {"a": "12345678"}]) == ["$B_TOKEN", {"a": "$A_TOKEN"}]


def test_the_place_of_a_secret_is_none(monkeypatch, tmp_path):
    path = tmp_path / "credentials.json"
    path.write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    assert hide(str(path)) == str(path)


FORMS = {
    HF: HIDDEN,
    f"run of {HF}.": f"run of {HIDDEN}.",
    "sk-" + 40 * "a": HIDDEN,
    "gsk_" + 40 * "a1": HIDDEN,
    "nvapi-" + 40 * "a1": HIDDEN,
    "pypi-" + 40 * "a1": HIDDEN,
    "ghp_" + 36 * "Z": HIDDEN,
    "AKIA" + 16 * "7": HIDDEN,
    "https://me:word@host/data": f"https://{HIDDEN}@host/data",
}
NONE = ("hf_model", "task-sk-1", "Qwen/Qwen2.5-0.5B", 40 * "a1"[:1], "https://host:80/a@b", "a:b@c",
        "1e-5", "me@host.org", "s3://bucket/key")  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), FORMS.items())
def test_what_can_be_nothing_else_is_not_shown(text, shown):
    assert hide(text) == shown


@pytest.mark.parametrize("text", NONE)
def test_what_may_be_something_else_stays(text):
    assert hide(text) == text


def test_no_file_of_a_run_has_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", HF)
    config = RLOOConfig(run_name=f"run {HF}", chat_template_kwargs={"a": [HF]})
    written = render_resolved(config), json.dumps(config.to_dict()), config.to_json_string()
    assert not any(HF in text for text in (*written, str(config.to_sanitized_dict())))
    assert config.to_dict()["chat_template_kwargs"] == {"a": ["$HF_TOKEN"]}
    assert config.run_name == f"run {HF}"  # where it is used


def test_no_note_of_a_run_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PGPASSWORD", "correct horse")
    write_json(tmp_path / "summary.json", {"notes": ["connecting with correct horse"], "steps": 3})
    said = json.loads((tmp_path / "summary.json").read_text())
    assert said == {"notes": ["connecting with $PGPASSWORD"], "steps": 3}


def test_keys_that_name_a_secret_hide_texts_and_mappings():
    given = {"a": [{"token": "word", "max_tokens": "9", "eos_token_id": 7}], "API_KEY": {"a": "b"}}
    hidden = {"a": [{"token": HIDDEN, "max_tokens": "9", "eos_token_id": 7}], "API_KEY": HIDDEN}
    assert hide_named(given | {"token": "", "name": HF}) == hidden | {"token": "", "name": HIDDEN}
