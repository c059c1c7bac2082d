#!/bin/sh
# Lays three generations of containerd, with their shim, runc and crun, beside each other. Installs nothing.
#   fetch.sh [DIR]        DIR is target/matrix of the repository when not given
# Result: DIR/v/SUITE/bin/{containerd,ctr,containerd-shim-runc-v2,runc,crun} for the Debian suites below, each of which
# runs as it is; the newest has criu, too: an older one does not know newer kernels. Quick when they are there already. A run that was broken off, and a DIR that was moved (its path is
# baked into some of the programs), are noticed, and everything is laid out anew.
#
# Needs apt, dpkg-deb and patchelf (see setup.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
suites='bookworm trixie sid'
programs='containerd ctr containerd-shim-runc-v2 runc crun'
newest=sid

mkdir -p "${1:-$here/../../target/matrix}"
dir=$(cd "${1:-$here/../../target/matrix}" && pwd -P)
exec 9>"$dir/lock"
flock 9

# The stamp says what was laid out, where, and by which edition of this script.
stamp="$dir $(dpkg --print-architecture) $(cat "$here/fetch.sh" "$here/../debian.sh" | cksum)"
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
rm -rf "$dir/stamp" "$dir/v" "$dir/x" "$dir/making"
mkdir -p "$dir/making"

command -v patchelf >/dev/null || { echo "fetch.sh: patchelf is missing: run $here/setup.sh" >&2; exit 1; }
apt_dir=$dir/making

# criu only where it is of use
with_criu() {
  if [ "$1" = "$newest" ]; then echo criu; fi
}

download() {
  suite=$1; packages=$dir/making/$suite/deb; more=$(with_criu "$suite")
  suite_lists "$suite"
  libraries=$(suite_apt "$suite" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances runc crun $more | grep '^lib' | sort -u)
  mkdir -p "$packages" "$dir/x/$suite"
  # shellcheck disable=SC2086
  (cd "$packages" && suite_apt "$suite" apt-get -qq download containerd runc crun $more $libraries)
  for package in "$packages"/*.deb; do dpkg-deb -x "$package" "$dir/x/$suite"; done
}

# A program that wants a newer C library than the machine's gets its own suite's loader and libraries baked in. A wrapper
# around ld.so would not do for runc, which executes /proc/self/exe again.
lay_out() {
  suite=$1; x=$dir/x/$suite; bin=$dir/making/v/$suite/bin
  mkdir -p "$bin"
  loader=$(find "$x" -name 'ld-linux*.so.*' | head -n 1)
  libraries=$(find "$x" -name 'libc.so.6' -exec dirname {} \; | head -n 1)
  libraries=$libraries:$x/usr/lib/${libraries##*/}
  for program in $programs $(with_criu "$suite"); do
    source=$(find "$x/usr/bin" "$x/usr/sbin" -name "$program" | head -n 1)
    [ -n "$source" ] || { echo "fetch.sh: no $program in $suite" >&2; exit 1; }
    if ldd "$source" 2>&1 | grep -q 'not found'; then
      cp -L "$source" "$bin/$program"
      patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$bin/$program"
    else
      ln -s "$source" "$bin/$program"
    fi
    case $program in *shim*) flag=-v ;; *) flag=--version ;; esac
    "$bin/$program" $flag >/dev/null
  done
}

for suite in $suites; do
  echo "fetch.sh: $suite" >&2
  download "$suite"
  lay_out "$suite"
done
mv "$dir/making/v" "$dir/v"
rm -rf "$dir/making"
echo "$stamp" > "$dir/stamp"
