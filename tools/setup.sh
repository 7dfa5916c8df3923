#!/bin/sh
# Finds a Python that llmrl runs on and hands over to setup.py. Usage: tools/setup.sh VENV
# PYTHON=/path/to/python chooses one.
set -u
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    if "$candidate" -c "$fits" >/dev/null 2>&1; then
        exec "$candidate" "$(dirname "$0")/setup.py" "$1"
    fi
done
found=$("${PYTHON:-python3}" --version 2>&1 || true)
echo "llmrl needs Python 3.11 or 3.12, and found only: ${found:-none}." >&2
echo "Install Python 3.11 (https://www.python.org/downloads/), or name one: make setup PYTHON=/path/to/python3.11" >&2
exit 1
