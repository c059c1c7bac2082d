#!/bin/sh
# Lays Podman, Docker and logrotate of Debian bookworm beside each other. Installs nothing.
#   fetch.sh [DIR]        DIR is target/doors of the repository when not given
# Result: DIR/bin/{podman,conmon,dockerd,docker,logrotate}, each of which runs as it is. Quick when they are there already;
# a run that was broken off, and a DIR that was moved, are noticed.
#
# Needs apt, dpkg-deb and patchelf (see matrix/setup.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"
suite=bookworm
programs='podman conmon dockerd docker logrotate'
packages='podman conmon docker.io logrotate'
# what the programs are linked with and few machines have
libraries='libgpgme11 libassuan0 libgpg-error0 libsubid4 libpopt0 libseccomp2 libdevmapper1.02.1 libsystemd0 libselinux1 libglib2.0-0 libsqlite3-0'

mkdir -p "${1:-$here/../../target/doors}"
dir=$(cd "${1:-$here/../../target/doors}" && pwd -P)
exec 9>"$dir/lock"
flock 9

stamp="$dir $(dpkg --print-architecture) $(cat "$here/fetch.sh" "$here/../debian.sh" | cksum)"
if [ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
rm -rf "$dir/stamp" "$dir/bin" "$dir/x" "$dir/making"
mkdir -p "$dir/making/deb" "$dir/making/bin" "$dir/x"

command -v patchelf >/dev/null || { echo "fetch.sh: patchelf is missing: run $here/../matrix/setup.sh" >&2; exit 1; }
echo "fetch.sh: podman, docker, logrotate" >&2
apt_dir=$dir/making
suite_lists "$suite"
# shellcheck disable=SC2086
(cd "$dir/making/deb" && suite_apt "$suite" apt-get -qq download $packages $libraries)
for package in "$dir"/making/deb/*.deb; do dpkg-deb -x "$package" "$dir/x"; done

found=$(find "$dir/x" -name '*.so.*' -exec dirname {} \; | sort -u | tr '\n' ':')
for program in $programs; do
  source=$(find "$dir/x/usr/bin" "$dir/x/usr/sbin" -name "$program" | head -n 1)
  [ -n "$source" ] || { echo "fetch.sh: no $program in $suite" >&2; exit 1; }
  if ldd "$source" 2>&1 | grep -q 'not found'; then
    cp -L "$source" "$dir/making/bin/$program"
    patchelf --force-rpath --set-rpath "$found" "$dir/making/bin/$program"
  else
    ln -s "$source" "$dir/making/bin/$program"
  fi
  "$dir/making/bin/$program" --version >/dev/null 2>&1
done
mv "$dir/making/bin" "$dir/bin"
rm -rf "$dir/making"
echo "$stamp" > "$dir/stamp"
