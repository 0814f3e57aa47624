"""What holds for the sources as a whole: import direction, lengths, and what is never done."""

import ast
import gc
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
README = ROOT / "README.md"
MAX_FUNCTION_LINES = 60
# A file of one concept may have more lines; its head says why (`# Over 400 lines: ...`).
MAX_FILE_LINES, MAX_CONCEPT_LINES = 400, 500
REASON = re.compile(r"# Over 400 lines: \w+")
MAX_PARAMETERS = 6
# The files of algorithm/ that tell the method, to be read in one sitting.
METHOD = ("train", "rollout", "baselines", "estimators", "advantages", "loss", "update")
MAX_METHOD_LINES = 1000
MAX_METHOD_FILE_LINES = 250
MAX_POLICY_METHODS = 12
# A move of the code pays for each of them: the numbers may fall, not rise.
MAX_PRIVATE_NAMES_IN_TESTS = 199
MAX_PATCHES_IN_TESTS = 209

# The words that names of modules and folders are made of: those of the field, or of Python. A word
# that is new here has its source in the glossary of docs/architecture.md, if it is a term.
MODULE_WORDS = set(
    """
    accelerate accelerator actors adapter addons advantages after algorithm aliases answer answers
    archive areal arguments arithmetic async atomic attention attributes autocast axes backend
    baselines batch before bf16 blocks buckets budget build c cache callbacks card cases causes chat
    check checkpoint checks child cli client cluster code codec colocation command commands compare
    compat compatible completion config consistency console content context controller conversation
    cost countdown counter cpu cuda curriculum data dataset decode decoder decoding deepspeed delta
    denial detect dir display distributed doctor document downsampling dry engine engines env
    environment environments episodes equality equation estimate estimator estimators eval evaluate
    exact executor exit expansion export expression extraction features ffi fields file finding
    flash form formats forward from fsdp2 func function functions fused generation gpu graders
    gradient graphs group groups gsm8k guard guarded guest gym head heartbeat help hf histograms
    html hub hydra image images import importers in info input integrations io isolation iterable
    json jsonl judge kernels keys kl known kv kwargs launch launcher layers layout layouts learning
    leetcode lengths limits line live lm load loading local lock logprobs loop lora loss main math
    matmul memory merge merging metric metrics micro mixin model monitor ms multi names native nccl
    nemo nodes norm normal numbers numpy object objective observer offload oom openenv openrlhf ops
    optimizer optimizers option optional options output overrides packages packed parallel parser
    parsing pilot plan planner platform plot plugin plugins policy pool prefill prefix preflight
    prepare presets printing probe problem process processing profiler program progress prompt proxy
    publisher pytest pytree quantization ragged rank ranks ray reader reasoning recipes record
    records reference registry regression remote renderer report requests resource resources
    response restart resume retired retry reward rewards rl rloo rng roles rollout rounding router
    rows rules run running sample sampler sampling sandbox save schedule scoring screen seccomp
    secrets self sequence serialization serve server set settings setup shapes shaping sharded
    shared shell show sides signal signals simulation sizes slurm softmax source spec special specs
    stages standard state static stats status step stop stopwatch store streams subclass subset
    suite summary supervisor support swift syscalls system tables task tasks templates tensor test
    testing text time timeout timing token tokenization tool tools torch traceback tracking train
    trainer training tree trial trl tuning turn types unsupported update upload user validation
    value values variance verifiers verl versions vllm weight weights wording words worker workers
    world writer yaml zero
    """.split()  # noqa: SIM905
)

# The signatures of others: TRL's trainer, transformers' attention functions.
MANY_PARAMETERS = {
    "rloo.model.attention._attention_forward",
    "rloo.trainer.trainer.__init__",
}

# From low to high: a module imports from its own folder and from rows below, and nothing imports in
# a circle; imports that only a type checker sees count. docs/architecture.md has the reasons.
ROWS = [
    "types distributed plugins",
    "config",
    "data",
    "rewards",
    "kernels",
    "model",
    "engines tracking",
    "episodes",
    "algorithm",
    "trainer",
    "tools addons testing",
    "cli",
    "__main__",
]
# The add-ons that another add-on imports. The core imports none, and names them in plugins.py only.
AMONG_ADDONS = {("integrations", "graders"), ("planner", "launch")}
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row.split()}
# The package itself imports nothing when it is loaded: what it exports is found when asked for.
ROW_OF["rloo"] = -1

