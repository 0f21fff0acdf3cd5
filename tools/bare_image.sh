#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What README and the guide tell a reader to type, on a machine with Python, git, make and a C++
# compiler: a fresh clone of HEAD, an empty home, no variables but pip's, none of the headers that
# are an option. As root those are hidden from this script alone, in a mount namespace.
#
#   tools/bare_image.sh [--quick]        (--quick: the demo with few conversations, some of the tests)
set -euo pipefail
cd "$(dirname "$0")/.."
work="$(mktemp -d)"
# Only what it made: the mounts go with the namespace.
trap 'rm -rf "$work"' EXIT
git clone -q --no-hardlinks . "$work/clone"

hidden=()
for header in liburing.h liburing xxhash.h xxh3.h xxh_x86dispatch.h; do
  if [ -e "/usr/include/$header" ]; then hidden+=("$header"); fi
done
enter=()
if [ "${#hidden[@]}" -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && unshare -m true 2> /dev/null; then
    cp -a /usr/include "$work/include"
    (cd "$work/include" && rm -rf "${hidden[@]}")
    # shellcheck disable=SC2016  # it is for the shell inside
    enter=(unshare -m sh -c 'mount --bind "$0" /usr/include && exec "$@"' "$work/include")
  else
    echo "bare_image: not hidden, since only root may: ${hidden[*]}"
  fi
fi

mkdir "$work/home"
kept=(HOME="$work/home" LANG=C.UTF-8 TMPDIR="${TMPDIR:-/tmp}")
# python3 may be a shim that needs its owner's home.
kept+=(PATH="$(python3 -c 'import sys; print(sys.base_prefix)')/bin:/usr/local/bin:/usr/bin:/bin")
kept+=(PIP_CACHE_DIR="$(python3 -m pip cache dir 2> /dev/null || echo "$work/pip")")
for file in "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  if [ -f "$file" ]; then kept+=(PIP_CONFIG_FILE="$file"); fi
done
# How a network is reached here is no part of the image.
while IFS='=' read -r name value; do
  case "$name" in
    PIP_*_DIR | PIP_CONFIG_FILE) ;;
    PIP_* | *_CA_BUNDLE | SSL_CERT_FILE | SSL_CERT_DIR | *_proxy | *_PROXY) kept+=("$name=$value") ;;
  esac
done < <(env)
cd "$work/clone"
"${enter[@]}" env -i "${kept[@]}" python3 tools/type_pages.py "$@"
