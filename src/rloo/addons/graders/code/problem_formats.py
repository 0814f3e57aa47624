"""Published formats of programming problems: converts a row to the request for the judge.

The columns of a row identify its format. Each reader returns the request (`guest.judge`) with the
comparison rule that is usual for the format, or None for a row without tests.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rloo.distributed import value_codec as codec

Row = Mapping[str, Any]
Asked = dict[str, Any]
# Contest graders compare floats to 1e-5, and ignore white space between words.
_CONTEST: Asked = {"tolerance": 1e-5, "tokens": True, "implied": True, "json": True}
_MOST_BYTES = 1 << 28
_PLAIN_PICKLE = {"PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE",
                 "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}  # fmt: skip


class UnreadableRow(ValueError):
    """Raised if the tests of a row do not have the published format that the row's columns
    imply."""


@dataclass(frozen=True, slots=True)
class ProblemFormat:
    """A format of rows. Rows of the format have all `columns` and, if `some` is not empty, one of
    `some`. `read` converts a row to a request."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], Asked | None]
    some: tuple[str, ...] = ()
    # Whether users write such rows for this reward. An unreadable row is then an error.
    own: bool = False

    def fits(self, columns: Iterable[str]) -> bool:
        """Whether rows with these columns may have this format."""
        known = set(columns)
        return known.issuperset(self.columns) and (not self.some or bool(known & {*self.some}))


def format_of(columns: Iterable[str]) -> ProblemFormat | None:
    """The format of rows with these columns, or None."""
    columns = set(columns)
    return next((known for known in FORMATS if known.fits(columns)), None)


def read(row: Row) -> tuple[ProblemFormat, Asked | None] | None:
    """The (format, request) of a row; None without a format. Columns with the value None are
    ignored. Raises ValueError for invalid tests, namely UnreadableRow if the format is a published
    one."""
    known = format_of(name for name, value in row.items() if value is not None)
    if known is None:
        return None
    try:
        asked = known.read(row)
        if asked is not None and asked["kind"] == "function" and row.get("starter_code"):
            asked["starter"] = str(row["starter_code"])
        return known, asked
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if known.own and isinstance(error, ValueError):
            raise
        raise UnreadableRow(f"{error} (as {known.name})") from error


# -- our own ---------------------------------------------------------------------------------------


def _own_output(row: Row) -> Asked | None:
    inputs, outputs = _texts(row, "inputs"), _texts(row, "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(
            f"a row has {len(inputs)} inputs and {len(outputs)} outputs; each input needs its "
            "output"
        )
    return {"kind": "inputs", "inputs": inputs, "outputs": outputs} if inputs else None


def _own_cases(row: Row) -> Asked | None:
    cases = [_case(case) for case in _listed(row, "cases")]
    asked = {"kind": "function", "function": str(row["function"]), "cases": cases}
    return asked if cases else None


def _own_tests(row: Row) -> Asked | None:
    value = row["tests"]
    if isinstance(value, str):
        value = _from_json(value, value)
    if isinstance(value, Mapping) or (_is_list(value) and len(value) and _is_map(value[0])):
        return _payload(value, row)
    tests = _texts(row, "tests")
    return {"kind": "tests", "tests": tests} if tests else None


def _listed(row: Row, name: str) -> list[Any]:
    """A column's list, which may be JSON text."""
    value = row[name]
    if isinstance(value, str):
        value = _from_json(value, [value] if name == "tests" else value)
    if not _is_list(value):
        raise ValueError(f"the column {name!r} has {value!r:.80}; it is a list (reward code)")
    return list(value)


def _texts(row: Row, name: str) -> list[str]:
    texts = _listed(row, name)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"the column {name!r} has {text!r:.80}; it is a list of texts (reward code)"
            )
    return texts


def _case(case: Any) -> Any:
    """A case, encoded for the workers."""
    if not (_is_list(case) and len(case) == 2 and _is_list(case[0])):
        raise ValueError(
            f"a case is {case!r:.80}; it is the list of arguments and the value (reward code)"
        )
    try:
        return codec.encode(case)
    except codec.NotSerializable as error:
        raise ValueError(f"a case is {case!r:.80}; {error} (reward code)") from error


# -- published formats -----------------------------------------------------------------------------


def _apps(row: Row) -> Asked | None:
    """APPS and TACO: `{"inputs": [...], "outputs": [...], "fn_name": ...}` as text."""
    return _payload(row["input_output"], row)


def _live_code_bench(row: Row) -> Asked | None:
    cases = list(_from_json(row["public_test_cases"], ()))
    private = row.get("private_test_cases")
    if private:
        cases += _from_json(private, None) or _unpacked(str(private))
    metadata = _from_json(row.get("metadata"), row.get("metadata"))
    return _payload(cases, {**row, "metadata": metadata})


