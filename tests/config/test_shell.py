"""What a shell script would run is known without running it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from rloo.config.imports.shell import find_command, read_flags, read_script

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
