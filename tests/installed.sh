#!/usr/bin/env bash
# Build an sdist and a wheel of it, and run the fast tests against the files that the wheel installs.
# Tests call functions that wheels leave out (PYRL_TESTS); dependencies are those of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=$PWD/.venv/bin
INSTALLED=build/installed
rm -rf "$INSTALLED" dist
mkdir -p "$INSTALLED"
"$BIN/python" -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
tar xzf dist/*.tar.gz -C "$INSTALLED" --strip-components 1
"$BIN/pip" wheel --quiet --no-deps --no-build-isolation -C cmake.define.PYRL_TESTS=ON -w dist "$INSTALLED"
"$BIN/python" -m venv "$INSTALLED/venv"
"$INSTALLED/venv/bin/pip" install --quiet --no-deps dist/*.whl
site=$("$INSTALLED/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/dependencies.pth"
rm -rf "$INSTALLED/pyrl_ext"
ln -s "$site/pyrl_ext" "$INSTALLED/pyrl_ext"
cd "$INSTALLED"
OMP_NUM_THREADS=1 venv/bin/python -m pytest -q --no-header -p no:cacheprovider -n 2 \
  -m "not slow and not vllm and not multiprocess"
