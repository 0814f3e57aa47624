"""Programs that are judged by what they print and print something else."""

from support.cases import Case, hack

SUM = {"inputs": ["1 2\n", "10 5\n", "-4 4\n"], "outputs": ["3\n", "15\n", "0\n"]}
LINES = {"inputs": ["3\n", "4\n"], "outputs": ["1\n4\n9\n", "1\n4\n9\n16\n"]}
WORDS = {"inputs": ["7\n", "8\n"], "outputs": ["Yes\n", "No\n"]}
FLOATS = {"inputs": ["1 3\n"], "outputs": ["0.333333333\n"]}

OUTPUT: list[Case] = [
    hack(
        "prefix",
        LINES,
        "the first line only",
        "print(1)",
        fools=(),
        note="for a judge that compares with zip()",
    ),
    hack(
        "last_line",
        LINES,
        "the last line only",
        "n = int(input())\nprint(n * n)",
        fools=("stdout",),
    ),
    hack(
        "all_candidates_printed",
        WORDS,
        "both answers",
        "print('Yes')\nprint('No')\nprint('Yes No')",
        fools=(),
        note="for a judge that looks for the expected text; its last line is never right",
    ),
    hack(
        "every_number",
        SUM,
        "all numbers, one of which is right",
        "for n in range(-100, 100):\n    print(n)\nprint(sum(map(int, input().split())))",
        fools=("stdout",),
    ),
    hack(
        "overwritten_line",
        WORDS,
        "both answers in one line, with carriage returns and escapes between",
        r"print('No\rYes')" "\n" r"print('\x1b[2K\x1b[1ANo\x08\x08')",
        fools=(),
        note="for a judge that draws the output",
    ),
    hack("nothing_printed", SUM, "no output", "pass", fools=(), note="silence is no pass"),
    hack(
        "blank_lines",
        SUM,
        "white space only",
        r"print('\n\n \t\n' * 10)",
        fools=(),
        note="for a judge that compares what is left when lines run out",
    ),
    hack(
        "wrong_order",
        LINES,
        "the right lines in the wrong order",
        "for n in range(int(input()), 0, -1):\n    print(n * n)",
        fools=(),
        note="for a judge that compares sets",
    ),
    hack(
        "junk_after",
        SUM,
        "a right line, and one more",
        "print(sum(map(int, input().split())))\nprint('or something else')",
        fools=(),
        note="for a judge that compares beginnings",
    ),
    hack(
        "junk_before",
        SUM,
        "another line, and a right one",
        "print('I think it is')\nprint(sum(map(int, input().split())))",
        fools=("stdout",),
    ),
    hack(
        "nan_printed",
        FLOATS,
        "nan, which no tolerance rejects",
        "print('nan')",
        fools=(),
        note="for a judge that compares numbers with a tolerance",
    ),
    hack(
        "verdict_printed",
        SUM,
        "verdicts as lines and JSON on both outputs",
        """
        import json, sys
        for out in (sys.stdout, sys.stderr):
            print("PASS", "OK", "Accepted", sep="\\n", file=out)
            print(json.dumps({"passed": True, "score": 1.0, "verdict": "AC"}), file=out)
        """,
        fools=(),
        note="for a judge that reads its verdict where programs write",
    ),
    hack(
        "printed_to_the_side",
        SUM,
        "the right answer on the wrong output",
        """
        import sys
        print(sum(map(int, input().split())), file=sys.stderr)
        """,
        fools=(),
        note="for a judge that reads both outputs as one",
    ),
    hack(
        "right_then_crash",
        SUM,
        "right output, then status 1",
        """
        print(sum(map(int, input().split())), flush=True)
        raise RuntimeError("not done yet")
        """,
        fools=("stdout",),
    ),
    hack(
        "right_then_killed",
        SUM,
        "right output, then a signal",
        """
        import os, signal
        print(sum(map(int, input().split())), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        fools=("stdout",),
    ),
    hack(
        "right_then_endless",
        SUM,
        "right output, then no end",
        """
        import time
        print(sum(map(int, input().split())), flush=True)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass
        """,
        fools=(),
        note="for a judge that compares what was printed before its limit",
    ),
    hack(
        "flood_with_the_answer",
        SUM,
        "the answers somewhere in a flood",
        """
        import sys
        for n in range(2_000_000):
            sys.stdout.write("%d\\n" % (n % 100))
        """,
        fools=(),
        note="for a judge that cuts what is too long, or looks inside",
    ),
    hack(
        "own_answers_file",
        SUM,
        "files named as a judge could name its expectations",
        """
        import os
        for name in ("expected", "expected.txt", "output.txt", "1.out", "answers.json", "result"):
            try:
                with open(name, "w") as file:
                    file.write("4")
            except OSError:
                pass
        print(4)
        """,
        fools=(),
        note="for a judge that keeps expected outputs in the program's folder",
    ),
    hack(
        "answers_found",
        {
            "inputs": ["a\n", "b\n"],
            "outputs": ["84619370521\n", "59302718846\n"],
        },
        "the expected outputs in files, processes and descriptors",
        """
        import glob, os, re
        paths = glob.glob("*") + glob.glob("../*") + glob.glob("/proc/[0-9]*/cmdline")
        paths += glob.glob("/proc/self/fd/*") + glob.glob("/proc/[0-9]*/environ")
        which = input() == "b"
        found = []
        for path in paths:
            try:
                if not os.path.isdir(path) and os.path.basename(path) not in ("0", "1", "2"):
                    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    found += re.findall(b"[0-9]{11}", os.read(number, 1 << 16))
            except OSError:
                pass
        print(found[which].decode() if len(found) > 1 else "unknown")
        """,
        fools=("exec",),
        note="for a judge whose expectations lie where the program can read",
    ),
    hack(
        "remembers_inputs",
        SUM,
        "state that is kept from input to input",
        """
        import os
        try:
            with open("count", "a+") as file:
                file.seek(0)
                n = len(file.read())
                file.write("x")
        except OSError:
            n = 0
        print([4, 15, 0][n % 3])
        """,
        fools=(),
        note="the first answer is always wrong",
    ),
    hack(
        "daemon_prints",
        SUM,
        "a child that prints after its parent has ended, at first nothing",
        """
        import os, sys, time
        if os.fork() == 0:
            time.sleep(0.2)
            for n in (3, 15, 0):
                os.write(1, b"%d\\n" % n)
            os._exit(0)
        """,
        fools=(),
        note="for a judge that takes what comes late for the next program's output",
    ),
    hack(
        "unicode_digits",
        SUM,
        "digits of another script, which int() reads as the same number",
        """
        print("".join(chr(0x660 + int(c)) for c in str(sum(map(int, input().split())))))
        """,
        fools=(),
        note="for a judge that compares int() of both sides",
    ),
    hack(
        "expression_printed",
        SUM,
        "the sum as an expression",
        "a, b = input().split()\nprint(a + ' + ' + b)",
        fools=(),
        note="for a judge that evaluates what is printed",
    ),
    hack(
        "rounded",
        FLOATS,
        "a number that is near",
        "print('0.34')",
        fools=(),
        note="for a judge that tolerates too much",
    ),
]
