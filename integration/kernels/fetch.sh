#!/bin/sh
# Fetches one kernel of each Debian suite. Installs nothing.
#   fetch.sh DIR
# Result: DIR/vmlinuz-VERSION, DIR/overlay-VERSION.ko, DIR/fuse-VERSION.ko where it is a module, and DIR/servers-VERSION with
# what the servers and clients of NFS and SMB are made of, named in the order of loading; for 6.1 (before
# MOVE_MOUNT_BENEATH and statmount), 6.12 and the newest. DIR/9p with a 6.1 that has a client of 9p. And DIR/systemd, a
# root filesystem with the systemd and the message bus of the suite that has 6.12.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../debian.sh"

mkdir -p "$1"
dir=$(cd "$1" && pwd -P)
stamp=$(cat "$here/fetch.sh" "$here/../debian.sh" | cksum)
[ "$(cat "$dir/stamp" 2>/dev/null)" != "$stamp" ] || exit 0
rm -rf "$dir/stamp" "$dir"/vmlinuz-* "$dir"/overlay-* "$dir"/fuse-* "$dir"/servers-* "$dir/9p" "$dir/systemd" "$dir/work"
apt_dir=$dir/work
PATH=$PATH:/usr/sbin:/sbin

# plain MODULE FILE: a copy that needs no unpacking any more
plain() {
  case $1 in
    *.xz) xz -dc "$1" > "$2" ;;
    *) cp "$1" "$2" ;;
  esac
}

# unpacked SUITE PACKAGE: a kernel's packages, unpacked into $tree; its $version and $image
unpacked() {
  echo "fetch.sh: $2 of $1" >&2
  # in newer suites the image and the modules lie in packages of their own, the image among the modules
  packages=$(suite_apt "$1" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances "$2" | grep -E '^linux-(image|binary|modules)-[0-9]')
  tree=$apt_dir/$1/$2
  mkdir -p "$tree"
  # shellcheck disable=SC2086
  (cd "$tree" && suite_apt "$1" apt-get -qq download $packages)
  for package in "$tree"/*.deb; do dpkg-deb -x "$package" "$tree"; done
  image=$(find "$tree" -type f -name 'vmlinuz*')
  case $image in
    */modules/*) version=${image%/*}; version=${version##*/} ;;
    *) version=${image##*/vmlinuz-} ;;
  esac
  [ -e "$tree/lib" ] || ln -s usr/lib "$tree/lib"
  depmod -b "$tree" "$version"
}

# modules DIR NAME...: those of the names that are modules in $tree, and what they need, numbered in the order of loading
modules() {
  into=$1; shift
  mkdir -p "$into"
  names=
  for name in "$@"; do
    [ -z "$(find "$tree" -name "$name.ko*")" ] || names="$names $name"
  done
  number=10
  # shellcheck disable=SC2086
  for found in $(modprobe -d "$tree" -S "$version" -a --show-depends $names | sed -n 's/^insmod //p' | awk '!seen[$0]++'); do
    name=${found##*/}
    plain "$found" "$into/$number-${name%%.*}.ko"
    number=$((number + 1))
  done
}

for suite in bookworm trixie sid; do
  suite_lists "$suite"
  unpacked "$suite" linux-image-cloud-amd64
  mv "$image" "$dir/vmlinuz-$version"
  for module in overlay fuse; do
    found=$(find "$tree" -name "$module.ko*")
    [ -z "$found" ] || plain "$found" "$dir/$module-$version.ko"
  done
  # What SMB signs and encrypts with is looked for by name once it is needed.
  modules "$dir/servers-$version" nfsd nfsv4 cmac ctr ccm ghash-generic gcm sha512_generic cifs ksmbd
done

# kernels for clouds have no 9p
unpacked bookworm linux-image-amd64
mkdir "$dir/9p"
mv "$image" "$dir/9p/vmlinuz-$version"
modules "$dir/9p/servers" virtio_pci 9pnet_virtio 9p

# What systemd would begin by itself goes, and what only takes time to unpack. The node of the stories has a service of its own.
libraries=$(suite_apt trixie apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
  --no-replaces --no-enhances systemd dbus-daemon | grep -E '^z?lib' | grep -v perl | sort -u)
# shellcheck disable=SC2086
unpack trixie "$apt_dir/systemd" systemd dbus dbus-daemon dbus-system-bus-common $libraries
mkdir -p "$dir/systemd/usr/share" "$dir/systemd/etc"
(cd "$apt_dir/systemd/usr" && rm -rf lib/*/gconv lib/*/perl* lib/systemd/system/*.wants lib/systemd/*-generators)
for part in bin lib lib64 share/dbus-1; do mv "$apt_dir/systemd/usr/$part" "$dir/systemd/usr/$part"; done
for folder in bin lib lib64; do ln -s "usr/$folder" "$dir/systemd/$folder"; done
printf '%s\n' root:x:0:0::/root:/bin/sh messagebus:x:100:100::/:/bin/false > "$dir/systemd/etc/passwd"
printf '%s\n' root:x:0: messagebus:x:100: > "$dir/systemd/etc/group"
echo 0123456789abcdef0123456789abcdef > "$dir/systemd/etc/machine-id"
rm -rf "$apt_dir"
echo "$stamp" > "$dir/stamp"
