#!/bin/sh
# Fetches one kernel of each Debian suite. Installs nothing.
#   fetch.sh DIR
# Result: DIR/vmlinuz-VERSION, DIR/overlay-VERSION.ko, DIR/fuse-VERSION.ko where it is a module, and DIR/nfs-VERSION with
# what NFS' server and client are made of, named in the order of loading; for 5.10 (before MOVE_MOUNT_BENEATH and
# statmount), 6.1, 6.12 and the newest.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"

mkdir -p "$1"
dir=$(cd "$1" && pwd -P)
stamp=$(cat "$here/fetch.sh" "$here/../debian.sh" | cksum)
[ "$(cat "$dir/stamp" 2>/dev/null)" != "$stamp" ] || exit 0
rm -rf "$dir/stamp" "$dir"/vmlinuz-* "$dir"/overlay-* "$dir"/fuse-* "$dir"/nfs-* "$dir/work"
apt_dir=$dir/work
PATH=$PATH:/usr/sbin:/sbin

# plain MODULE FILE: a copy that needs no unpacking any more
plain() {
  case $1 in
    *.xz) xz -dc "$1" > "$2" ;;
    *) cp "$1" "$2" ;;
  esac
}

for suite in bullseye bookworm trixie sid; do
  echo "fetch.sh: a kernel of $suite" >&2
  suite_lists "$suite"
  # in newer suites the image and the modules lie in packages of their own, the image among the modules
  packages=$(suite_apt "$suite" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances linux-image-cloud-amd64 | grep -E '^linux-(image|binary|modules)-[0-9]')
  mkdir -p "$apt_dir/$suite/x"
  # shellcheck disable=SC2086
  (cd "$apt_dir/$suite" && suite_apt "$suite" apt-get -qq download $packages)
  for package in "$apt_dir/$suite"/*.deb; do dpkg-deb -x "$package" "$apt_dir/$suite/x"; done
  image=$(find "$apt_dir/$suite/x" -type f -name 'vmlinuz*')
  case $image in
    */modules/*) version=${image%/*}; version=${version##*/} ;;
    *) version=${image##*/vmlinuz-} ;;
  esac
  mv "$image" "$dir/vmlinuz-$version"
  tree=$apt_dir/$suite/x
  [ -e "$tree/lib" ] || ln -s usr/lib "$tree/lib"
  for module in overlay fuse; do
    found=$(find "$tree" -name "$module.ko*")
    [ -z "$found" ] || plain "$found" "$dir/$module-$version.ko"
  done
  depmod -b "$tree" "$version"
  mkdir "$dir/nfs-$version"
  number=10
  for found in $(modprobe -d "$tree" -S "$version" -a --show-depends nfsd nfsv4 | sed -n 's/^insmod //p' | awk '!seen[$0]++'); do
    name=${found##*/}
    plain "$found" "$dir/nfs-$version/$number-${name%%.*}.ko"
    number=$((number + 1))
  done
done
rm -rf "$apt_dir"
echo "$stamp" > "$dir/stamp"