OPTIONAL = (
    "peft", "vllm", "ray", "wandb", "trackio", "math_verify", "trl", "bitsandbytes", "simpy",
    "reasoning_gym", "openenv", "verifiers",
)  # fmt: skip
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "os.system",
    "torch.load",
}
# `yaml` is PyYAML, which reads YAML 1.1: config/yaml_io.py reads YAML 1.2.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_IMPORTS |= {"yaml"}
FORBIDDEN_ARGUMENTS = {
    "shell=True",
    "trust_remote_code=True",
    "allow_pickle=True",
    "typ='unsafe'",  # ruamel.yaml's loaders that make any object
    "typ='full'",
}
# Written apart, so that this file passes its own test.
MACHINE_PATHS = re.compile("|".join(f"/{name}/" for name in ("work", "tmp", "root", "home", "opt")))
TEXT_FILES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".json", ".jsonl", ".cfg", ""}


@pytest.fixture(autouse=True, scope="module")
def _trees_stay():
    """They are no garbage, and to look for some among a million nodes takes as long as a test."""
    gc.disable()
    yield
    gc.enable()
    for each in (parse, nodes):
        each.cache_clear()


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file, walked once for all tests."""
    return tuple(ast.walk(parse(path)))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def folder_of(module: str) -> str:
    """The entry of the package that a module belongs to."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    assert name in ROW_OF, f"{module} stands in no row of tests/test_sources.py (ROWS)"
    return name


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if not is_typing_only(child):
            yield child
            yield from run_time_nodes(child)


def imported(node: ast.AST) -> list[str]:
    """The dotted names that an import statement binds; `from a import b` is a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def is_patch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr"


def patched(node: ast.AST) -> list[str]:
    """The dotted name that monkeypatch imports and changes."""
    if is_patch(node):
        return [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
    return []


def own_imports(path: Path, modules: set[str]) -> set[str]:
    """The package's modules that `path` imports, inside functions and for type checkers too."""
    found = set()
    is_package = path == SOURCE / "rloo" / "__init__.py"
    for node in run_time_nodes(parse(path)) if is_package else nodes(path):
        for name in imported(node):
            if name.split(".")[0] == "rloo":
                found.add(name if name in modules else name.rpartition(".")[0])
    return found


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_imports_go_from_low_to_high():
    modules = {name_of(path) for path in source_files()}
    graph = {name_of(path): own_imports(path, modules) for path in source_files()}
    wrong = {
        (module, other)
        for module, others in graph.items()
        for other in others
        if (ours := folder_of(module)) != (theirs := folder_of(other))
        and ROW_OF[theirs] >= ROW_OF[ours]
    }
    assert not wrong
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_what_an_engine_can_do_is_asked_of_its_spec():
    """Nobody decides by an engine's name."""
    found = [
        str(path.relative_to(SOURCE))
        for path in source_files()
        if 'startswith("vllm' in path.read_text(encoding="utf-8")
    ]
    assert not [path for path in found if not path.startswith("rloo/engines/vllm/")]


def addon_of(module: str) -> str:
    """The add-on that a module belongs to; "" for the core."""
    return module.split(".")[2] if module.startswith("rloo.addons.") else ""


def test_the_core_names_add_ons_in_one_file():
    found = {
        name_of(path)
        for path in source_files()
        if not name_of(path).startswith("rloo.addons")
        for node in nodes(path)
        if any(f"{name}.".startswith("rloo.addons.") for name in imported(node))
        or (isinstance(node, ast.Constant) and "rloo.addons" in str(node.value))
    }
    assert found == {"rloo.plugins"}
    heads = [name for node in nodes(SOURCE / "rloo/plugins.py") for name in imported(node)]
    assert not [name for name in heads if name.startswith("rloo.")]


