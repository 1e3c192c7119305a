#!/usr/bin/env bash
# Makes .venv and installs the course into it, at the versions of constraints.txt. Does nothing when that is done already.
# PYTHON=/path/to/python chooses the interpreter. Exit 1 with one reason and what to do when a step is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

stop() {
    printf 'Set-up stopped: %s\n  What to do: %s\n' "$1" "$2" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || stop "PYTHON=$PYTHON is not a Python 3.11 or newer." "name another, or leave PYTHON out."
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        if is_new_enough "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    stop "no Python 3.11 or newer was found (looked for python3, python3.11, python3.12, python3.13, python)." \
        "install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.12), or name yours: make lab PYTHON=/path/to/python3"
}

# Passes on the lines of pip that show how far it is. In the shell, because awk and grep may hold lines back in a pipe.
show_progress() {
    while IFS= read -r line; do
        case $line in
            Collecting* | *Downloading\ * | Installing* | Successfully*) printf '%.100s\n' "$line" ;;
        esac
    done
}

show_that_it_lives() {
    while sleep 15 >/dev/null 2>&1; do
        printf '  still at it: %d s so far\n' "$SECONDS"
    done
}

fingerprint() { cat pyproject.toml constraints.txt scripts/setup.sh && pwd; }

if [ -f .venv/installed ] && [ "$(fingerprint | cksum)" = "$(cat .venv/installed)" ]; then
    exit 0
fi

python=$(find_python)
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    stop "$python has no venv module, so no separate environment can be made." \
        "install it (Debian, Ubuntu: apt install python3-venv), or name another Python: make lab PYTHON=/path/to/python3"
[ -w . ] || stop "the folder $(pwd) cannot be written to." "clone the repository into a folder of your own."

printf 'Setting up .venv with %s. The first time takes 2 to 5 minutes, mostly the download of torch.\n' "$("$python" --version)"
if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1 || ! is_new_enough .venv/bin/python; then
    rm -rf .venv
    "$python" -m venv .venv
fi

# DeepSpeed comes as source. Its compiled operations are left out, whatever the environment says: they need a compiler, and
# the course uses none of them.
export DS_BUILD_OPS=0

log=.venv/setup.log
show_that_it_lives &
heartbeat=$!
trap 'kill "$heartbeat" 2>/dev/null || true' EXIT
if ! .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[dev]' 2>&1 |
    tee "$log" | show_progress; then
    sed -n '/conflict is caused by/,/^$/p' "$log" >&2
    tail -n 5 "$log" >&2
    if grep -qiE 'from versions: none|NewConnectionError|name resolution|Network is unreachable|Connection refused|timed out|ProxyError|NameResolutionError' "$log"; then
        stop "pip could not reach a package index (last lines above)." \
            "connect to the network and run the same command again; behind a mirror set PIP_INDEX_URL, offline set PIP_FIND_LINKS to a folder of wheels."
    fi
    stop "pip could not install the packages (its reason is above, all of it in $log)." \
        "if a version is not found for your Python, try Python 3.11: make lab PYTHON=python3.11; then run the same command again."
fi

# JupyterLab finds nbgrader's and the widgets' extensions in .venv by itself; these settings keep its pop-ups away.
mkdir -p .venv/share/jupyter/lab/settings
cat >.venv/share/jupyter/lab/settings/overrides.json <<'JSON'
{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}
JSON
extensions=$(.venv/bin/python -m jupyter labextension list 2>&1)
grep -q '@jupyter/nbgrader.*enabled' <<<"$extensions" ||
    stop "JupyterLab does not see nbgrader's extension." "remove .venv and run the same command again; see $log."
fingerprint | cksum >.venv/installed
printf 'Set-up done.\n'
