#!/bin/sh
# The measurements of bench/results: bench/h200.sh FOLDER [table|grid|models]
#   (none)  the table, then seqlen at dstate 128, in less than 8 minutes
#   table   the table, short rows, packed sequences, layers of models, and first calls
#   grid    seqlen by dstate, the article's
#   models  every released model at 1 x 8,192 and 8 x 2,048 tokens
set -eu
folder=$1 part=${2:-short}
case $part in
    short) set -- --sweep table --sweep seqlen --first-call ;;
    table) set -- --sweep table --sweep latency --sweep varlen --sweep layers --first-call ;;
    grid) set -- --sweep dstate ;;
    models) set -- --sweep models ;;
    *) echo "bench/h200.sh: there is no part $part" >&2 && exit 2 ;;
esac
mkdir -p "$folder"
exec "${PYTHON:-python3}" -m tilegym_mamba2 bench "$@" --peers --seconds 440 --json "$folder/$part.json" --plot "$folder/$part"
