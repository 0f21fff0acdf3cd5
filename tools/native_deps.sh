#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Puts the headers of xxHash and liburing, and a static liburing, under a prefix (/usr/local), for
# wheels that need neither where they are installed. Debian's packages do as well:
# liburing-dev, libxxhash-dev. Needs git, make and a C compiler.
#
#   tools/native_deps.sh [PREFIX]
set -eu
prefix="${1:-/usr/local}"
sources="$(mktemp -d)"
trap 'rm -rf "$sources"' EXIT

# A commit names its content: a tag that was moved ends this.
get() { # REPOSITORY TAG COMMIT
  git -c advice.detachedHead=false clone -q --depth 1 --branch "$2" "https://github.com/$1" "$sources/${1#*/}"
  found="$(git -C "$sources/${1#*/}" rev-parse HEAD)"
  if [ "$found" != "$3" ]; then
    echo "native_deps: $1 $2 is commit $found; expected $3. Nothing is installed." >&2
    exit 1
  fi
}

get Cyan4973/xxHash v0.8.2 bbb27a5efb85b92a0486cf361a8635715a53f6ba
get axboe/liburing liburing-2.15 d41bf9220ec39277ff235379e9089d9e0fd6c2a5
mkdir -p "$prefix/include"
cp "$sources/xxHash/xxhash.h" "$prefix/include"
cd "$sources/liburing"
# libdevdir: /usr/local/lib, where every linker looks.
./configure --prefix="$prefix" --libdevdir="$prefix/lib" > configure.out
# Without a shared library, so that none can be linked.
make -s -C src ENABLE_SHARED=0 CFLAGS="-O3 -fPIC" install > /dev/null
