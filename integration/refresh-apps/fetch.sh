#!/bin/sh
# Lays out a root filesystem with the programs of the live refresh's table: nginx, node, Python's watchdog, Java, tail of
# coreutils, a Go program with fsnotify. All are packages of Debian bookworm; nothing is installed.
#   fetch.sh [DIR]        DIR is target/refresh-apps of the repository when not given
# Result: DIR/root. Quick when it is there already.
#
# Needs apt, dpkg-deb and patchelf (see matrix/setup.sh), and 1 GB.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"

# Fetches packages with all that they depend on, and unpacks them into TREE.
unpack_all() {
  tree=$1; shift
  suite_apt bookworm apt-get -qq install --yes --no-install-recommends --download-only "$@" >/dev/null
  mkdir -p "$tree"
  for package in "$apt_dir"/bookworm/cache/archives/*.deb; do dpkg-deb -x "$package" "$tree"; done
  rm -f "$apt_dir"/bookworm/cache/archives/*.deb
}

begin "$here/fetch.sh" "${1:-$here/../../target/refresh-apps}" root
suite_lists bookworm
root=$dir/making/root
unpack_all "$root" nginx-light nodejs python3-watchdog openjdk-17-jdk-headless coreutils busybox-static

# The two programs that are compiled: Go and Java have no such command.
unpack_all "$dir/making/go" golang-1.19-go golang-github-fsnotify-fsnotify-dev
mkdir -p "$root/apps" "$root/etc/app" "$root/tmp" "$root/proc" "$root/dev"
cp "$here"/watch.js "$here"/watch.py "$root/apps/"
go_tree=$dir/making/go
env -i PATH="$PATH" HOME="$dir/making" GO111MODULE=off CGO_ENABLED=0 GOROOT="$go_tree/usr/lib/go-1.19" GOPATH="$go_tree/usr/share/gocode" \
  GOCACHE="$dir/making/cache" GOFLAGS=-buildvcs=false \
  "$go_tree/usr/lib/go-1.19/bin/go" build -o "$root/apps/watch-go" "$here/go/watch.go"
cp "$here/Watch.java" "$root/apps/"
mount --bind /proc "$root/proc"
chroot "$root" /usr/lib/jvm/java-17-openjdk-amd64/bin/javac -d /apps /apps/Watch.java || failed=$?
umount "$root/proc"
[ -z "${failed:-}" ]
: > "$root/etc/app/app.conf"
# nginx: its workers' user
echo 'nobody:x:65534:65534::/nonexistent:/bin/false' > "$root/etc/passwd"
echo 'nogroup:x:65534:' > "$root/etc/group"
rm -rf "$go_tree" "$dir/making/cache"
finish root
