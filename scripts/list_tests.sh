#!/bin/sh
# Writes BUILD/CTestTestfile.cmake: one test a program of tests/unit, one a file of tests/multi and tests/parity.
# Usage: scripts/list_tests.sh BUILD
set -eu
build=$1
root=$(pwd)
python=/usr/bin/python3
out=$build/CTestTestfile.cmake
: >"$out"
# name label timeout_s command...
add() {
    name=$1 label=$2 limit=$3
    shift 3
    {
        printf 'add_test(%s' "$name"
        for word in "$@"; do printf ' "%s"' "$word"; done
        printf ')\nset_tests_properties(%s PROPERTIES LABELS %s TIMEOUT %s WORKING_DIRECTORY "%s" SKIP_RETURN_CODE 77)\n' \
            "$name" "$label" "$limit" "$root"
    } >>"$out"
}
for source in tests/unit/*/test_*.c; do
    name=${source#tests/unit/}
    name=${name%.c}
    add "unit/$name" unit 300 "$root/$build/tests/$name"
done
for source in tests/multi/test_*.py tests/parity/test_*.py; do
    [ -e "$source" ] || continue
    name=${source#tests/}
    add "${name%.py}" "$(dirname "$name")" "${TRIDENT_TEST_LIMIT_S:-1200}" \
        "$python" -m pytest -q -x -p no:cacheprovider "$root/$source"
done
for source in tests/tidy/test_*.py; do
    [ -e "$source" ] || continue
    name=${source#tests/}
    add "${name%.py}" tidy 300 "$python" "$root/$source"
done
