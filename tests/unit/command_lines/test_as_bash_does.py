"""Small scripts start the same programs, with the same words and variables, in bash and where llmlaunch reads them."""

# ruff: noqa: E501

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmlaunch.command_lines.shell import read_script

PROGRAMS = ("python", "torchrun", "srun", "run")

# Appends its words and its environment to a file, and prints nothing.
RECORDER = r"""#!/bin/sh
{ printf '%s\0' "${0##*/}" "$@"; printf '\001\0'; env -0; printf '\002\0'; } >> "$RECORD"
"""

SCRIPTS = {
    "an empty word of plus": 'if [ -n "${T+x}" ]; then run no; fi; run "${T+x}" end ${T+x} "${T:+x}"',
    "plus of what is set": 'A=; run "${A+set}" "${A:+set}" ${A:+x} "${B+"$A"}" end',
    "plus with quotes inside": 'A="a b"; run ${A:+"$A"} "${A:+$A c}" ${A:+$A}',
    "minus": 'run ${A:-"a b"} ${A:-a b} "${A:-a b}" ${A-} "${A-}" ${A:-} end',
    "minus in minus": 'B=x; run ${A:-${B:-c}} "${A:-"${C:-d e}"}"',
    "assigning default": ': ${A:=8} ${B:="x y"}; run $A "$B"',
    "a default with a brace": 'run "${A:-{x}}" ${B:-/a/b}/c',
    "an idiom of arrays": 'A=(); B=(1 "2 3"); run "${A[@]+"${A[@]}"}" "${B[@]+"${B[@]}"}"',
    "unset words disappear": 'run $UNSET a $UNSET b "${NONE[@]}" ${NONE[*]} end',
    "an array set by a test": 'if [ -n "$IMAGE" ]; then ARGS=(--image x); fi; srun -l "${ARGS[@]}" run',
    "an argument decides": 'if [ "$1" = convert ]; then run 1; else run 2; fi; [ -z "$1" ] && run none $#',
    "no arguments": 'run "$@" end $# "$*" ${1:-none} ${2-x}; for a; do run $a; done; for a in "$@"; do run $a; done',
    "an option loop without arguments": "while [ $# -gt 0 ]; do case $1 in -x) X=1;; esac; shift; done; run end",
    "an option loop": 'set -- -x 1 -y; while (( $# )); do case "$1" in -x) A=$2; shift 2;; *) B=$1; shift;; esac; done; run $A $B',
    "conditions on unset variables": 'if [ "$D" == 1 ]; then run 1; elif [[ -z $E ]]; then run 2; fi; [[ $F == x || $G ]] || run 3',
    "arithmetic of unset variables": "if (( N > 1 )); then run many; else run one; fi; (( M == 0 )) && run zero",
    "case of an unset variable": 'case "$S" in a) run a;; *) run other;; esac; case $S in "") run empty;; esac',
    "exported": 'X1=a; export X1 X2="b c"; X3=d; X4=e run 1; run 2; export -n X1; declare -x X5=f; run 3; unset X2; run 4',
    "exported before it is set": "export X1; run 1; X1=a; run 2; X1+=b; run 3",
    "exported by words": 'A="X1=a X2=b"; export $A; run; export "X3=c d"; run',
    "exported in a subshell": "(export X1=a; run 1); run 2",
    "exported all": "X1=a; export X1; f() { local X1=b; run in; }; f; run out",
    "a function": 'f() { run "$1" "$2" $#; shift; run "$@"; }; f a "b c" d; run $#',
    "local": 'A=1; f() { local A=2 B; run $A "$B"; A=3; g; run $A; }; g() { run $A; A=4; }; f; run $A',
    "local hides": 'A=1; f() { local A; run "$A" "${A:-none}"; }; f; run $A',
    "local of itself": 'A=1; f() { local A=$A2; A2=x; run "$A"; }; A2=$A; f; run $A2',
    "a global of a function": "f() { A=1; declare -g B=2; declare C=3; }; f; run $A $B $C end",
    "a name reference": 'f() { local -n r=$1; r=3; run $r; r+=(x); }; f A; run $A "${A[@]}"',
    "a reference to an array": 'f() { local -n l=$1; l+=(--b "2 3"); run "${l[@]}" ${#l[@]}; }; L=(--a 1); f L; run "${L[@]}"',
    "declare -n": "declare -n R=T; R=5; run $T; T=6; run $R",
    "recursion": "f() { [ $1 -le 0 ] && return; run $1; f $(($1 - 1)); }; f 3",
    "a status": "f() { return 1; }; if f; then run 1; else run 2; fi; g() { return 0; }; g && run 3; f || run 4",
    "output of a function": 'f() { local x=$1; echo "$x-$((x * 2))"; }; A=$(f 4); run $A "$(f 5)"',
    "indirection": 'B=c; c=5; A=B; run ${!A} "${!B}"; L=(x "y z"); R="L[@]"; run "${!R}"; E="L[1]"; run "${!E}"',
    "names by their beginning": 'XA1=1; XA2=2; run ${!XA*} "${!XA@}"',
    "keys": 'declare -A M=([a]=1); run "${!M[@]}"; L=(x y); L[5]=z; run "${!L[@]}" ${#L[@]}',
    "entries with holes": 'L=(); L[3]=d; L[1]=b; run "${L[@]}" ${#L[@]} ${L[3]} "${L[0]}" end; L+=(e); run "${!L[@]}"',
    "the last entry": 'L=(a b c); run ${L[-1]} ${L[-2]}; L[-1]=z; run "${L[@]}"; i=1; run ${L[i]} ${L[i+1]} ${L[$i]}',
    "slices": 'L=(a b c d); run "${L[@]:1}" "${L[@]:1:2}" "${L[@]: -1}" ${L[@]::2}; A=abcdef; run ${A:2} ${A:1:2} ${A: -2} ${A:0:-1} ${A:1+1:2}',
    "slices of arguments": 'set -- a b c d; run "${@:2}" "${@:2:2}" "${@: -1}" ${*:3}',
    "removed entries": 'L=(a b c); unset "L[1]"; run "${L[@]}" ${#L[@]}; unset L; run "${L[@]}" end; declare -A M=([k]=v); unset M[k]; run ${#M[@]}',
    "added entries": 'L=(a); L+=(b "c d"); L[1]+=x; run "${L[@]}"; S=a; S+=b; run $S',
    "entries by index": 'L=([2]=c [0]=a d); run "${L[@]}" "${!L[@]}"',
    "maps": 'declare -A M; M[7b]=32; M["1 3b"]=40; K="1 3b"; run "${M[$K]}" ${M[7b]} ${#M[@]} "${M[none]}" ${M[none]:-d}',
    "a map in a loop": 'declare -A M=([a]=1); for k in "${!M[@]}"; do run $k ${M[$k]}; done; [[ -v M[a] ]] && run has; [[ -v M[b] ]] || run lacks',
    "arithmetic": "A=5; run $((A*2)) $(( (A+1) % 4 )) $((A>3?1:0)) $((-A)) $((!A)) $((~A)) $((A**2)) $((0x1f)) $((010)) $((2#101))",
    "arithmetic that assigns": "run $((i=5)) $i $((i+=2)) $((i++)) $((++i)) $((i<<=1)) $i; ((j=i*2)); let k=j+1 l=k*2; run $j $k $l",
    "arithmetic of entries": "L=(3 4); run $((L[0]*L[1])) $((${#L[@]}-1)); ((L[1]+=5)); run ${L[1]}; ((L[2]=9)); run ${L[@]}",
    "arithmetic that decides": "A=0; run $((A&&1/A)) $((1||1/0)) $((A?1/A:7)); ((A)) || run zero; if ((A==0)); then run equal; fi",
    "arithmetic of text": 'E="1+2"; run $((E*2)) $(($E*2)); N=$[3*4]; run $N; declare -i I=3+4; run $I',
    "counting": "for ((i=0, j=5; i<3; i++, j--)); do run $i $j; done; for ((;;)); do break; done; for ((i=0;i<2;i++)) { run $i; }",
    "here-documents": 'A=3\nX=$(cat <<EOF\na $A $(echo b) $((A+1)) \\$A \'q\' "r"\nEOF\n)\nrun "$X"\nrun "$(cat <<\'EOF\'\n$A\nEOF\n)"',
    "two here-documents": 'read a <<A; read b <<B\nx 1\nA\ny 2\nB\nrun "$a" "$b"',
    "a here-document without tabs": 'run "$(cat <<-E\n\t\ta\n\tb\n\tE\n)" end',
    "a here-document in a pipe": "cat <<E | while read -r a b; do run $a $b; done\n1 2\n3 4 5\nE\n",
    "a here-document read whole": "read -r -d '' T <<'E' || true\na b\n  c\nE\nrun \"$T\"; run $T",
    "here-strings": 'read a b <<< "1 2 3"; run "$a" "$b"; A=$(tr a-c x <<< abcd); run $A; IFS=, read -r c d <<< "x,y z,w"; run "$c" "$d"',
    "reading an array": 'read -ra L <<< "a b  c"; run "${L[@]}" ${#L[@]}; IFS=: read -r -a P <<< "x::y"; run "${P[@]}" ${#P[@]}',
    "reading lines": 'printf "%s\\n" "a 1" "b 2" > f; while read -r n v; do run $n $v; done < f; while IFS= read -r l; do run "$l"; done < f',
    "reading until the end": 'while read -r x || [ -n "$x" ]; do run $x; done < <(printf "a\\nb"); read y < <(echo z); run $y',
    "mapfile": 'mapfile -t L < <(printf "a b\\nc\\n"); run "${L[@]}" ${#L[@]}; readarray -t M <<< "x"; run "${M[@]}"',
    "separators": 'IFS=,; A="a,b c,,d"; run $A; unset IFS; run $A; L=(1 2); IFS=-; run "${L[*]}" "$(IFS=+; echo "${L[*]}")"',
    "separators in a function": "f() { local IFS=:; run $1; }; f a:b; A=a:b; run $A",
    "options": 'while getopts "ab:c" o "-a" "-b" "1 2" -c; do run $o "$OPTARG"; done; run $OPTIND',
    "options of the script": 'set -- -n 4 -v rest; while getopts ":n:v" o; do case $o in n) N=$OPTARG;; v) V=1;; esac; done; shift $((OPTIND-1)); run $N $V "$@"',
    "printf": "run $(printf '%s-' a b) \"$(printf '%03d|%5s|%-4s|' 7 x y)\" $(printf '%.2f' 3.14159) $(printf '%x' 255) \"$(printf '%s\\t%b' a 'b\\n')\"",
    "printf into a variable": 'printf -v A "%02d" 5; run $A; printf -v B "%s," x y; run $B',
    "echo": 'run "$(echo -n a; echo b)" "$(echo -e \'a\\tb\')" "$(echo \'a\\tb\')" $(echo a  b)',
    "the shell's options": "set -euo pipefail; shopt -s extglob nullglob; A=1; run $A; set +u; run $B end; set -- x; run $1",
    "a trap": "trap 'run never' USR1; trap - INT; run 1",
    "patterns": 'A=Llama-2-7b; [[ $A == Llama* ]] && run 1; [[ $A == "Llama*" ]] || run 2; [[ $A == *-[0-9]b ]] && run 3; [[ $A != *x* ]] && run 4; [ "$A" = "Llama*" ] || run 5',
    "a bracket in a pattern": 'G="gpu:h100:8(S:0-1)"; run ${G%%(*} "${G#*(}" "${G/(*/}" "${G:1*(2)}"; case $G in *"("*) run 1;; esac',
    "a pattern in a variable": 'P="a*"; [[ abc == $P ]] && run 1; [[ abc == "$P" ]] || run 2; case abc in $P) run 3;; esac',
    "searching": 'A=model-70b-x; if [[ $A =~ ^([a-z]+)-([0-9]+)b ]]; then run ${BASH_REMATCH[1]} ${BASH_REMATCH[2]} "${BASH_REMATCH[0]}"; fi; [[ $A =~ ^x ]] || run none; [[ 12 =~ ^[0-9]+$ ]] && run number',
    "cutting": 'P=/a/b.c/m.tar.gz; run ${P##*/} ${P%/*} ${P%%.*} ${P#*/} ${P##*.} "${P%.*}" ${P#x} ${P%"gz"}',
    "replacing": 'A=a.b.c; run ${A/./_} ${A//./_} ${A//[ab]/x} ${A/%c/z} ${A/#a/z} ${A//b} ${A//./"/"} ${A//a.b/}; B="x y"; run "${B// /_}" ${B/ /,}',
    "cases of letters": "A=Llama; run ${A^^} ${A,,} ${A^} ${A,}; L=(ab cd); run ${L[@]^^}",
    "replacing entries": 'L=(a.x b.x); run "${L[@]%.x}" "${L[@]/#/--}" "${L[@]/%/y}" ${#L[1]}',
    "lengths": 'A="a b"; L=(xx y); run ${#A} ${#L[@]} ${#L} ${#NONE} ${#NONE[@]} $#',
    "quotes": """run "a"'b'c\\ d "e\\"f" 'g"h' "i'j" $'k\\tl\\x41\\'' "\\$m" "\\n" \\n ''""",
    "comments": "run a#b '#c' # d\nrun e \\\n  # f\nrun g;# h\n: # \\\nrun i",
    "continued lines": 'run --a \\\n  --b "x \\\ny" \\\n\\\n  --c\nA=1\\\n2; run $A',
    "a script of Windows": "A=1\r\nif [ $A = 1 ]; then\r\n  run yes \\\r\n    more\r\nfi\r\n",
    "braces": "run a{b,c}d {1..3} {3..1} {01..03} {1..9..4} {a..c} {a,b}{1,2} x{} {x} '{a,b}' {,-}z",
    "case that falls through": "for x in a b c; do case $x in a) run 1;& b) run 2;; c|d) run 3;;& *) run 4;; esac; done",
    "case with quotes": "A='a b'; case \"$A\" in 'a b') run 1;; esac; case x in (x) run 2;; esac; case $A in a*b) run 3; esac",
    "functions of every form": "function f { run f; }; function g() { run g; }; h () ( run h ); k-l() { run k; }; f; g; h; k-l",
    "groups": "{ run 1; run 2; } > /dev/null; ( run 3 ) 2>&1; { run 4; } | cat; ! { false; } && run 5",
    "lists": "true && run 1 || run 2; false || { run 3; }; false && run 4; ! true || run 5; true; [ 1 = 1 ] && [ 2 = 3 ] || run 6",
    "loops": "for i in 1 2 3 4; do [ $i = 2 ] && continue; [ $i = 4 ] && break; run $i; done; until [ ${n:=0} -ge 2 ]; do n=$((n+1)); run n$n; done",
    "loops in loops": "for i in 1 2; do for j in a b; do [ $j = b ] && continue 2; run $i$j; done; done; for i in 1; do for j in 1; do break 2; done; run no; done; run end",
    "break of no loop": "break; continue; return 2> /dev/null; run on",
    "conditions": '[ -z "" -a -n x ] && run 1; [ ! -e /nowhere -o 1 = 2 ] && run 2; [[ ! ( a == b || c == d ) ]] && run 3; [[ a < b && 10 -gt 9 ]] && run 4; test 1 -eq 01 && run 5',
    "tests of one word": '[ "" ] || run 1; [ x ] && run 2; [ ] || run 3; [[ $NONE ]] || run 4; [ ! x ] || run 5; [ = = = ] && run 6',
    "set variables": 'A=; [[ -v A ]] && run 1; [[ -v B ]] || run 2; [ -z "${B+x}" ] && run 3; [ -v A ] && run 4',
    "sourced": "echo 'run in $1 $A; B=2; return; run no' > env.sh; A=1; source ./env.sh x; run $B $#; . ./env.sh; source env.sh",
    "sourced with its folder": 'mkdir() { :; }; echo \'run "$(basename "${BASH_SOURCE[0]}")"\' > part.sh; . ./part.sh',
    "eval": 'A="run a"; eval "$A \\$B"; B="x y"; eval "run \\"\\$B\\" $B"; $A b; C=(run c "d e"); "${C[@]}"',
    "output": 'run $(echo a b) "$(echo a; echo b)" `echo c` "`echo \\`echo d\\``" $(echo $(echo e)); A=$(false); run "$A" end',
    "a file": 'echo "x y" > f; run $(cat f) "$(< f)"; echo z >> f; run $(wc -l < f) $(tail -n 1 f) $(head -1 f | cut -d" " -f2)',
    "errors are not output": "A=$(echo out; echo err >&2); run $A",
    "pipes": 'run $(echo a,b,c | cut -d, -f2-) $(echo aXb | tr X -) $(echo "a b" | sed "s/a/c/") $(printf "1\\n2\\n" | tail -1) $(echo a b | wc -w)',
    "a pipe loses variables": 'A=1; echo 2 | read A; run $A; echo "3 4" | { read B C; run $B $C; }; run $B end',
    "folders": "cd /usr/share; run $PWD $(pwd); cd - > /dev/null; cd /usr; pushd lib > /dev/null; run $PWD; popd > /dev/null; run $PWD; (cd /; run $PWD)",
    "names of paths": 'run $(dirname /a/b/c) $(basename /a/b.sh .sh) $(dirname a) $(basename /a/) "$(cd /usr/lib/..; pwd)"',
    "numbers": "run $(seq 3) $(seq 2 4) $(seq 1 2 5) $(seq 3 -1 1) $(expr 3 + 4) $(expr 2 \\* 3)",
    "ending": "run 1; exit 0; run 2",
    "ending in a subshell": "(run 1; exit 1; run 2); run 3; A=$(echo a; exit; echo b); run $A",
    "ending by exec": "run 1; exec run 2; run 3",
    "a background": "run 1 & wait; run 3 &> /dev/null; run 4 > f 2>&1; run 5 >| f < /dev/null |& cat",
    "descriptors": "exec 3> f; run 1 >&3; run 2 2> /dev/null 3>&-; { run 3; } 2>&1 | cat; exec {fd}> f; run 4 2>&$fd",
    "variables for one command": 'X1=a X2="b c" run 1; run 2; X1=d; X1=e run 3; run $X1; f() { run in; }; X9=z f; run out',
    "empty words": 'A=; run "" \'\' $A "$A" "$A$A" x"$A" $A$A end; B=" "; run $B "$B" a$B b',
    "joined words": 'A="x y"; run a$A-b "a$A-b" a"$A"b $A$A; L=(1 2); run a${L[@]}b "a${L[@]}b" "a${L[*]}b"',
    "commands of words": "C='run a'; $C b; D=run; \"$D\" c; command run d; builtin echo > /dev/null; E=; $E run e",
    "the order of a command": 'L=(a b); IFS=.; IFS=, read -r A B <<< "${L[*]}"; run "$A"; A=1; A+=${A:=2}; run $A; B=; B+=${B:=q}; run $B',
    "parts of unset variables": 'case "${U:1}" in [0-9]) run 1;; a*) run 2;& *) run 3;; esac; [ -z "${U%x}" ] && run 4; run ${C//x/y} end',
    "backslashes that are read": 'read A B <<< \'x \\y z\'; run "$A" "$B"; read -r A <<< \'x\\y\'; run "$A"',
    "replacing nothing": 'A=; run "${A//*/x}" "${A/#/y}" "${A/%/z}" "${A//a/x}" end',
    "sets of characters": "run $(echo job1x2 | tr -d 'a-z') $(echo ' a b ' | tr -d '[:space:]') $(echo aBc | tr a-z A-Z) $(echo 'a/b' | tr '/' '-') $(echo a.b-c | tr '.-' '__') $(printf 'a\\nb' | tr '\\n' ,)",
    "fields": "run $(echo a,b | cut -d, -f2) $(echo plain | cut -d, -f2) $(echo a,b | cut -d, -f9) end",
    "numbers that are none": "set -- a b; shift 7; run $1 $²",
    "every place of a line": "run \"$(echo 'lr=LR x=LR' | sed 's/LR/1e-4/g')\" $(echo '3*4' | bc)",
    "a file written": 'A=3\ncat > f.json <<EOF\n{"z": $A}\nEOF\nrun "$(cat f.json)"',
    "nested": 'A=1; run "$(echo "${A:-$(echo "n")} $((A+$(echo 2)))")"',
    "text over lines": "O=\"\n  --a 1 \\\n  --b 2\n  --c 'q'\n\"; run $O",
    "time and not": "time run 1; ! run 2; time -p run 3",
    "special characters": "run 'a;b' \"c|d\" e\\&f '$(x)' \"\\`y\\`\" 'z'\\''z' '*' '?' '[x]' -- - --x=\"a=b\"",
}


