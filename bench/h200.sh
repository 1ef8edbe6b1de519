#!/usr/bin/env bash
# The measurements of bench/results: bench/h200.sh FOLDER [PART]
#   all     (default) everything below, what counts most first
#   table   the table, packed sequences, short rows, layers of models, and first calls
#   models  every released model at 8 x 2,048 and 1 x 8,192 tokens
#   grid    seqlen by dstate, the article's
#   dtypes  float16 and float32
# It begins nothing after SECONDS_AT_MOST (470); what was measured until then is in FOLDER/PART.json. If an
# implementation makes the GPU unusable, the rest is measured by a new process.
set -u
folder=$1 part=${2:-all} limit=${SECONDS_AT_MOST:-470} python=${PYTHON:-python3}
backends=${BACKENDS:-cutile,triton,mamba_ssm,tilegym}
table="--sweep table" others="--sweep varlen --sweep latency --sweep layers"
case $part in
    all) what="$table --sweep models $others --sweep dstate --sweep dtypes --first-call" ;;
    table) what="$table $others --first-call" ;;
    models) what="--sweep models" ;;
    grid) what="--sweep dstate" ;;
    dtypes) what="--sweep dtypes" ;;
    *) echo "bench/h200.sh: there is no part $part" >&2 && exit 2 ;;
esac
mkdir -p "$folder"
rm -f "$folder/$part.json"
for _ in 1 2 3; do
    # shellcheck disable=SC2086 # words
    "$python" -m tilegym_mamba2 bench $what --backends "$backends" --resume --json "$folder/$part.json" \
        --plot "$folder/$part" --seconds $((limit - SECONDS))
    status=$?
    [ $status -eq 3 ] && [ $SECONDS -lt $limit ] || exit $status
done
exit $status
