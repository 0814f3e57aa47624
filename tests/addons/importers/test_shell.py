"""What a shell script would run is known without running it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from rloo.addons.importers.shell import find_command, read_flags, read_script

SCRIPT = r"""#!/bin/bash
set -e
A=3; B="x y"   # a lone quotation mark in a comment: "
L=$((1024 * 8)) M=$(( (A + L) * 2 ))
ARR=(
  --a 1
  # --no
  --b "two words"
)
ARR+=(--c)
TEXT="one
two"
E=
DEEP=${NOPE:-"${NOPE:-in $A}/z"}
program "${ARR[@]}" k=$A 'q="a b"' list='["c","w"]' sum=${M} x="$B" y=$B z=${NOPE:-"d $A"} \
    none="$E" w='$A' t="$TEXT" "${NOPE:-q r}" "$DEEP" half${A}way \
    a\ b $'tab\tend' ${NOPE:+gone} ${A:+kept} 2>&1 | cat
cat <<END
program not=me
END
program last=1 2> /dev/null
"""


def test_words_are_those_that_bash_makes():
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not here to compare with")
    # The program prints each of its words, ended by a NUL.
    told = "program() { printf '%s\\0' \"$@\"; printf 'END\\0'; }\n"
    run = subprocess.run([bash, "-c", told + SCRIPT], capture_output=True, text=True, check=True)
    printed = [words.split("\0")[:-1] for words in run.stdout.split("END\0")]
    printed = [[re.sub("^program not=me\n", "", word) for word in words] for words in printed]
    commands = find_command(read_script(SCRIPT), re.compile("program"))
    assert [words for _, words in commands] == printed[:2]
    assert commands[0][1][:5] == ["--a", "1", "--b", "two words", "--c"]


def test_what_only_a_run_would_tell_stays_as_it_is_written(monkeypatch):
    monkeypatch.setenv("GIVEN", "outside")
    monkeypatch.delenv("NOT_GIVEN", raising=False)
    script = read_script(
        'p a=$NOT_GIVEN b=$(date +%s) c="${NOT_GIVEN##*/}" d=$GIVEN e=`id` "$@" $1'
    )
    words = find_command(script, re.compile("p"))[0][1]
    assert words == [
        "a=${NOT_GIVEN}", "b=$(date +%s)", "c=${NOT_GIVEN##*/}", "d=outside", "e=`id`", "${1}",
    ]  # fmt: skip


def test_a_command_is_found_inside_of_another_s_word():
    script = read_script(
        """srun bash -c "cd x && run -- python -m tool.main --a '{\\"b\\": 1}'" &> log"""
    )
    assert find_command(script, re.compile(r"tool\.main"))[0][1] == ["--a", '{"b": 1}']


def test_sums_are_of_digits_alone():
    script = read_script("X=2\np $((X ** 9)) $((__import__)) $(( (X + 1) * 4 / 3 - 5 % 3 ))")
    assert script.commands == [["p", "$((X ** 9))", "$((__import__))", "2"]]


def test_branches_are_noticed():
    assert read_script("if true; then A=1; else A=2; fi").conditional
    assert not read_script("A=1; echo if").conditional


@pytest.mark.parametrize(("text", "message"), [("a 'b", "line 1: no closing '"),
                                               ('a\n"b', 'line 2: no closing "'),
                                               ("a ${b", "line 1: no closing }")])  # fmt: skip
def test_what_is_never_closed_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_script(text)


def test_flags_take_none_one_or_several_values_and_the_last_wins():
    words = ["--a", "--b-c", "1", "--d", "x", "y", "--e=2", "--f", "-3", "--a-b", "--e", "4"]
    assert read_flags(words) == {
        "a": "true", "b_c": "1", "d": ["x", "y"], "e": "4", "f": "-3", "a_b": "true",
    }  # fmt: skip
    with pytest.raises(ValueError, match="stray stands before any option"):
        read_flags(["stray", "--a"])


# Functions, loops of one value, folders and patterns: nothing that only a run would tell.
CALLS = r"""#!/bin/bash
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NAME=org/model-7b.v1
launch() {
    local first=$1; shift
    if_any() { program inner "$@" all="$*" n=$#; }   # defined and called within: }
    if_any "$@" rest
    program first=$first two="${2:-none}" second=${@:2:1} "$@"
}
function other { program o="${*}" \
    "${@}"; }
cd "$HERE"
launch a "b c" d=1
other 'x  y' `# a comment " in the command` z
for only in one; do program loop=$only; done
for none in "$@"; do program never=$none; done
while [[ $# -gt 0 ]]; do NAME=$1; shift; program never; done
set -- p q
program "$@" ${NAME##*/} ${NAME#*/} ${NAME%.*} ${NAME%%-*} ${NAME/7b/8b} \
    base=$(basename $NAME) dir=$(dirname "$HERE/x/y") here=$HERE $(echo s t)
eval "program ev=$NAME"
never() { program uncalled; }
"""


def test_functions_and_folders_are_what_bash_makes_of_them(tmp_path, monkeypatch):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not here to compare with")
    (tmp_path / "scripts").mkdir()
    path = tmp_path / "scripts" / "run.sh"
    told = "program() { printf '%s\\0' \"$@\"; printf 'END\\0'; }\n"
    path.write_text(told + CALLS)
    run = subprocess.run(
        [bash, "scripts/run.sh"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    printed = [words.split("\0")[:-1] for words in run.stdout.split("END\0")][:-1]
    monkeypatch.chdir(tmp_path)
    script = read_script(CALLS, "scripts/run.sh")
    found = [words for _, words in find_command(script, re.compile("program"))]
    assert found == printed
    assert len(found) == 6 and ["inner", "b c", "d=1", "rest", "all=b c d=1 rest", "n=3"] in found
    assert script.uncalled == {"function never": [["program", "uncalled"]]}


def test_a_loop_over_several_values_is_said_and_its_variable_not_known():
    script = read_script("x=0\nfor x in 1 2; do p a=$x; done")
    assert script.commands == [["p", "a=${x}"]]
    assert any("a loop over 1, 2" in note for note in script.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=x\n" + 'A="$A$A"\n' * 40, "more than 2000000 letters"),
        ("A=(x x)\n" + 'A+=("${A[@]}")\n' * 40, "more than 2000000 letters"),
        (
            "\n".join(f"f{n}() {{ f{n + 1} $1$1; f{n + 1} $1$1; }}" for n in range(38)) + "\nf0 x",
            "more than 2000000 letters",
        ),
        ("x=" + "${A:-" * 3000 + "}" * 3000, "nested too deeply"),
        ("eval 'eval $A'\nA='eval $A'; eval $A", "nested too deeply"),
    ],
)
def test_scripts_that_grow_without_end_are_refused_at_once(text, message):
    with pytest.raises(ValueError, match=message):
        read_script(text)


def test_a_function_that_calls_itself_is_read_once():
    script = read_script('f() { p "$@"; f more; }\nf 1')
    assert script.commands == [["p", "1"]]
    assert script.notes == ["function f calls itself: it was read once"]


def test_a_command_within_what_only_a_run_would_tell_is_not_looked_for_for_ever():
    script = read_script('x $(find "$0" program | head) y')
    assert find_command(script, re.compile("program")) == []


def test_another_file_is_read_where_it_is_there_and_said_where_not(tmp_path, monkeypatch):
    (tmp_path / "common.sh").write_text("K=4\n")
    monkeypatch.chdir(tmp_path)
    script = read_script("source common.sh\n. ./gone.sh\nsource venv/bin/activate\np k=$K")
    assert script.commands == [["p", "k=4"]]
    assert [note.split(" sets")[0] for note in script.notes] == ["what ./gone.sh"]


def test_what_only_a_run_would_tell_is_no_second_value_of_a_flag(monkeypatch):
    monkeypatch.delenv("EXTRA", raising=False)
    words = read_script("p --a 1 $EXTRA --b $EXTRA").commands[0][1:]
    assert read_flags(words) == {"a": "1", "b": "${EXTRA}", "${EXTRA}": ""}