def _code_contests(row: Row) -> Asked | None:
    names = ("public_tests", "private_tests", "generated_tests")
    inputs: list[Any] = []
    outputs: list[Any] = []
    for tests in (_from_json(row.get(name), row.get(name)) for name in names):
        if isinstance(tests, Mapping):
            inputs += list(tests.get("input", ()))
            outputs += list(tests.get("output", ()))
        elif _is_list(tests):  # a mapping per test
            inputs += [test["input"] for test in tests]
            outputs += [test["output"] for test in tests]
    return _whole_programs(inputs, outputs)


def _mbpp(row: Row) -> Asked | None:
    """MBPP, and MBPP+, which has all tests of a problem in one text."""
    setup = [str(row.get("test_setup_code") or ""), *map(str, row.get("test_imports") or ())]
    tests = [*row["test_list"], *(row.get("challenge_test_list") or ())]
    if isinstance(row.get("test"), str) and row["test"].strip():
        tests = [row["test"]]
    return _statements(tests, "\n".join(setup).strip())


def _checked(row: Row) -> Asked | None:
    """HumanEval and LeetCodeDataset: the function `check(candidate)` in `test` is called with the
    function `entry_point`. The prompt has definitions that the tests and the program use."""
    entry, test = str(row["entry_point"]), str(row["test"])
    prompt = str(row.get("prompt") or "")
    tree = _tree_in(prompt)
    if tree is None:
        return {**_statements([test]), "entry": entry}
    setup = _before(tree, entry)
    return {**_statements([test], setup), "entry": entry, "prompt": prompt}


def _kod_code(row: Row) -> Asked | None:
    test = row["test"]
    return _statements(list(test) if _is_list(test) else [str(test)])


def _verl(row: Row) -> Asked | None:
    model = _from_json(row["reward_model"], row["reward_model"])
    return _payload(model.get("ground_truth"), row) if _is_map(model) else None


def _column(name: str) -> Callable[[Row], Asked | None]:
    return lambda row: _payload(row[name], row)


FORMATS = (
    ProblemFormat("inputs and outputs", ("inputs", "outputs"), _own_output, own=True),
    ProblemFormat("function and cases", ("function", "cases"), _own_cases, own=True),
    ProblemFormat("LiveCodeBench", ("public_test_cases",), _live_code_bench),
    ProblemFormat("CodeContests", ("public_tests",), _code_contests),
    ProblemFormat("open-r1 (Codeforces)", ("official_tests",), _column("official_tests")),
    ProblemFormat("open-r1", ("verification_info",), _column("verification_info")),
    ProblemFormat("verl", ("reward_model",), _verl),
    ProblemFormat("LeetCodeDataset", ("entry_point", "test"), _checked,
           ("problem_description", "starter_code", "completion", "question_id")),
    ProblemFormat("BigCodeBench", ("entry_point", "test"), _kod_code, ("libs", "complete_prompt")),
    ProblemFormat("HumanEval", ("entry_point", "test"), _checked),
    ProblemFormat("TACO", ("input_output",), _apps,
                  ("tags", "raw_tags", "skill_types", "time_limit")),
    ProblemFormat("APPS", ("input_output",), _apps),
    ProblemFormat("MBPP", ("test_list",), _mbpp),
    ProblemFormat("AceCode", ("test_cases",), _column("test_cases")),
    ProblemFormat("KodCode", ("test",), _kod_code, ("test_info", "solution", "question")),
    ProblemFormat("DeepCoder", ("tests", "problem"), _own_tests,
           ("solutions", "starter_code", "metadata")),
    ProblemFormat("tests", ("tests",), _own_tests, own=True),
    ProblemFormat("rllm", ("ground_truth", "data_source"), _column("ground_truth")),
)  # fmt: skip


# -- shared parts ----------------------------------------------------------------------------------


def _payload(given: Any, row: Row) -> Asked | None:
    """A request for the tests in one value, which may be JSON text: a mapping of `inputs` and
    `outputs`, a list of mappings that each have an `input` and an `output`, or Python
    statements."""
    given = _from_json(given, given)
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):  # a Python literal
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            given = ast.literal_eval(given.strip())
    if given is None or (isinstance(given, str) and not given.strip()):
        return None
    if isinstance(given, str):
        return _statements([given])
    if _is_map(given):
        for name in ("inputs", "input"):
            if given.get(name) is not None and given.get(f"out{name[2:]}") is not None:
                inputs, outputs = given[name], given[f"out{name[2:]}"]
                if (called := _name_in(given)) and all(isinstance(text, str) for text in inputs):
                    inputs = [_lines_of_json(text) for text in inputs]
                    outputs = [_from_json(text, text) for text in outputs]
                return _pairs(inputs, outputs, called or None)
        for name in ("test_cases", "tests", "unit_tests", "assert_case", "functional", "pytest",
                     "ground_truth", "test_code"):  # fmt: skip
            if given.get(name):
                return _payload(given[name], {**row, **given})
        return None
    if _is_list(given) and given and all(isinstance(item, str) for item in given):
        return _statements(given)
    if _is_list(given) and given and all(_is_map(item) for item in given):
        return _listed_cases(given, row)
    return None


