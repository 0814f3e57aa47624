"""Judges a program. This process knows the expected results and never runs the program."""

from __future__ import annotations

from typing import Any

from rloo.addons.graders.code.guest import leetcode_nodes, program_source
from rloo.addons.graders.code.guest.compare import same_output, same_value
from rloo.addons.graders.code.guest.object_proxy import ProgramExited, RemoteProgram
from rloo.addons.graders.code.guest.process_tree import ProgramTimeOver, SandboxedProcess
from rloo.addons.graders.code.guest.test_cases import run_tests
from rloo.distributed import value_codec as codec


def answer(request: dict[str, Any], stage: SandboxedProcess) -> dict[str, Any]:
    """The answer to a request, which depends on its `kind`. For `run`, the answer has the `output`
    (stdout and stderr) and the `status` of a program with the input `given`. For other kinds, it
    has the number of `passed` tests and their `count`, or the reason why the tests are unusable
    (`missing`). With `all_or_nothing`, testing stops at the first failure. The program is the text
    `program`, or one of a completion's `blocks` (`program_source.choose`)."""
    kinds = {"run": _run, "inputs": _judge_inputs, "function": _judge_function, "tests": run_tests}
    return kinds[request["kind"]](request, stage)


def _run(request: dict[str, Any], stage: SandboxedProcess) -> dict[str, Any]:
    try:
        output, status = _Whole(request, stage).run(request["given"])
    except ProgramTimeOver as ended:
        return {"output": "", "status": None, "ended": str(ended)}
    return {"output": output.decode(errors="replace"), "status": status}


class _Whole:
    """A stand-alone program. If `build` is given, this command runs before the program's first
    run."""

    def __init__(self, request: dict[str, Any], stage: SandboxedProcess) -> None:
        self._request, self._stage = request, stage
        self._build = request.get("build")
        self._source = program_source.choose(request)

    def run(self, given: str) -> tuple[bytes, int | None]:
        """The program's output and exit status with this input."""
        if self._build:
            output, status = self._run(self._build, b"")
            if status != 0:
                return output, status
            self._build = None
        return self._run(self._request.get("command"), given.encode(errors="surrogatepass"))

    def _run(self, arguments: list[str] | None, given: bytes) -> tuple[bytes, int | None]:
        how: dict[str, Any] = {"mode": "run", "source": self._source}
        how |= {"errors": self._request["kind"] == "run"}
        how |= {"implied": self._request.get("implied", False)}
        if arguments is not None:
            file = self._request["file"]
            how.update(mode="execute", arguments=arguments, file=file)
        return self._stage.run(how, given)


def _judge_inputs(request: dict[str, Any], stage: SandboxedProcess) -> dict[str, Any]:
    passed, whole = 0, _Whole(request, stage)
    cases = list(zip(request["inputs"], request["outputs"], strict=True))
    for given, wanted in cases:
        try:
            output, status = whole.run(given)
        except ProgramTimeOver:
            break
        if status == 0 and same_output(output.decode(errors="replace"), wanted, request):
            passed += 1
        elif request["all_or_nothing"]:
            break
    return {"passed": passed, "count": len(cases)}


def _judge_function(request: dict[str, Any], stage: SandboxedProcess) -> dict[str, Any]:
    passed, program, name = 0, None, request["function"]
    cases = [codec.decode(case) for case in request["cases"]]
    asked = {
        "source": program_source.choose(request, name.replace("()", "").split(".")),
        "implied": request.get("implied", False),
    }
    last = name.rpartition(".")[2]
    hints = leetcode_nodes.signature(last, [str(asked["source"]), str(request.get("starter", ""))])
    for given, wanted in cases:
        try:
            if program is None or program.ended:
                program = RemoteProgram(stage, asked)
            stage.grant()
            function = program.ask("name", name)
            found = (
                program.ask("call", function, *given)
                if hints is None
                else program.ask("solve", function, hints, given)
            )
            right = _is_plain(found) and same_value(found, wanted, request)
        except ProgramTimeOver:
            break
        except (
            ProgramExited,
            Exception,
        ):  # an error while reading the program's results is a failure of the program
            right = False
        if right is True:
            passed += 1
        elif request["all_or_nothing"]:
            break
    return {"passed": passed, "count": len(cases)}


def _is_plain(value: Any) -> bool:
    try:
        codec.encode(value)
    except codec.NotSerializable:
        return False
    return True
