"""Removes secrets (of the environment or a script) from values that a run writes to files."""

from __future__ import annotations

import os
import re
from typing import Any

# Words in the names of variables with secrets. A word may end a longer word (PGPASSWORD, HFTOKEN)
# but not begin one (TOKENIZER). PWD without a prefix is the current folder.
_WORDS = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|_PWD|_AUTH"
    r"|(?:^|_)PAT|(?:^|_|API|ACCESS|SECRET|PRIVATE)KEY)(?![A-Z])"
)
# Shorter values count as no secrets, since they also occur in other texts.
_SHORTEST = 8
# Forms that only secrets have: keys of hubs, clouds and model providers, and the password in a URL.
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{35}|(?:gsk|r8|npm)_[A-Za-z0-9]{30,}|nvapi-[\w-]{40,}|pypi-[\w-]{40,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
HIDDEN = "(not shown)"


def hide(value: Any) -> Any:
    """`value`, of JSON types, with all secrets replaced. A secret from an environment variable is
    replaced by the variable's name (`$HF_TOKEN`). Other secrets are detected by their form and
    replaced by `(not shown)`."""
    return _hide(value, _known()) if isinstance(value, (str, dict, list, tuple)) else value


def hide_named(value: Any) -> Any:
    """As `hide`, and texts and mappings under a key that names a secret (`token`) are replaced by
    `(not shown)`. The result cannot be used as options, since `pad_token` is such a key."""
    if isinstance(value, dict):
        return {
            name: HIDDEN
            if item and isinstance(item, (str, dict)) and _WORDS.search(str(name).upper())
            else hide_named(item)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [hide_named(item) for item in value]
    return hide(value)


def _hide(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _hide(item, known) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_hide(item, known) for item in value)
    if not isinstance(value, str):
        return value
    for secret, name in known.items():
        value = value.replace(secret, f"${name}")
    return _FORMS.sub(HIDDEN, value)


def _known() -> dict[str, str]:
    """The secrets in the environment, longest first, with the names of their variables."""
    found = {
        value: name
        for name, value in os.environ.items()
        if _WORDS.search(name.upper())
        and len(value) >= _SHORTEST
        and not os.path.exists(value)  # the path of a file with a secret
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