def test_add_ons_import_public_names_of_the_core_and_each_other_by_the_table():
    modules = {name_of(path) for path in source_files()}
    among, private = set(), []
    for path in source_files():
        if own := addon_of(name_of(path)):
            others = {addon_of(module) for module in own_imports(path, modules)}
            among |= {(own, other) for other in others - {"", own}}
            names = [name for node in nodes(path) for name in imported(node)]
            private += [n for n in names if re.match(r"rloo\..*\._[a-z]", n)]
    assert among == AMONG_ADDONS
    assert not private


def test_every_entry_of_the_package_has_a_row():
    entries = {path.stem for path in (SOURCE / "rloo").iterdir()} - {
        "__init__",
        "__pycache__",
        "py",
    }
    assert entries == set(ROW_OF) - {"rloo"}


def test_no_test_module_imports_another():
    """What several of them need stands in tests/support."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if "support" not in path.parts]
    own = {path.stem for path in modules}
    assert len(own) == len(modules) - 1, "pytest wants one name a file; conftest.py is there twice"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in nodes(path)
        for name in [*imported(node), *patched(node)]
        if own.intersection(name.split("."))
    ]
    assert not wrong


def own_names(node: ast.AST) -> list[str]:
    """The names that a node of a source gives: to a function, a class, an attribute, a global."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        return [node.id if isinstance(node, ast.Name) else node.attr]
    return []