def started_by_bash(text: str, folder: Path) -> list[object]:
    """Return what bash starts, with recorders in place of the programs."""
    programs, record = folder / "programs", folder / "record"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)
    work = folder / "bash"
    work.mkdir()
    (work / "train.sh").write_text(text)
    script = (work / "train.sh").read_bytes().replace(b"\r\n", b"\n")  # which bash itself would stumble over
    (work / "train.sh").write_bytes(script)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), "HOME": str(folder)}
    subprocess.run(["bash", "train.sh"], cwd=work, env=variables, capture_output=True, timeout=60, check=False)
    started: list[object] = []
    for one in record.read_bytes().decode().split("\2\0")[:-1]:
        words, _, environment = one.partition("\1\0")
        exported = dict(text.split("=", 1) for text in environment.split("\0") if text.startswith("X"))
        started.append([words.split("\0")[:-1], exported])
    return started


def started_by_llmlaunch(text: str, folder: Path) -> list[object]:
    """Return what the same script starts where llmlaunch reads it. Words that bash drops disappear."""
    work = folder / "read"
    work.mkdir()
    script = read_script(text, "train.sh", work, (), {"HOME": str(folder)})
    assert [note for note in script.notes if "not read" in note] == []
    started: list[object] = []
    for command in script.commands:
        words = list(command.words)
        if words[0] in ("exec", "command"):
            del words[0]
        words = [word for word in words if word not in UNSET_WORDS]
        if words[0] in PROGRAMS:
            variables = {name: value for name, value in command.environment.items() if name.startswith("X")}
            started.append([words, variables])
    return started


# what stands in a word for a variable without a value, which is asked for where a value is needed
UNSET_WORDS = ("${UNSET}", "${NONE}", "${IMAGE}", "${ARGS}", "${C}", "${B}", "${T}", "${L}", "${E}", "${1}")


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_starts_what_bash_starts(text: str, tmp_path: Path) -> None:
    expected = started_by_bash(text, tmp_path)
    assert expected
    assert started_by_llmlaunch(text, tmp_path) == expected
    assert list((tmp_path / "read").iterdir()) == []
