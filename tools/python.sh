#!/usr/bin/env bash
# Prints the Python 3.11 that the environment is made with; installs it by apt where it is missing.
# The engine's kernels also need libnuma. Everything but the path goes to stderr.
set -euo pipefail

say() { echo "setup: $*" >&2; }

usable() { # a 3.11 that can make environments with pip in them (Debian packages that part apart)
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3 /usr/bin/python3.11; do
        if usable "$name"; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

apt_install() {
    say "installing with apt: $*"
    local root=()
    [ "$(id -u)" = 0 ] || root=(sudo)
    command -v apt-get >/dev/null || { say "no apt-get here; please install $* yourself"; exit 1; }
    "${root[@]}" apt-get -qq update >&2
    DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get -qq -y install "$@" >&2 || {
        say "apt cannot install $*. Needed is a CPython 3.11 with venv: install one (pyenv, uv, the"
        say "distribution's own archive) and run: make venv PYTHON=/path/to/python3.11"
        exit 1
    }
}

python=$(find_python) || { apt_install python3.11 python3.11-venv && python=$(find_python); } || {
    say "no usable Python 3.11; run: make venv PYTHON=/path/to/python3.11"
    exit 1
}
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || apt_install libnuma1
echo "$python"
