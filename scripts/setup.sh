#!/bin/sh
# Installs what Trident needs and this machine lacks, from Debian's packages. Does nothing twice.
# Usage: scripts/setup.sh [build|check|bench]
# build: to compile and train; check: also what the tests need; bench: also the peer of the benchmark
set -eu

build_packages="
gcc:the_compiler
make:builds
pkg-config:finds_test_libraries
libc6-dev:C_library_headers
libopenblas-openmp-dev:matrix_products_(fp64,_and_fp32_without_AVX2)
libjansson-dev:JSON_of_manifests_and_tokenizers
libxxhash-dev:checksums_of_checkpoints
libpcre2-dev:the_word_pattern_of_GPT-2's_tokenizer
python3:prepares_the_example_text"
check_packages="
cmake:ctest_runs_the_tests
check:unit_tests_in_C
libsubunit-dev:a_library_that_check_is_linked_with
python3-pytest:tests_of_whole_runs
libpmi2-0:client_library_of_the_PMI2_launcher
procps:tests_look_at_processes
clang-14:second_compiler,_fuzzing
libclang-rt-14-dev:clang's_sanitizers
clang-format-14:the_code's_format"
bench_packages="
python3-torch:the_peer_of_the_benchmark
libopenblas0-openmp:the_peer's_matrix_products"

case "${1:-build}" in
build) wanted=$build_packages ;;
check) wanted="$build_packages$check_packages" ;;
bench) wanted="$build_packages$bench_packages" ;;
*) echo "setup.sh: build, check or bench, not '$1'" >&2; exit 2 ;;
esac

missing=""
for entry in $wanted; do
    package=${entry%%:*}
    if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "install ok installed"; then
        missing="$missing $package"
        echo "setup: $package is missing: $(echo "${entry#*:}" | tr _ ' ')"
    fi
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "setup: this is no Debian system; install the equivalents of:$missing" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null; then
    as_root=sudo
else
    echo "setup: neither root nor sudo here; ask an administrator for: apt-get install$missing" >&2
    exit 1
fi
$as_root apt-get update -q >/dev/null || echo "setup: apt-get update failed; trying with what apt knows" >&2
printed=$(mktemp)
trap 'rm -f "$printed"' EXIT
# shellcheck disable=SC2086
if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing \
    >"$printed" 2>&1; then
    tail -20 "$printed" >&2
    echo "setup: apt-get could not install:$missing" >&2
    exit 1
fi
echo "setup: installed$missing"
