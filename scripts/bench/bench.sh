#!/bin/sh
# Runs every benchmark and prints its table; each program says what it compares and how.
# Usage: scripts/bench/bench.sh BUILD
set -eu
bench=$1/bench
for threads in 1 2; do
    echo "== matrix products, $threads thread(s), beside OpenBLAS in the same run"
    "$bench/gemm_bench" "$threads"
    echo "== attention, $threads thread(s)"
    "$bench/attention_bench" "$threads"
done
echo "== communication between processes of this machine"
"$bench/comm_bench"
