#!/usr/bin/env bash
# Run notebooks on a machine without a network and without this repository's history:  bash away.sh FROM OUT SECONDS [WORK]
# FROM has repo.bundle (git bundle create repo.bundle HEAD); the wheels that the machine's python3, which has torch, lacks
# (*.whl); to resume from, rows.tar.gz (tar czf rows.tar.gz data); and the lanes: lane0, lane1, ... are files for a GPU
# each, with its share of the cores, all at once; `together` is one for all GPUs, after them. A line is a notebook and
# papermill's arguments (compile -p sweep bf16). time_limit_s is what is left of SECONDS, unless the line has its own.
# OUT gets, after each line and each minute, rows-LANE.tar.gz (a folder `data`, for dev/take_rows.py) and runs-LANE.tar.gz
# (executed notebooks, logs). In a later FROM rows-LANE.tar.gz goes before rows.tar.gz. WORK (/tmp/a2lib-away) stays, and
# where it still is, lanes go on from its rows. Exit code: of a lane's last line that failed, 75 for one left out; 0: all ran.
set -u
begun=$(date +%s) limit=$3 from=$(realpath "$1") work=${4:-/tmp/a2lib-away} pids=() worst=0
mkdir -p "$2" "$work/a2lib" && out=$(realpath "$2") && work=$(realpath "$work") || exit 2
left() { echo $((limit - $(date +%s) + begun)); }
say() { echo "[$(($(date +%s) - begun)) s] $*"; }
cd "$work/a2lib" && git init -q && git fetch -q "$from/repo.bundle" HEAD &&
  git checkout -q --force --detach FETCH_HEAD || exit 3
python3 -m pip install -q --no-index --no-deps --upgrade --target "$work/site" "$from"/*.whl || exit 4
export PYTHONPATH=$work/site:$work/a2lib/src PATH=$work/site/bin:$PATH TORCHINDUCTOR_COMPILE_THREADS=1
say "commit $(git rev-parse --short HEAD), $(git status --porcelain | wc -l) files changed"

pack() { # in one step each, so that a cut-off leaves the one before
  for what in data:rows runs:runs; do
    nice tar czf "$out/${what#*:}.$1.part" -C "$work/$1" "${what%:*}"
    mv "$out/${what#*:}.$1.part" "$out/${what#*:}-$1.tar.gz"
  done
}
packing() { # what ends the machine may come before a line ends
  trap 'kill $! 2> /dev/null; exit' TERM
  while sleep 60 & wait $!; do pack "$1" 2> /dev/null; done
}
lane() {
  local n=0 worst=0 book args rc rows name packer to=$work/$1/runs
  mkdir -p "$to"
  for rows in "$from/rows-$1.tar.gz" "$from/rows.tar.gz"; do
    [ -d "$work/$1/data" ] || [ ! -f "$rows" ] || tar xzf "$rows" -C "$work/$1" || return 5
  done
  mkdir -p "$work/$1/data"
  while read -r book args <&3; do
    n=$((n + 1)) name=$1-$n-$book
    [ "$(left)" -ge 30 ] || { say "$name: left out" && worst=75 && continue; }
    say "$name $args"
    packing "$1" & packer=$!
    # shellcheck disable=SC2086
    A2LIB_DATA=$work/$1/data timeout -k 5 $(($(left) - 10)) papermill "notebooks/$book.ipynb" "$to/$name.ipynb" \
      --no-progress-bar -p time_limit_s $(($(left) - 20)) $args > "$to/$name.log" 2>&1 < /dev/null
    rc=$?
    kill $packer
    wait $packer 2> /dev/null
    say "$name: exit code $rc; $(tail -n 1 "$to/$name.log" | cut -c1-200)"
    [ $rc = 0 ] || worst=$rc
    [ $rc != 124 ] || sleep 3 # kernel and workers see that it is gone
    pack "$1"
  done 3< <(grep . "$from/$1")
  return $worst
}

lanes=("$from"/lane[0-9]*)
mapfile -t cores < <(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
for i in "${!lanes[@]}"; do
  [ -f "${lanes[i]}" ] || continue # none: `together` alone
  own=${cores[*]:i*(${#cores[@]} / ${#lanes[@]}):${#cores[@]} / ${#lanes[@]}} name=$(basename "${lanes[i]}")
  (export CUDA_VISIBLE_DEVICES="${name#lane}" && taskset -cp "${own// /,}" $BASHPID > /dev/null && lane "$name") &
  pids+=($!)
done
for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid" || worst=$?; done
[ ! -f "$from/together" ] || lane together || worst=$?
exit "$worst"
