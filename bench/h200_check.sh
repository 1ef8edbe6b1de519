#!/usr/bin/env bash
# Whether every backend is right on this GPU: bench/h200_check.sh FOLDER
# The conformance table, the cases that need a GPU, and compute-sanitizer's memcheck of a small run of each op.
set -uo pipefail
folder=$1 python=${PYTHON:-python3} limit=${LIMIT:-1200}
mkdir -p "$folder"
memcheck() { # NAME COMMAND...
    timeout "$limit" compute-sanitizer --tool memcheck "$python" "${@:2}" >"$folder/memcheck-$1.txt" 2>&1 &
}
memcheck_tests() { # NAME SELECTION
    memcheck "$1" -m pytest -q -p no:cacheprovider -W default -o timeout=500 tests/test_conformance.py -k "bfloat16 and $2"
}
for backend in cutile triton; do
    memcheck_tests $backend "$backend and (ragged_tail or decode_gate or boundary_in_chunk)"
    # By itself: an error ends the process, and slices of arrays have TMA descriptors that are made on the device.
    memcheck_tests $backend-packed "$backend and varlen_empty"
done
memcheck control bench/memcheck_control.py
"$python" bench/memcheck_control.py >"$folder/control.txt" 2>&1
# Interrupted, pytest still reports what it has done.
timeout --signal INT "$limit" "$python" -m pytest -q -p no:cacheprovider -W default -n "${WORKERS:-12}" -o timeout=300 --require-backends=cutile,triton,torch-reference \
    --junit-xml="$folder/check.xml" tests/test_conformance.py tests/test_field_cases.py tests/test_gpu.py "${@:2}" \
    >"$folder/check.log" 2>&1
wait
"$python" -m bench.about bench/h200_check.sh FOLDER "${@:2}" | tee "$folder/check.txt"
"$python" bench/check_table.py "$folder/check.xml" "$folder"/memcheck-*.txt "$folder/control.txt" | tee -a "$folder/check.txt"