def used_names(node: ast.AST) -> list[str]:
    """The names by which a node of a test reaches something that is not its own object's."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [] if own else [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if is_patch(node):
        texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        return [text.rpartition(".")[2] for text in texts if isinstance(text, str)][:1]
    return []


def test_tests_reach_inside_no_more_often():
    ours = {name for path in source_files() for node in nodes(path) for name in own_names(node)}
    private = {name for name in ours if name.startswith("_") and not name.startswith("__")}
    tests = [node for path in (ROOT / "tests").rglob("*.py") for node in nodes(path)]
    names = [name for node in tests for name in used_names(node) if name in private]
    patches = [node for node in tests if is_patch(node)]
    assert len(names) <= MAX_PRIVATE_NAMES_IN_TESTS
    assert len(patches) <= MAX_PATCHES_IN_TESTS


def test_modules_are_named_by_the_words_of_the_field():
    parts = {part for path in source_files() for part in name_of(path).split(".")}
    words = {word for part in parts if not part.startswith("__") for word in part.split("_")}
    assert words == MODULE_WORDS | {"rloo"}, "a module's name has a word that is not listed"


def test_no_file_and_no_class_has_the_name_of_another():
    files = Counter(path.name for path in source_files() if path.name != "__init__.py")
    classes = Counter(
        n.name for p in source_files() for n in nodes(p) if isinstance(n, ast.ClassDef)
    )
    assert [name for name, count in (files + classes).items() if count > 1] == []


def test_functions_and_files_are_short():
    long = [
        f"{name_of(path)}.{function.name} has {length} lines"
        for path in source_files()
        for function in functions(path)
        if (length := function.end_lineno - function.lineno + 1) > MAX_FUNCTION_LINES
    ]
    long += [
        f"{name_of(path)} has {length} lines"
        for path in source_files()
        if (length := len(lines := path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
        and (length > MAX_CONCEPT_LINES or not any(map(REASON.match, lines[:12])))
    ]
    assert not long


def test_functions_have_few_parameters():
    def count(of: ast.arguments) -> int:
        names = [parameter.arg for parameter in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
        return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))

    many = {
        f"{name_of(path)}.{function.name}"
        for path in source_files()
        for function in functions(path)
        if count(function.args) > MAX_PARAMETERS
    }
    assert many == MANY_PARAMETERS


def test_the_method_is_short():
    files = [SOURCE / "rloo/algorithm" / f"{name}.py" for name in METHOD]
    lines = {file.stem: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    long = {name for name, length in lines.items() if length > MAX_METHOD_FILE_LINES}
    if sum(lines.values()) > MAX_METHOD_LINES:
        long.add("all together")
    assert not long


def test_the_policy_has_few_public_methods():
    tree = parse(SOURCE / "rloo/model/policy.py")
    (policy,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Policy")
    methods = [n.name for n in policy.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    assert len(methods) <= MAX_POLICY_METHODS, methods


def test_nothing_that_runs_data_as_code():
    found = []
    for path in source_files():
        module = name_of(path)
        # What is sent behind a wall and runs there alone.
        behind = module.startswith("rloo.addons.graders.code.guest.")
        # TRL's default of vllm_server_host, where a client looks.
        is_table = module == "rloo.config.options"
        for node in nodes(path):
            where = f"{module}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and not behind:
                if (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
                    found.append(f"{where} calls {called}")
            elif isinstance(node, ast.keyword):
                if (passed := ast.unparse(node)) in FORBIDDEN_ARGUMENTS:
                    found.append(f"{where} passes {passed}")
            elif isinstance(node, ast.Constant) and node.value == "0.0.0.0" and not is_table:
                found.append(f"{where} names 0.0.0.0")
            for name in imported(node):
                # What it reads there was written by the process that has started it.
                own = (module, name) == ("rloo.rewards.reward_workers", "dill")
                if name.split(".")[0] in FORBIDDEN_IMPORTS and not own:
                    found.append(f"{where} imports {name}")
    assert not found


def libraries(nodes: Iterable[ast.AST]) -> Counter[str]:
    """How often each library is imported."""
    return Counter(name.split(".")[0] for node in nodes for name in imported(node))


def test_optional_libraries_are_imported_in_one_file_inside_functions():
    everywhere = {path: libraries(run_time_nodes(parse(path))) for path in source_files()}
    heads = [name for p in source_files() for n in parse(p).body for name in imported(n)]
    for library in OPTIONAL:
        files = [path for path, found in everywhere.items() if library in found]
        assert len(files) <= 1, (library, files)
        for path in files:  # or at the head of a file that is itself imported inside functions only
            inside = libraries(node for f in functions(path) for node in ast.walk(f))
            if inside[library] != everywhere[path][library]:
                at_heads = [n for n in heads if f"{n}.".startswith(f"{name_of(path)}.")]
                assert not at_heads, (library, at_heads)


@pytest.mark.parametrize(
    "code",
    [
        "import rloo",
        "from rloo import RLOOArguments",
        "from rloo.cli import main; main(['--help'])",
    ],
)
def test_help_and_options_need_neither_torch_nor_transformers(code, tmp_path):
    check = "import sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = run_python("-W", "error", "-c", f"{code}\n{check}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_public_functions_classes_and_methods_have_docstrings():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

    def public(body: list[ast.stmt], place: str) -> Iterator[tuple[str, ast.AST]]:
        """Functions, classes and what public classes have."""
        for node in body:
            if isinstance(node, kinds) and node.name[0] != "_":
                yield f"{place}.{node.name}", node
                if isinstance(node, ast.ClassDef):
                    yield from public(node.body, f"{place}.{node.name}")

    missing = [
        name
        for path in source_files()
        for name, node in public(parse(path).body, name_of(path))
        if not ast.get_docstring(node)
    ]
    missing += [name_of(path) for path in source_files() if not ast.get_docstring(parse(path))]
    assert not missing


def test_no_file_names_a_path_of_some_machine():
    folders = ("src", "tests", "benchmarks", "docs", "examples", "tools", ".ci")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*")]
    files += [p for p in ROOT.iterdir() if p.suffix in (".md", ".toml")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.is_file() and path.suffix in TEXT_FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not found


def readme_blocks(language: str) -> list[str]:
    assert README.exists(), "README.md is missing"
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks, f"README.md has no ```{language} block"
    return blocks


@pytest.mark.parametrize("name", ["install", "test"])
def test_readme_has_the_commands_that_ci_runs(name):
    readme_blocks("bash")
    text = README.read_text(encoding="utf-8")
    assert re.search(rf"^<!-- ci:{name} -->\n+```bash\n(?!```)", text, re.MULTILINE)


@pytest.mark.slow
def test_python_examples_of_the_readme_run_as_they_stand(tmp_path):
    for number, block in enumerate(readme_blocks("python")):
        script = tmp_path / f"example_{number}.py"
        script.write_text(block, encoding="utf-8")
        result = run_python(script.name, cwd=tmp_path)
        assert result.returncode == 0, f"{block}\n{result.stderr}"
