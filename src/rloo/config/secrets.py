"""Secrets, which no file of a run may hold: a shell has filled them in, or a script wrote them."""

from __future__ import annotations

import os
import re
from typing import Any

# A variable whose name has such a word holds one, also at the end of a word (PGPASSWORD, HFTOKEN),
# but not at its beginning (TOKENIZER). PWD alone is the current folder.
_WORDS = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|_PWD|_AUTH"
    r"|(?:^|_)PAT|(?:^|_|API|ACCESS|SECRET|PRIVATE)KEY)(?![A-Z])"
)
# Shorter values are none, and occur elsewhere.
_SHORTEST = 8
# What can be nothing else, by its form: keys of hubs, of clouds and of models' providers, and the
# password in an address.
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{35}|(?:gsk|r8|npm)_[A-Za-z0-9]{30,}|nvapi-[\w-]{40,}|pypi-[\w-]{40,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
HIDDEN = "(not shown)"


def hide(value: Any) -> Any:
    """A value of JSON types without secrets: that of a variable of the environment is its name
    (`$HF_TOKEN`), and what is one by its form is `(not shown)`."""
    return _hide(value, _known()) if isinstance(value, (str, dict, list, tuple)) else value


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
    """The secrets of the environment, the longest first, and the names of their variables."""
    found = {
        value: name
        for name, value in os.environ.items()
        if _WORDS.search(name.upper())
        and len(value) >= _SHORTEST
        and not os.path.exists(value)  # the place of one
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
