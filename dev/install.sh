#!/bin/sh
# Make the environment: dev/install.sh [VENV]   (`make install` calls it, and again when the pins change)
#
#   PYTHON    the interpreter to build on, 3.11 or newer          (python3)
#   TORCH     what to ask pip for instead of the choice below     (say 'torch==2.11.0')
#   PINS      file of exact versions; empty for the newest        (dev/constraints.txt)
#
# Each step is a line with the seconds it took; what pip says is in build/install.log, and its end is shown where it fails.
# Without a GPU torch is the pinned CPU build, asked for by its full name: a plain 'torch' is several GB of CUDA
# packages on Linux. With one it is the newest CUDA build that the pins allow, and the triton that it brings.
# Nothing is read from standard input, so it may be closed.
set -eu
exec </dev/null
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}
pins=${PINS-dev/constraints.txt}
started=$(date +%s)
log=build/install.log
mkdir -p build
: >"$log"
say() { printf 'install: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# step WORDS COMMAND...: say what it is, run a command whose output goes to the log, and say how long it takes: on a
# terminal every second, with the log's last line, elsewhere every half minute.
step() {
    words=$1; shift
    begin=$(date +%s)
    printf '== %s\n' "$words" >>"$log"
    [ -t 2 ] || say "$words"
    tick "$$" "$words" & ticker=$!
    trap 'kill "$ticker" 2>/dev/null || true' EXIT
    code=0; "$@" >>"$log" 2>&1 || code=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    trap - EXIT
    if [ -t 2 ]; then
        printf '\r\033[K' >&2
        say "$words: $(($(date +%s) - begin)) s"
    fi
    return "$code"
}
tick() {
    seconds=0
    while kill -0 "$1" 2>/dev/null; do  # what ends this script ends it too
        if [ -t 2 ]; then
            printf '\r\033[Kinstall: %s: %s s  %.50s' "$2" "$seconds" "$(tail -n 1 "$log" | sed '/^== /d')" >&2
        elif [ "$seconds" -gt 0 ] && [ $((seconds % 30)) -eq 0 ]; then
            say "  $seconds s so far"
        fi
        sleep 1 >/dev/null 2>&1  # it may outlive this by a moment, and holds no pipe open
        seconds=$((seconds + 1))
    done
}
# reason WORDS: end, with the last lines of what failed.
reason() {
    tail -n 12 "$log" >&2
    die "$*; the lines above are the end of $log"
}

# --- the environment itself -----------------------------------------------------------------------------------
where=$venv/.a2lib-where
case $venv in
    /*) ;;  # someone else's, conda's say, and used from anywhere
    *) if [ -f "$where" ] && [ "$(cat "$where")" != "$(pwd -P)" ]; then
           say "$venv is a copy of one made in another folder; making it anew"
           rm -rf "$venv"
       fi ;;
esac
version() { "$1" -c 'import platform; print(platform.python_version())'; }
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    command -v "$python" >/dev/null || die "no '$python' here; install Python 3.11 or newer, or run: make PYTHON=/path/to/python3"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "a2lib needs Python 3.11 or newer, '$python' is $(version "$python"); run: make PYTHON=/path/to/python3.11"
    "$python" -c 'import venv, ensurepip' 2>/dev/null || die "'$python' cannot make environments; on Debian or Ubuntu: apt install python3-venv"
    step "making $venv with $("$python" --version)" "$python" -m venv --clear "$venv" || reason "'$python' could not make $venv"
fi
bin=$venv/bin
[ -z "${PYTHON:-}" ] || [ "$(version "$python" 2>&1)" = "$(version "$bin/python")" ] ||
    say "$venv is there, with Python $(version "$bin/python"): for '$python' run make distclean first"
pip() { "$bin/python" -m pip --disable-pip-version-check "$@"; }
"$bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$venv is of a Python older than 3.11: remove it (make distclean) and run make again"

# --- which torch ----------------------------------------------------------------------------------------------
has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
torch_here() { "$bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true; }
own_source() { pip config list 2>/dev/null | grep -Eq "(find-links|index-url)='..*'"; }

used_pins=$venv/a2lib-constraints.txt
if [ -n "$pins" ]; then cat "$pins" >"$used_pins"; else : >"$used_pins"; fi
pinned() { sed -n "s/^# \($1==\)/\1/p" dev/constraints.txt; }
install() { pip install --no-compile --progress-bar off -c "$used_pins" "$@"; }  # pip compiles on one core: at the end, on all

build=cpu
if has_gpu; then
    build=cuda
else
    # A file system shared with machines that have a GPU: what serves them serves here too.
    case $(torch_here) in ''|*+cpu) ;; *) [ "$(uname)" != Linux ] || build=cuda ;; esac
fi

if [ "$build" = cuda ]; then
    case $(torch_here) in *+cpu) pip uninstall -q -y torch triton ;; esac
    torch=${TORCH:-torch>=2.11}
    step "installing $torch, the CUDA build (several GB)" install "$torch" || reason "pip could not install $torch"
else
    torch=${TORCH:-$(pinned torch)}
    if [ -z "${TORCH:-}" ] && [ "$(uname)" = Linux ]; then
        torch=$torch+cpu
        [ -z "$pins" ] || pinned triton >>"$used_pins"
    fi
    cpu_index=https://download.pytorch.org/whl/cpu
    # pip's own configuration first, where it names a source: a mirror, or a folder of packages.
    { own_source && step "installing $torch (some 200 MB)" install "$torch"; } ||
        step "installing $torch from $cpu_index (some 200 MB)" install --extra-index-url "$cpu_index" "$torch" ||
        reason "no $torch in pip's sources nor at $cpu_index; to take another: make TORCH='torch>=2.11'"
fi

# --- everything else; torch is named again so that nothing can replace it ---------------------------------------
step "installing a2lib and what it needs ($(grep -c == dev/constraints.txt) packages, a minute or two)" \
    install -e '.[dev]' "torch==$(torch_here)" || reason "pip could not install a2lib and its dependencies"
# Some files are templates, and no Python: what cannot be compiled is left.
step "compiling it" "$bin/python" -m compileall -qq -j 0 -x '/tests/' "$venv/lib" || true
# matplotlib's list of fonts, which takes its time and would be a warning in the first page or notebook that draws.
rm -rf build/matplotlib
step "listing the fonts" env MPLCONFIGDIR="$PWD/build/matplotlib" "$bin/python" -c 'import matplotlib.font_manager' || true
pwd -P >"$where"
say "done in $(($(date +%s) - started)) s: torch $(torch_here) in $venv"
