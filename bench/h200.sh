#!/usr/bin/env bash
# The measurements of bench/results: bench/h200.sh FOLDER [PART]
#   all           (default) the four below, what counts most first
#   table         the table, packed sequences, short rows, layers of models, and first calls
#   dtypes        float16 and float32
#   grid          seqlen by dstate, the article's
#   models        every released model at 8 x 2,048 and 1 x 8,192 tokens
#   slow          the table on torch-reference, torch.compile of it and transformers' torch path
#   transformers  prefill and decode of whole models, 3 minutes: FOLDER/transformers.json
#   pytest        a part of `pytest bench`, one minute: FOLDER/pytest.txt; SELECT is its -k
# It begins nothing after SECONDS_AT_MOST (520, of slow 240); what was measured until then is in FOLDER/PART.json. If an
# implementation makes the GPU unusable, the rest is measured by a new process.
set -u
folder=$1 part=${2:-all} limit=${SECONDS_AT_MOST:-520} python=${PYTHON:-python3}
backends=${BACKENDS:-cutile,triton,mamba_ssm,tilegym}
table="--first-call --sweep table --sweep varlen --sweep latency --sweep layers"
mkdir -p "$folder"
case $part in
    all) what="$table --sweep dtypes --sweep dstate --sweep models" ;;
    table) what=$table ;;
    dtypes) what="--sweep dtypes" ;;
    grid) what="--sweep dstate" ;;
    models) what="--sweep models" ;;
    slow)
        what="--sweep table" limit=${SECONDS_AT_MOST:-240}
        # transformers last: it takes what memory the others leave.
        backends=${BACKENDS:-cutile,triton,torch-reference,torch.compile,transformers}
        ;;
    transformers)
        seconds=$((limit < 180 ? limit : 180))
        exec "$python" bench/transformers_models.py "$folder/transformers.json" --seconds $seconds
        ;;
    pytest)
        # Of the forward, peers that search or compile for minutes are left out.
        stages="(headline-128 or batch16) and not mamba_ssm"
        forward="chunk_scan and latency-256 and not (mamba_ssm or tilegym or compile)"
        select=${SELECT:-"$stages or $forward"}
        "$python" -m bench.about bench/h200.sh FOLDER pytest >"$folder/pytest.txt"
        # Interrupted, pytest still reports what it has done.
        timeout --signal INT $((limit < 120 ? limit : 120)) "$python" -m pytest bench -q -rs -p no:cacheprovider -W default -k "$select" \
            --benchmark-columns=min,median,max,rounds --benchmark-sort=fullname >>"$folder/pytest.txt" 2>&1
        status=$?
        cat "$folder/pytest.txt"
        exit $status
        ;;
    *) echo "bench/h200.sh: there is no part $part" >&2 && exit 2 ;;
esac
rm -f "$folder/$part.json"
for _ in 1 2 3; do
    # shellcheck disable=SC2086 # words
    "$python" -m tilegym_mamba2 bench $what --backends "$backends" --resume --json "$folder/$part.json" \
        --plot "$folder/$part" --seconds $((limit - SECONDS))
    status=$?
    [ $status -eq 3 ] && [ $SECONDS -lt $limit ] || exit $status
done
exit $status