def _listed_cases(cases: Sequence[Row], row: Row) -> Asked | None:
    first = cases[0]
    if "input" not in first or "output" not in first:
        return None
    kinds = {str(case.get("testtype") or case.get("type") or "").lower() for case in cases}
    name = _name_in(first) or _name_in(row)
    inputs, outputs = ([case[key] for case in cases] for key in ("input", "output"))
    if "functional" in kinds and name:  # each argument is a line of JSON, and the result is JSON
        arguments = [[json.loads(line) for line in text.strip().split("\n")] for text in inputs]
        wanted = [json.loads(text) if isinstance(text, str) else text for text in outputs]
        return _calls(name, arguments, wanted, unwrap=False)
    calls = "function_call" in kinds or (not kinds & {"stdin", "stdin_stdout"} and _name_in(first))
    return _pairs(inputs, outputs, name if calls else None)


def _name_in(given: Row) -> str:
    """The name of the called function, or ""."""
    places = [given, _from_json(given.get("metadata"), given.get("metadata"))]
    for place in places:
        for key in ("fn_name", "func_name", "function_name"):
            if _is_map(place) and place.get(key):
                return str(place[key])
    return ""


def _pairs(inputs: Any, outputs: Any, name: str | None) -> Asked | None:
    if not name:
        return _whole_programs(inputs, outputs)
    arguments = [_from_json(given, given) for given in inputs]
    return _calls(name, [a if _is_list(a) else [a] for a in arguments], outputs, unwrap=True)


def _whole_programs(inputs: Any, outputs: Any) -> Asked | None:
    given, wanted = ([_joined(text) for text in texts] for texts in (inputs, outputs))
    if len(given) != len(wanted):
        raise ValueError(f"a row has {len(given)} inputs and {len(wanted)} outputs")
    return {"kind": "inputs", "inputs": given, "outputs": wanted, **_CONTEST} if given else None


def _lines_of_json(text: str) -> list[Any]:
    """The arguments, one per line of JSON. A text that is not JSON is the only argument."""
    try:
        return [json.loads(line) for line in text.strip().split("\n")]
    except ValueError:
        return [text]


def _joined(text: Any) -> str:
    """An input or output text; some rows have a list of its lines."""
    return "\n".join(map(str, text)) if _is_list(text) else str(text)


def _calls(name: str, given: list[Any], wanted: Sequence[Any], *, unwrap: bool) -> Asked | None:
    if len(given) != len(wanted):
        raise ValueError(f"a row has {len(given)} inputs and {len(wanted)} outputs")
    cases = [_case([a, b]) for a, b in zip(given, wanted, strict=True)]
    asked = {"kind": "function", "function": name, "cases": cases, "unwrap": unwrap, **_CONTEST}
    return asked if cases else None


def _statements(tests: Sequence[Any], setup: str = "") -> Asked:
    texts = [str(test) for test in tests]
    return {"kind": "tests", "tests": texts, **({"setup": setup} if setup else {})}


def _before(tree: ast.Module, entry: str) -> str:
    """The definitions in a Python prompt except for the function to complete."""
    name = entry.replace("()", "").partition(".")[0]
    kept = [node for node in tree.body if getattr(node, "name", None) != name]
    return "\n".join(ast.unparse(node) for node in kept if not isinstance(node, ast.Expr))


def _tree_in(prompt: str) -> ast.Module | None:
    """The Python code at the end of a prompt: the complete prompt, or the text from a line on that
    may begin a program."""
    lines = prompt.replace("```python", "").replace("```", "").split("\n")
    begins = ("import ", "from ", "def ", "class ", "@")
    for at, line in enumerate(lines):
        if at == 0 or line.startswith(begins):
            try:
                return ast.parse("\n".join(lines[at:]))
            except (SyntaxError, ValueError, RecursionError):
                continue
    return None


def _unpacked(text: str) -> list[Any]:
    """LiveCodeBench's hidden tests: base64 of a compressed pickle of JSON text. The pickle is never
    executed. A pickle with anything but text is refused."""
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(text), _MOST_BYTES)
        found = ""
        for operation, argument, _ in pickletools.genops(packed):
            if operation.name not in _PLAIN_PICKLE:
                raise ValueError(f"the pickle has {operation.name}")
            if "UNICODE" in operation.name:
                found = str(argument)
        return list(json.loads(found))
    except (ValueError, zlib.error, binascii.Error) as error:
        raise ValueError(f"private_test_cases cannot be read: {error}") from error


def _from_json(value: Any, other: Any) -> Any:
    """The value of JSON text; `other` if the text is not JSON."""
    if not isinstance(value, str):
        return value if value is not None else other
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return other


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)
