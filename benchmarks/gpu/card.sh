#!/usr/bin/env bash
# Everything that waits for a card, in one call of less than ten minutes; run it in the project's root.
#
#   benchmarks/gpu/card.sh FOLDER [--tiny --cpu]       FOLDER gets the output of each part
#
# Environment: PYTHON, the interpreter (default python3); TRL_PYTHON, one that has TRL (default: PYTHON if it has TRL).
# Parts in the order of what is worth most; one that fails or takes too long does not end the others.
set -u
folder=${1:?FOLDER for the output} python=${PYTHON:-python3} here=$(dirname "$0")
shift
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
shape=(--shape 1.7b) tests=(tests/trainer/engines tests/trainer/policy tests/trainer/run) steps=6
if [[ " $* " == *" --tiny "* ]]; then
    shape=() tests=(tests/trainer/engines/test_engine_sampling.py) steps=3
fi
patience=1
[[ " $* " == *" --cpu "* ]] && export CUDA_VISIBLE_DEVICES= && patience=4
trl=(--no-trl)
for candidate in ${TRL_PYTHON:-} "$python"; do
    if "$candidate" -c 'import trl' 2> /dev/null; then
        trl=(--trl-python "$(command -v "$candidate")")
        break
    fi
done

part() { # NAME SECONDS COMMAND…
    local name=$1 seconds=$(($2 * patience)) begin=$SECONDS
    shift 2
    timeout -k 5 "$seconds" "$@" > "$folder/$name.txt" 2>&1
    echo "== $name: exit $?, $((SECONDS - begin)) s"
    tail -n 12 "$folder/$name.txt"
}

for place in "${tests[@]}"; do # beside the others: tests do not fill a card
    name=tests-$(basename "$place" .py)
    part "$name" 420 "$python" -m pytest -q --no-header -m "not slow" "$place" > "$folder/$name.summary" &
done
part decoding 120 "$python" "$here/decoding.py" "${shape[@]}" "$@"
part training 150 "$python" "$here/training.py" "${shape[@]}" --steps $steps --profile "${trl[@]}" "$@"
part compiled 120 "$python" "$here/training.py" "${shape[@]}" --steps $steps --compile --no-trl "$@"
part weight_sync 60 "$python" "$here/weight_sync.py" "${shape[@]}" "$@"
wait
cat "$folder"/*.summary
